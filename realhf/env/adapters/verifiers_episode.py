"""Plays episodes of a ``verifiers`` environment: its own code runs an episode, and each of its model calls is a turn.

An environment of the package starts what its episodes share (an interception server, tool servers); that is done once
for each event loop, by a task of its own, and undone when the last instance is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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

_STOP_S = 2.0
_SOLVED = 1e-9
_log = logging.getLogger(__name__)
_NO_KEY = "REALHF_POLICY_HAS_NO_KEY"
"""Names the variable in which the package looks for a key; the endpoint needs none."""


class Serving:
    """An environment of the package that serves, and the endpoint that it calls, until ``stop`` is called. ``users``
    are the instances that play on it."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self.endpoint = PolicyEndpoint()
        self.env: Any = None
        self.users = 0
        self._load = load
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._serve())

    async def ready(self) -> None:
        """Wait until it serves. Raises EnvironmentFailure when it cannot."""
        await asyncio.shield(self._ready)

    async def stop(self) -> None:
        """End it, within seconds."""
        self._stop.set()
        await asyncio.wait([self._task], timeout=_STOP_S)

    async def _serve(self) -> None:
        """Begin and end in one task, as the package's contexts ask."""
        try:
            self.env = await asyncio.to_thread(self._load)
            await self.endpoint.start()
            async with self.env.serving():
                if not self._ready.done():
                    self._ready.set_result(None)
                await self._stop.wait()
        except Exception as error:
            if self._ready.done():
                _log.warning("a verifiers environment ended badly: %s", _described(error))
            else:
                self._ready.set_exception(EnvironmentFailure("internal", f"it does not start: {_described(error)}"))
        finally:
            await self.endpoint.stop()
            if not self._ready.done():
                self._ready.cancel()


class Stage:
    """What the instances of one event loop share. ``load`` makes the package's environment, and may block."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._now: Serving | None = None

    async def enter(self) -> Serving:
        """Return what serves, started if it must be; ``leave`` gives it back. Raises EnvironmentFailure."""
        if self._now is None:
            self._now = Serving(self._load)
        serving = self._now
        serving.users += 1
        try:
            await serving.ready()
        except BaseException:
            await self.leave(serving)
            raise
        return serving

    async def leave(self, serving: Serving) -> None:
        """Let it end when nobody else uses it."""
        serving.users -= 1
        if serving.users == 0:
            if self._now is serving:
                self._now = None
            await serving.stop()


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
        self._serving: Serving | None = None
        self._run: asyncio.Task[Any] | None = None
        self._conversation = Conversation()
        self._call: ModelCall | None = None
        self._ended: Turn | None = None

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode of the package's task that the payload names; the seed changes nothing. Raises
        EnvironmentFailure."""
        del seed
        await self._abandon()
        if self._serving is None:
            self._stage = self._stage_of()
            self._serving = await self._stage.enter()
        chosen = await asyncio.to_thread(self._task_of, task)
        self._conversation, self._ended = Conversation(), None
        self._run = asyncio.create_task(self._play(self._serving, chosen, self._conversation))
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
        serving, self._serving = self._serving, None
        if serving is not None and self._stage is not None:
            await self._stage.leave(serving)

    async def _play(self, serving: Serving, task: Any, conversation: Conversation) -> Any:
        """Have the package play an episode; returns it."""
        name = serving.endpoint.add(conversation)
        try:
            headers = {SECRET_HEADER: serving.endpoint.secret}
            return await serving.env.run_episode(task, self._context(name, serving.endpoint.url, headers, _NO_KEY))
        finally:
            serving.endpoint.remove(name)

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
