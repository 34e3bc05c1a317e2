"""The ``openai`` package, responses, with the whole input sent back or by the id of the last one."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from tests.agents.playing import connection


async def rollout(task: Any, base_url: str, session: Any) -> None:
    """Let the model act until the environment ends the episode."""
    tools = [{"type": "function", **tool["function"]} for tool in session.tools]
    given: list[Any] = list(session.messages)
    chained = session.seed % 2 == 0
    last = None
    async with AsyncOpenAI(base_url=base_url, api_key="none", http_client=connection()) as ai:
        while True:
            reply = await ai.responses.create(
                model="policy", input=given, tools=tools, previous_response_id=last
            )
            answer = await session.step(reply)
            if answer.done:
                return
            results = [
                {"type": "function_call_output", "call_id": each["tool_call_id"]}
                | {"output": each["content"]}
                if each["role"] == "tool"
                else each
                for each in answer.messages
            ]
            last = reply.id if chained else None
            given = results if chained else [*given, *reply.output, *results]
