"""The OpenAI Agents SDK at its defaults, which is the Responses API."""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from tests.agents import playing


async def rollout(task: Any, base_url: str, session: Any) -> None:
    """Let the runner play."""

    @function_tool
    async def look(box: str) -> str:
        """Look into a box.

        Args:
            box: red, blue or green
        """
        return await playing.look(session, box)

    agent = Agent(name="finder", instructions="Find the number.", tools=[look])
    ai = AsyncOpenAI(base_url=base_url, api_key="none", http_client=playing.connection())
    async with ai:
        # Traces would be sent to OpenAI.
        config = RunConfig(model_provider=OpenAIProvider(openai_client=ai), tracing_disabled=True)
        result = await Runner.run(agent, session.text, run_config=config)
    await playing.conclude(session, result.final_output)
