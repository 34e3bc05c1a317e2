"""Harbor task folders that tests write, and containers, where this machine can make them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realhf.api.environment import AssistantMessage, ToolCall, Turn
from realhf.env.harbor.definition import HarborEnvironment
from realhf.env.loader.load import build_environment
from tests.env.containment.obstacle import skip_without_containers


@pytest.fixture(scope="session")
def containers() -> None:
    """Skip the test where no container can be made."""
    skip_without_containers()


WriteTask = Callable[..., Path]


@pytest.fixture
def write_task(tmp_path: Path) -> WriteTask:
    """Return a function that writes a task folder and returns it: a file must hold ``right``."""

    def write(
        name: str = "one",
        *,
        toml: str = "",
        dockerfile: str = "FROM debian:12\nWORKDIR /app\n",
        test: str = 'if [ "$(cat /app/answer)" = right ]; then pay=1; else pay=0; fi\n'
        "echo $pay > /logs/verifier/reward.txt\n",
        solution: str | None = "echo right > /app/answer\n",
    ) -> Path:
        folder = tmp_path / "tasks" / name
        files = {
            "task.toml": toml or "[agent]\ntimeout_sec = 30.0\n",
            "instruction.md": "Write right to /app/answer.\n",
            "environment/Dockerfile": dockerfile,
            "tests/test.sh": f"#!/bin/bash\n{test}",
        }
        if solution is not None:
            files["solution/solve.sh"] = f"#!/bin/bash\n{solution}"
        for place, text in files.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(text)
        return folder

    return write


Play = Callable[..., list[Turn]]


@pytest.fixture
def play(containers: None) -> Play:
    """Return a function that plays commands on a task folder, then a turn without a call, and
    returns the turns."""

    def run(folder: Path, *commands: str, **options: Any) -> list[Turn]:
        spec = build_environment(f"harbor:{folder}", {"heldout_fraction": 0, **options})
        environment = spec.make("")
        assert isinstance(environment, HarborEnvironment)
        task = spec.tasks("train").instantiate(folder.name, 0)

        async def episode() -> list[Turn]:
            turns: list[Turn] = []
            try:
                await environment.reset(task.payload, seed=0)
                for command in commands:
                    call = ToolCall("shell", {"command": command}, id="call")
                    turns.append(await environment.step(AssistantMessage("", (call,))))
                    if turns[-1].done:
                        return turns
                return [*turns, await environment.step(AssistantMessage("Done."))]
            finally:
                await environment.close()

        return asyncio.run(episode())

    return run
