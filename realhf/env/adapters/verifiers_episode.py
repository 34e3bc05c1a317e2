"""Plays episodes of a ``verifiers`` environment: its own code runs an episode, and each of its model calls is a turn.

An environment of the package starts what its episodes share (an interception server, tool servers); that is done once
for each event loop, by a task of its own, and undone when the last instance is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from realhf.api.environment import AssistantMessage, EnvironmentFailure, Opening, Turn
from realhf.env.adapters.policy_endpoint import (
    SECRET_HEADER,
    Conversation,
    ModelCall,
    PolicyEndpoint,
    Unplayable,
)

_STOP_S = 5.0
_SOLVED = 1e-9
_NO_KEY = "REALHF_POLICY_HAS_NO_KEY"
"""Names the variable in which the package looks for a key; the endpoint needs none."""


class Stage:
    """What the instances of one event loop share: an environment of the package that serves, and the endpoint that it
    calls. ``load`` makes the environment."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self.endpoint = PolicyEndpoint()
        self.env: Any = None
        self._load = load
        self._users = 0
        self._ready: asyncio.Future[None] | None = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def enter(self) -> None:
        """Have it serve. Raises EnvironmentFailure when it cannot."""
        self._users += 1
        if self._task is None or self._task.done():
            self._stop.clear()
            self._ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._serve(self._ready))
        assert self._ready is not None
        try:
            await asyncio.shield(self._ready)
        except BaseException:
            self._users -= 1
            raise

    async def leave(self) -> None:
        """Let it end when nobody else uses it."""
        self._users -= 1
        if self._users == 0 and self._task is not None:
            self._stop.set()
            await asyncio.wait([self._task], timeout=_STOP_S)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            self.env = await asyncio.to_thread(self._load)
            await self.endpoint.start()
            async with self.env.serving():
                ready.set_result(None)
                await self._stop.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(EnvironmentFailure("internal", f"it does not start: {_described(error)}"))
        finally:
            await self.endpoint.stop()
            if not ready.done():
                ready.cancel()


class VerifiersEnvironment:
    """Plays one episode after another. ``stage_of`` returns what the instances of the running loop share; ``task_of``
    the package's task of a payload, which may block; ``context`` makes the model context for a name and an endpoint."""

    def __init__(
        self,
        stage_of: Callable[[], Stage],
        task_of: Callable[[Mapping[str, Any]], Any],
        context: Callable[[str, str, Mapping[str, str], str], Any],
        success_reward: float,
    ) -> None:
        self._stage_of, self._task_of, self._context = stage_of, task_of, context
        self._success_reward = success_reward
        self._stage: Stage | None = None
        self._run: asyncio.Task[Any] | None = None
        self._conversation = Conversation()
        self._call: ModelCall | None = None
        self._ended: Turn | None = None

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode of the package's task that the payload names; the seed changes nothing. Raises
        EnvironmentFailure."""
        del seed
        await self._abandon()
        if self._stage is None:
            stage = self._stage_of()
            await stage.enter()
            self._stage = stage
        chosen = await asyncio.to_thread(self._task_of, task)
        self._conversation, self._ended = Conversation(), None
        self._run = asyncio.create_task(self._play(self._stage, chosen, self._conversation))
        await self._next()
        if self._call is None:
            raise EnvironmentFailure("internal", "the episode ended before the policy was asked anything")
        return Opening(self._new_messages(self._call), self._call.tools)

    async def step(self, message: AssistantMessage) -> Turn:
        """Answer the model call that waits, and return what the environment says next. Raises EnvironmentFailure."""
        if self._call is None:
            if self._ended is not None:
                return self._ended
            raise EnvironmentFailure("lost", "there is no episode: reset comes first")
        self._conversation.answered(self._call, message)
        self._call = None
        await self._next()
        if self._call is not None:
            return Turn(self._new_messages(self._call))
        assert self._run is not None
        self._ended = self._scored(self._run.result())
        return self._ended

    async def close(self) -> None:
        """End the episode, and what is shared when this was the last instance."""
        await self._abandon()
        stage, self._stage = self._stage, None
        if stage is not None:
            await stage.leave()

    async def _play(self, stage: Stage, task: Any, conversation: Conversation) -> Any:
        """Have the package play an episode; returns it."""
        name = stage.endpoint.add(conversation)
        try:
            headers = {SECRET_HEADER: stage.endpoint.secret}
            return await stage.env.run_episode(task, self._context(name, stage.endpoint.url, headers, _NO_KEY))
        finally:
            stage.endpoint.remove(name)

    async def _next(self) -> None:
        """Wait for the next model call, or for the end of the episode. Whoever asks has a deadline and cancels."""
        assert self._run is not None
        asked = asyncio.create_task(self._conversation.calls.get())
        try:
            await asyncio.wait({asked, self._run}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                self._call = asked.result()
            elif not self._run.cancelled() and (error := self._run.exception()) is not None:
                raise EnvironmentFailure("internal", f"its code raised {_described(error)}") from error
        finally:
            asked.cancel()

    async def _abandon(self) -> None:
        run, self._run, self._call, self._ended = self._run, None, None, None
        if run is not None and not run.done():
            run.cancel()
            await asyncio.wait([run], timeout=_STOP_S)
        if run is not None and run.done():
            with contextlib.suppress(asyncio.CancelledError, Exception):
                run.result()

    def _new_messages(self, call: ModelCall) -> Any:
        try:
            return self._conversation.new_messages(call)
        except Unplayable as error:
            raise EnvironmentFailure("internal", f"this environment cannot be played in turns: {error}") from None

    def _scored(self, episode: Any) -> Turn:
        """The turn that ends an episode: its named rewards and metrics. Raises EnvironmentFailure when the package
        reports that the episode failed."""
        problems = [f"{error.type}: {error.message}" for error in episode.errors]
        problems += [f"{trace.last_error.type}: {trace.last_error.message}" for trace in episode.traces if not trace.ok]
        if not episode.ok:
            raise EnvironmentFailure("internal", "; ".join(problems)[:2000] or "the episode failed")
        if len(episode.traces) != 1:
            raise EnvironmentFailure("internal", f"the episode has {len(episode.traces)} agents, not one")
        trace = episode.traces[0]
        rewards = {name: _finite(name, reward.value) for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: _finite(name, value) for name, value in trace.metrics.items() if value is not None}
        reward = math.fsum(rewards.values())
        metrics["success"] = float(reward >= self._success_reward - _SOLVED)
        return Turn((), True, reward, rewards, metrics, {"ended_by": str(trace.stop_condition or "")}, final=True)


def _finite(name: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise EnvironmentFailure("internal", f"{name} is {number}, not a finite number")
    return number


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
