"""An environment that does what it is told, a policy of words, and what a player needs besides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realhf.api.environment import AssistantMessage, EnvironmentSpec, Opening, Task, Turn
from realhf.api.generation import GenerationFailed
from realhf.api.model import GenOutput, GenRequest
from tests.rollout.word_chat import END

Answer = Callable[["Scripted", AssistantMessage], Any]


class Scripted:
    """Opens with the payload's ``text`` and answers each message with the reward 0.25 and the same
    words, until the third, which ends the episode. ``world`` counts and misbehaves:
    ``world.answer(env, message)`` may return a turn, an exception to raise, or "hang"; None is the
    usual."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.number = world.made
        world.made += 1
        self.said: list[str] = []
        self.seed = -1
        self.closed = False

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        self.world.log.append((self.number, "reset"))
        self.seed = seed
        self.said = []
        await self._perhaps(self.world.on_reset(self))
        return Opening([{"role": "user", "content": str(task.get("text", "do it"))}])

    async def step(self, message: AssistantMessage) -> Turn:
        self.world.log.append((self.number, message.content))
        self.said.append(message.content)
        usual = Turn(
            [{"role": "user", "content": f"saw {message.content}"}],
            done=len(self.said) >= 3,
            reward=0.25,
            metrics={"progress": len(self.said) / 3},
        )
        return await self._perhaps(self.world.answer(self, message)) or usual

    async def close(self) -> None:
        self.closed = True
        self.world.closed += 1

    async def _perhaps(self, told: Any) -> Any:
        if isinstance(told, BaseException):
            raise told
        if told == "hang":
            await asyncio.sleep(600)
        return told


class World:
    """What all instances share: how many were made and closed, what came in order, and how they
    misbehave."""

    def __init__(
        self,
        answer: Answer = lambda env, message: None,
        on_reset: Callable[[Scripted], Any] | None = None,
    ):
        self.made = self.closed = 0
        self.log: list[tuple[int, str]] = []
        self.answer = answer
        self.on_reset = on_reset or (lambda env: None)

    def spec(self, **changed: Any) -> EnvironmentSpec:
        return EnvironmentSpec(
            "scripted", lambda address: Scripted(self), lambda split: NoTasks(), **changed
        )


class NoTasks:
    """A task set that nobody draws from."""

    group_of: Mapping[str, str] = {}
    groups: Sequence[str] = ()

    def instantiate(self, template_id: str, seed: int) -> Task:
        raise LookupError(template_id)


class Words:
    """A ``TokenSource`` that says "go" and ends its turn; ``broken``: it cannot."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.freed: list[int] = []
        self.requests: list[GenRequest] = []

    async def generate(self, request: GenRequest) -> GenOutput:
        self.requests.append(request)
        if self.broken:
            raise GenerationFailed("no generation worker")
        return said("go")

    def free(self, slots: Sequence[int]) -> None:
        self.freed += slots


def said(words: str, finish: str = "stop") -> GenOutput:
    """What an engine samples that says these words."""
    ids = [ord(c) + 1000 for c in words] + ([END] if finish == "stop" else [])
    return GenOutput(ids, [-0.5] * len(ids), [3] * len(ids), finish)
