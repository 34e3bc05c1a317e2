"""LangGraph's agent with structured output."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.agents import playing


class Found(BaseModel):
    """The answer."""

    number: int


async def rollout(task: Any, base_url: str, session: Any) -> float | None:
    """Let the graph play; a policy that gives no answer in the right form earns nothing."""

    @tool
    async def look(box: str) -> str:
        """Look into a box: red, blue or green."""
        return await playing.look(session, box)

    async with playing.connection() as http:
        model = ChatOpenAI(
            model="policy", base_url=base_url, api_key="none", http_async_client=http
        )
        graph = create_agent(model, tools=[look], response_format=Found)
        state = await graph.ainvoke({"messages": [("user", session.text)]})
    found = state.get("structured_response")
    if found is None:
        return 0.0
    await playing.conclude(session, found.number)
    return None
