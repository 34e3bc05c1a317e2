"""pydantic-ai with an ``output_type``, which it asks for by a tool."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.agents import playing


class Found(BaseModel):
    """The answer."""

    number: int


async def rollout(task: Any, base_url: str, session: Any) -> float | None:
    """Let the agent play; one that never answers in the right form earns nothing."""
    http = playing.connection()
    provider = OpenAIProvider(base_url=base_url, api_key="none", http_client=http)
    agent = Agent(OpenAIChatModel("policy", provider=provider), output_type=Found, retries=2)

    @agent.tool_plain
    async def look(box: str) -> str:
        """Look into a box.

        Args:
            box: red, blue or green
        """
        return await playing.look(session, box)

    try:
        result = await agent.run(session.text)
    except UnexpectedModelBehavior:
        return 0.0
    finally:
        await http.aclose()
    await playing.conclude(session, result.output.number)
    return None
