"""The tool runner of the ``anthropic`` package."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient, beta_async_tool

from tests.agents import playing


async def rollout(task: Any, base_url: str, session: Any) -> None:
    """Let the runner play."""

    @beta_async_tool
    async def look(box: str) -> str:
        """Look into a box.

        Args:
            box: red, blue or green
        """
        return await playing.look(session, box)

    http = DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncAnthropic(base_url=base_url, api_key="none", http_client=http) as ai:
        runner = ai.beta.messages.tool_runner(
            model="policy",
            max_tokens=99,
            tools=[look],
            messages=[{"role": "user", "content": session.text}],
        )
        final = await runner.until_done()
    await playing.conclude(session, "".join(b.text for b in final.content if b.type == "text"))
