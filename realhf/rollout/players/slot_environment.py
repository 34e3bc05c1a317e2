"""Keeps the environment of one slot: made when needed, guarded by a deadline, resumed by replay when it is lost.

A step that was not executed, by the environment's own report, is sent again. An environment that is lost in the middle
of an episode is made anew, reset with the same task and seed, and given the same messages; where it answers as before,
the episode goes on as if nothing had happened. This needs an environment that is deterministic; another is played again
from the start. Source: docs/reference/dataflow.md 9 (a failure is never a reward of 0).
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from realhf.api.environment import AssistantMessage, Environment, EnvironmentFailure, Opening, Turn

T = TypeVar("T")
_RESENDS = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_CLOSE_S = 5.0
_log = logging.getLogger(__name__)


class ReplayDiverged(EnvironmentFailure):
    """The new instance did not answer as the lost one did: the episode cannot go on in it."""

    def __init__(self, message: str) -> None:
        super().__init__("lost", message)


class SlotEnvironment:
    """Is the environment of a slot, over all its episodes: an ``Environment`` that raises nothing but
    EnvironmentFailure, named after the environment.

    Args:
        name: of the environment, for messages. make: returns a new instance.
        message_timeout_s: reset or step, each. patience_s: how long to wait, each time, for a service that is away or
            full. deterministic: whether a lost episode may be resumed.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Environment],
        *,
        message_timeout_s: float,
        patience_s: float,
        deterministic: bool,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.resumed = 0
        self._name, self._make = name, make
        self._timeout_s, self._patience_s = message_timeout_s, patience_s
        self._deterministic = deterministic
        self._env: Environment | None = None
        self._retries = 0
        self._task: Mapping[str, Any] = {}
        self._seed = 0
        self._opening: Opening | None = None
        self._played: list[tuple[AssistantMessage, Turn]] = []

    def begin(self, retries: int) -> None:
        """Prepare for an episode that may be resumed ``retries`` times; counts from zero."""
        self.failures, self.resumed, self._retries = Counter(), 0, retries

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode; a service that is away or full is waited for. Raises EnvironmentFailure."""
        self._task, self._seed, self._opening, self._played = task, seed, None, []
        try:
            self._opening = await self._patiently()
        except EnvironmentFailure as error:
            self._opening = await self._resume(error)
        return self._opening

    async def step(self, message: AssistantMessage) -> Turn:
        """Run a turn. Raises EnvironmentFailure."""
        while True:
            try:
                turn = await self._send_step(message)
                break
            except EnvironmentFailure as error:
                await self._resume(error)
        self._played.append((message, turn))
        return turn

    async def close(self) -> None:
        """Close the instance within seconds; what it raises is logged."""
        env, self._env = self._env, None
        if env is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await env.close()
        except Exception as error:
            _log.warning("environment %s: close failed: %s", self._name, described(error))

    async def _send_reset(self) -> Opening:
        async def send() -> Opening:
            if self._env is None:
                self._env = self._make()
            return await self._env.reset(self._task, seed=self._seed)

        opening = await self._sent("reset", send)
        if not isinstance(opening, Opening):
            raise EnvironmentFailure("internal", f"environment {self._name}: reset returned {opening!r:.80}")
        return opening

    async def _send_step(self, message: AssistantMessage) -> Turn:
        async def send() -> Turn:
            if self._env is None:
                raise EnvironmentFailure("lost", "the instance is gone")
            return await self._env.step(message)

        turn = await self._sent("step", send)
        if not isinstance(turn, Turn):
            raise EnvironmentFailure("internal", f"environment {self._name}: step returned {turn!r:.80}")
        return turn

    async def _sent(self, what: str, send: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a request, which is sent again while the environment reports that it was not
        executed."""
        pause_s = 0.0
        for _ in range(_RESENDS):
            try:
                return await self._guarded(what, send)
            except EnvironmentFailure as error:
                if error.kind != "unavailable":
                    raise
            self.failures["unavailable"] += 1
            await asyncio.sleep(pause_s)
            pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)
        return await self._guarded(what, send)

    async def _guarded(self, what: str, send: Callable[[], Awaitable[T]]) -> T:
        """Run a method of the environment within the deadline; whatever it raises becomes an EnvironmentFailure."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await send()
        except EnvironmentFailure:
            raise
        except TimeoutError as error:
            if deadline.expired():
                told = f"environment {self._name}: no answer to {what} within {self._timeout_s:g} s"
            else:
                told = f"environment {self._name}: {what}: {described(error)}"
            raise EnvironmentFailure("timeout", told) from error
        except Exception as error:
            raise EnvironmentFailure("internal", f"environment {self._name}: {what}: {described(error)}") from error

    async def _resume(self, error: EnvironmentFailure) -> Opening:
        """Make a new instance and bring it into the state of the lost one; returns its opening. Raises what went wrong
        last."""
        while True:
            self.failures["diverged" if isinstance(error, ReplayDiverged) else error.kind] += 1
            await self.close()
            may_resume = self._deterministic or self._opening is None
            if self._retries == 0 or not may_resume or error.kind == "internal":
                raise error
            self._retries -= 1
            try:
                opening = await self._replayed()
            except EnvironmentFailure as again:
                error = again
                continue
            self.resumed += 1
            return opening

    async def _replayed(self) -> Opening:
        opening = await self._patiently()
        if self._opening is not None and list(opening.messages) != list(self._opening.messages):
            raise ReplayDiverged(f"environment {self._name}: a new instance opened the same task differently")
        for number, (message, seen) in enumerate(self._played):
            again = await self._send_step(message)
            if _compared(again) != _compared(seen):
                raise ReplayDiverged(
                    f"environment {self._name}: turn {number} was answered {str(_compared(seen))[:120]}, in the new "
                    f"instance {str(_compared(again))[:120]}"
                )
        return opening

    async def _patiently(self) -> Opening:
        """Reset a new instance; a service that is away or full is waited for until the patience is over."""
        deadline, pause_s = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return await self._send_reset()
            except EnvironmentFailure as error:
                await self.close()
                if error.kind not in ("lost", "capacity") or time.monotonic() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def described(error: BaseException) -> str:
    """Return an error in one line, with the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    text = next(iter(str(error).splitlines()), "")[:300]
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


def _compared(turn: Turn) -> tuple[Any, ...]:
    """Return what must be the same in a replay; ``info`` may differ."""
    return [*map(dict, turn.messages)], turn.done, turn.reward, turn.final, dict(turn.rewards), dict(turn.metrics)
