"""Keeps what an environment says, whole, for those who read more of it than a policy does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realhf.api.environment import AssistantMessage, Environment, Opening, Turn


class Witness:
    """Is the environment ``env`` for one episode. ``opening`` and ``turns`` are what it has answered so far."""

    def __init__(self, env: Environment) -> None:
        self.opening = Opening(())
        self.turns: list[Turn] = []
        self._env = env

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """See ``Environment``."""
        self.opening, self.turns = await self._env.reset(task, seed=seed), []
        return self.opening

    async def step(self, message: AssistantMessage) -> Turn:
        """See ``Environment``."""
        turn = await self._env.step(message)
        self.turns.append(turn)
        return turn

    async def close(self) -> None:
        """See ``Environment``."""
        await self._env.close()
