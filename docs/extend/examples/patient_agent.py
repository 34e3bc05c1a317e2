"""An agent that tries a few times, and pays a little when it gives up."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import httpx


async def rollout(
    task: Mapping[str, Any],
    base_url: str,
    session: Any,
    *,
    attempts: int = 3,
    given_up: float = -0.1,
) -> float | None:
    """Play one episode. Returns its reward, or None for the one that the environment gave."""
    messages = [{"role": "user", "content": session.text}]
    # The model is on this machine, so neither proxies nor certificates have a part in it.
    local = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    async with httpx.AsyncClient(base_url=base_url, timeout=None, trust_env=False, verify=local) as model:
        for _ in range(attempts):
            reply = await model.post("chat/completions", json={"model": "policy", "messages": messages})
            if reply.status_code == 400:  # turn_limit or context_length_exceeded: a truncated episode is valid
                return None
            said = reply.raise_for_status().json()["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": said})
            answer = await session.step(said.strip())
            if answer.done:
                return None
            messages += answer.messages
    return given_up
