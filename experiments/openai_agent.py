"""Example of a black-box agent: a program that uses the ``openai`` package and contains no training
code.

rollout.agent=experiments.openai_agent:rollout
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from realhf.rollout.black_box_agent import AgentSession


async def rollout(task: Mapping[str, Any], base_url: str, session: AgentSession) -> float | None:
    """Let the model act until the environment ends the episode. Returns None, so that the episode
    keeps the environment's reward."""
    del task  # The session's messages describe the task.
    messages: list[Any] = list(session.messages)
    tools: dict[str, Any] = {"tools": session.tools} if session.tools else {}
    # The model is served on this machine over plain HTTP. Proxies are ignored, and certificates are
    # not loaded, because reading them would take longer than a completion.
    http = DefaultAsyncHttpxClient(trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    async with AsyncOpenAI(base_url=base_url, api_key="none", http_client=http) as ai:
        while True:
            reply = await ai.chat.completions.create(model="policy", messages=messages, **tools)
            message = reply.choices[0].message
            answer = await session.step(message)
            if answer.done:
                return None
            messages += [message.model_dump(exclude_none=True), *answer.messages]
