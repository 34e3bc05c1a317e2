"""An agent around the ``openai`` package for tests: it calls tools, opens a second branch in some
episodes, and fails in others. What the policy says first decides which."""

from __future__ import annotations

import ssl
import zlib
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient

BRANCHES_EVERY = 2
FAILS_EVERY = 5


async def rollout(
    task: Mapping[str, Any], base_url: str, session: Any, *, fails_every: int = FAILS_EVERY
) -> dict[str, float] | None:
    """Take steps until the environment has had enough; where there is a second branch, each has a
    reward of its own."""
    del task
    http = DefaultAsyncHttpxClient(trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    async with AsyncOpenAI(
        base_url=base_url, api_key="none", http_client=http, max_retries=0
    ) as ai:
        try:
            return await _played(ai, session, fails_every)
        except BadRequestError as error:
            if error.code in ("turn_limit", "context_length_exceeded"):
                return None
            raise


async def _played(ai: AsyncOpenAI, session: Any, fails_every: int) -> dict[str, float] | None:
    messages = list(session.messages)
    rewards = {}
    opening = list(messages)
    earned = 0.0

    async def say(conversation: list[Any]) -> Any:
        return await ai.chat.completions.create(
            model="policy", messages=conversation, tools=session.tools
        )

    chance = 0
    for turn in range(3):
        reply = await say(messages)
        said = reply.choices[0].message
        answer = await session.step(said)
        earned += answer.reward or 0.0
        if turn == 0:
            chance = zlib.crc32(said.model_dump_json(include={"content", "tool_calls"}).encode())
            if chance % fails_every == 0:
                raise LookupError("the agent has lost its way")
        if answer.done:
            break
        messages += [said.model_dump(exclude_none=True), *answer.messages]
    if chance % BRANCHES_EVERY:
        return None
    rewards[reply.id] = earned
    other = await say(opening)
    rewards[other.id] = float(bool(other.choices[0].message.tool_calls))
    return rewards
