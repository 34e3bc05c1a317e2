"""The ``openai`` package, chat completions."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from tests.agents.playing import connection


async def rollout(task: Any, base_url: str, session: Any) -> None:
    """Let the model act until the environment ends the episode."""
    messages = list(session.messages)
    async with AsyncOpenAI(base_url=base_url, api_key="none", http_client=connection()) as ai:
        while True:
            reply = await ai.chat.completions.create(
                model="policy", messages=messages, tools=session.tools
            )
            said = reply.choices[0].message
            answer = await session.step(said)
            if answer.done:
                return
            messages += [said.model_dump(exclude_none=True), *answer.messages]
