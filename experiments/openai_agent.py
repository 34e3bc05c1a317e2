"""A black-box agent: an ordinary program around the ``openai`` package that knows nothing of training.

rollout.agent=experiments.openai_agent:rollout
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from realhf.rollout.black_box_agent import AgentSession


async def rollout(task: Mapping[str, Any], base_url: str, session: AgentSession) -> float | None:
    """Let the model act until the environment has had enough. The reward is the environment's (None)."""
    del task  # the messages of the session say it in words
    messages: list[Any] = list(session.messages)
    tools: dict[str, Any] = {"tools": session.tools} if session.tools else {}
    # The model is on this machine, over plain HTTP: no proxy has a part in it, and certificates, whose reading would
    # take longer than an answer, are not loaded.
    http = DefaultAsyncHttpxClient(trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    async with AsyncOpenAI(base_url=base_url, api_key="none", http_client=http) as ai:
        while True:
            reply = await ai.chat.completions.create(model="policy", messages=messages, **tools)
            said = reply.choices[0].message
            answer = await session.step(said)
            if answer.done:
                return None
            messages += [said.model_dump(exclude_none=True), *answer.messages]
