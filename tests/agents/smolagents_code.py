"""The ``CodeAgent`` of smolagents, whose model writes Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smolagents import CodeAgent, LogLevel, OpenAIModel, tool

from tests.agents.playing import in_thread, question


async def rollout(task: Any, base_url: str, session: Any) -> None:
    """Let the agent play in a thread, since it blocks."""

    def run(look_into: Callable[[str], str]) -> Any:
        @tool
        def look(box: str) -> str:
            """Look into a box.

            Args:
                box: red, blue or green
            """
            return look_into(box)

        model = OpenAIModel("policy", api_base=base_url, api_key="none")
        agent = CodeAgent([look], model, max_steps=4, verbosity_level=LogLevel.OFF)
        return agent.run(question(task))

    await in_thread(session, run)
