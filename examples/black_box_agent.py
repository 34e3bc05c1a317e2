"""A black-box agent: a program that knows a base URL and the environment of its episode, and nothing of training.

    python -m realhf.launch experiment=grpo_async env=sql rollout.agent=examples/black_box_agent.py:rollout

Given in the folder of the checkout, the command trains the model behind the base URL while agents like this one use it.
The agent speaks plain HTTP, to show all there is on the wire; `experiments/openai_agent.py` is one around the
`openai` package. It plays in any environment, with or without tools.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import httpx

LIMITS = ("turn_limit", "context_length_exceeded")
"""Codes of a 400: the episode has had all its turns or tokens. An agent that stops there has done nothing wrong."""
AGAIN = "It failed; here is the message. Say the corrected one.\n"


async def rollout(task: Mapping[str, Any], base_url: str, session: Any) -> float | None:
    """Let the model act until the environment has had enough. None: the reward is the environment's."""
    messages = list(session.messages)
    # The model is on this machine, so neither proxies nor certificates have a part in it.
    local = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    async with httpx.AsyncClient(base_url=base_url, timeout=None, trust_env=False, verify=local) as model:
        while (said := await reply(model, messages, session.tools)) is not None:
            answer = await session.step(said)
            if answer.done:
                return None
            messages.append(said)
            for message in answer.messages:
                failed = str(message.get("content")).startswith("error:")
                messages.append({**message, "content": AGAIN + message["content"]} if failed else message)
    return None


async def reply(
    model: httpx.AsyncClient, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """The model's next message, as it must be sent back; None when a limit was reached."""
    body = {"model": "policy", "messages": messages} | ({"tools": tools} if tools else {})
    answer = await model.post("chat/completions", json=body)
    said = answer.json()
    if answer.status_code == 400 and said["error"]["code"] in LIMITS:
        return None
    answer.raise_for_status()
    return said["choices"][0]["message"]
