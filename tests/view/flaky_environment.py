"""An environment for whole runs in the tests of the page: its machine fails at some tasks, and it
tells its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realhf.api.environment import AssistantMessage, EnvironmentFailure, Opening, Turn

FAILING = 3
"""One seed in so many finds the machine broken."""


class FlakyEcho:
    """Rewards short answers. What it was told is its state."""

    def __init__(self) -> None:
        self._seed = 0
        self._heard = list[str]()

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        self._seed = seed
        self._heard = []
        replay = {
            "title": "echo",
            "command": "echo",
            "url": "http://127.0.0.1:9/echo",
            "order": {"task_id": seed},
        }
        return Opening(
            [{"role": "user", "content": f"Say a word, number {seed}."}], info={"replay": replay}
        )

    async def step(self, message: AssistantMessage) -> Turn:
        if self._seed % FAILING == 0:
            raise EnvironmentFailure("lost", "the machine is broken")
        self._heard.append(message.content)
        view = {"title": "What it heard", "columns": ["turn", "words"], "rows": []}
        view["rows"] = [[str(turn), words] for turn, words in enumerate(self._heard, start=1)]
        answer = [{"role": "user", "content": "Another one."}]
        reward = 1.0 / (1 + len(message.content))
        return Turn(
            answer,
            done=len(self._heard) == 2,
            reward=reward,
            info={"view": view, "did": message.content},
        )

    async def close(self) -> None:
        pass
