"""CrewAI: a crew of one agent with a tool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

from tests.agents.playing import in_thread, question


async def rollout(task: Any, base_url: str, session: Any) -> None:
    """Let the crew play in a thread, since it blocks."""

    def run(look_into: Callable[[str], str]) -> Any:
        @tool("look")
        def look(box: str) -> str:
            """Look into a box: red, blue or green."""
            return look_into(box)

        llm = LLM(model="openai/policy", base_url=base_url, api_key="none")
        finder = Agent(
            role="finder",
            goal="Find the number.",
            backstory="A finder.",
            tools=[look],
            llm=llm,
            max_iter=4,
            verbose=False,
        )
        wanted = Task(description=question(task), expected_output="the number", agent=finder)
        return Crew(agents=[finder], tasks=[wanted], verbose=False).kickoff().raw

    await in_thread(session, run)
