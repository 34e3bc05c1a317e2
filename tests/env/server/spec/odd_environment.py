"""An environment whose payload says how it misbehaves, and when: ``{"reset": mode, "step":
mode}``."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realhf.api.environment import (
    AssistantMessage,
    EnvironmentFailure,
    EnvironmentSpec,
    Opening,
    Task,
    Turn,
)

TOOL = {
    "type": "function",
    "function": {
        "name": "say",
        "description": "says it",
        "parameters": {"type": "object", "properties": {}},
    },
}


class FakeOddEnvironment:
    """Answers with what it was told, unless the task asks for something else."""

    def __init__(self, address: str) -> None:
        self._task: Mapping[str, Any] = {}
        self._steps = 0

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        self._task = task
        self._steps = 0
        await self._misbehave(task.get("reset", ""))
        return Opening(
            [{"role": "user", "content": f"seed {seed}"}], [TOOL], info={"solution": "end"}
        )

    async def step(self, message: AssistantMessage) -> Turn:
        self._steps += 1
        mode = self._task.get("step", "")
        await self._misbehave(mode)
        calls = "; ".join(
            f"{call.name}{dict(call.arguments)}{call.id}: {call.problem}"
            for call in message.tool_calls
        )
        text = [{"role": "user", "content": f"{message.content}|{calls}"}]
        if mode == "not messages":
            return Turn(["text"])  # type: ignore[list-item]
        reward = float("nan") if mode == "nan" else 0.25
        return Turn(
            text,
            done=message.content == "end",
            reward=reward,
            rewards={"said": 0.25},
            metrics={"success": 1.0},
        )

    async def close(self) -> None:
        await self._misbehave(self._task.get("close", ""))

    async def _misbehave(self, mode: str) -> None:
        if mode == "hang":
            await asyncio.Event().wait()
        elif mode == "stubborn":
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    continue
        elif mode == "spin":
            while True:
                pass
        elif mode == "read":
            Path(self._task["pipe"]).read_text()  # returns when somebody has written and closed it
        elif mode == "pause":
            Path(self._task["began"]).touch()
            await asyncio.sleep(1.0)
        elif mode == "raise":
            raise KeyError("mistake of the author")
        elif mode == "exit":
            raise SystemExit(3)
        elif mode == "exit hard":
            os._exit(3)
        elif mode == "fork":
            os.fork()
        elif mode == "crash":
            # a child that stays holds what the process held
            if self._task.get("fork") and os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            faulthandler._sigsegv()  # type: ignore[attr-defined]
        elif mode == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
            # Another thread may take the signal, while this one goes on for a moment.
            time.sleep(60)
        elif mode == "unavailable" and self._steps < 2:
            raise EnvironmentFailure("unavailable", "the backend is away")


class OddTasks:
    """One template, whose payload is its seed's."""

    group_of: Mapping[str, str] = {"plain": "all"}
    groups = ("all",)

    def instantiate(self, template_id: str, seed: int) -> Task:
        return Task(f"{template_id}-{seed}", "all", {"number": seed}, seed=seed)


def tasks(split: str) -> OddTasks:
    """The training split; held-out tasks cannot be had."""
    if split != "train":
        raise OSError("the held-out file is not there")
    return OddTasks()


ODD = EnvironmentSpec("odd", FakeOddEnvironment, tasks, system_prompt="Be odd.")
