"""What the agents of this folder share: the steps that their tools take, and the connection to the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx


def question(task: Any) -> str:
    """Return the question of a task, without what a library writes around it."""
    return f"Which number is in the {task['box']} box?"


async def look(session: Any, box: str) -> str:
    """Look into a box of the environment."""
    function = {"name": "look", "arguments": json.dumps({"box": box})}
    calls = [{"id": "by-the-agent", "type": "function", "function": function}]
    answer = await session.step({"role": "assistant", "content": "", "tool_calls": calls})
    return answer.text


async def conclude(session: Any, answer: Any) -> None:
    """Give the environment the answer."""
    await session.step(str(answer))


async def in_thread(session: Any, run: Callable[[Callable[[str], str]], Any]) -> None:
    """Run an agent that blocks, as ``run(look)``, in a thread, and conclude with what it returns."""
    loop = asyncio.get_running_loop()

    def look_from_thread(box: str) -> str:
        return asyncio.run_coroutine_threadsafe(look(session, box), loop).result()

    await conclude(session, await asyncio.to_thread(run, look_from_thread))


def connection() -> httpx.AsyncClient:
    """Return the HTTP client to the model, which is on this machine whatever proxies there are."""
    return httpx.AsyncClient(trust_env=False, timeout=120)
