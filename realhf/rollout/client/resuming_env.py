"""Keeps an episode going when its server dies: steps are sent again where that is safe, episodes are resumed by replay.

A step that was not executed, by the server's own report, is sent again. A session that is lost in the middle of an
episode is opened anew, reset with the same arguments and given the same commands; where it answers as before, the
episode goes on as if nothing had happened. This needs an environment that is deterministic for its reset arguments,
which is checked answer by answer. Source: docs/reference/dataflow.md 9 (a failure is never a reward of 0).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from realhf.api.aws_models import AwsStepResult
from realhf.api.observation_text import observation_text
from realhf.rollout.client.aws_env import AwsEnv
from realhf.rollout.client.env_client import EnvError
from realhf.rollout.client.failures import FAILURES, failure_status

_RESENDS = 8
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_COMPARED_CHARS = 1 << 20


class ReplayDiverged(EnvError):
    """The new session did not answer as the lost one did: the episode cannot go on in it."""

    def __init__(self, message: str) -> None:
        super().__init__("REPLAY_DIVERGED", message)


class ResumingEnv:
    """Plays one episode over ``env``, on its event loop.

    Args:
        reset: arguments of the reset. They must decide the episode: a whole task, or template and seed.
        retries: how often in the episode a lost session may be resumed; 0: never.
        reopen: gives ``env`` a new session (``GrpoPool.reopen`` for those of a pool).
        patience_s: how long to wait, each time, for a server that is away or full.

    ``failures`` counts what went wrong by kind: ``unavailable`` (sent again) or a failure status; ``resumed`` counts
    the replays after which the episode went on. What cannot be mended is raised as ``AwsEnv`` raises it.
    """

    def __init__(
        self,
        env: AwsEnv,
        *,
        reset: Mapping[str, Any],
        retries: int,
        reopen: Callable[[AwsEnv], Awaitable[None]] | None = None,
        patience_s: float = 20.0,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.resumed = 0
        self._env = env
        self._reset = dict(reset)
        self._retries = retries
        self._reopen = reopen or _reconnect
        self._patience_s = patience_s
        self._began: AwsStepResult | None = None
        self._played: list[tuple[str, AwsStepResult]] = []

    @property
    def env(self) -> AwsEnv:
        """The session underneath."""
        return self._env

    async def reset(self) -> AwsStepResult:
        """Start the episode, or start it over."""
        self._began, self._played = None, []
        if not self._env.usable:
            await self._new_session()
        try:
            first = await self._resent(self._send_reset)
        except FAILURES as error:
            first = await self._resume(error)
        self._began = first
        return first

    async def step(self, command: str) -> AwsStepResult:
        """Run a command. Raises EnvError VALIDATION_ERROR for one that the server refuses to read; the episode goes
        on after it."""
        if self._began is None:
            raise RuntimeError("no episode is running; call reset() first")
        while True:
            try:
                result = await self._resent(lambda: self._env.step(command))
                break
            except FAILURES as error:
                if isinstance(error, EnvError) and error.code == "VALIDATION_ERROR":
                    raise
                await self._resume(error)
        self._played.append((command, result))
        return result

    async def _send_reset(self) -> AwsStepResult:
        return await self._env.reset(**self._reset)

    async def _resent(self, send: Callable[[], Awaitable[AwsStepResult]]) -> AwsStepResult:
        """Return the answer to a request, which is sent again while the server reports that it was not executed."""
        pause_s = 0.0
        for _ in range(_RESENDS):
            try:
                return await send()
            except EnvError as error:
                if not error.retryable:
                    raise
            self.failures["unavailable"] += 1
            await asyncio.sleep(pause_s)
            pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)
        return await send()

    async def _resume(self, error: Exception) -> AwsStepResult:
        """Open a new session and bring it into the state of the lost one; returns its reply to reset. Raises what went
        wrong last."""
        while True:
            self.failures["diverged" if isinstance(error, ReplayDiverged) else failure_status(error)] += 1
            if self._retries == 0 or (isinstance(error, EnvError) and error.code == "VALIDATION_ERROR"):
                raise error
            self._retries -= 1
            try:
                await self._new_session()
                first = await self._replay()
            except FAILURES as again:
                error = again
                continue
            self.resumed += 1
            return first

    async def _replay(self) -> AwsStepResult:
        first = await self._resent(self._send_reset)
        if self._began is not None:
            _check("the reset", self._began, first)
        for number, (command, seen) in enumerate(self._played):
            again = await self._resent(lambda command=command: self._env.step(command))
            _check(f"step {number} ({command[:80]})", seen, again)
        return first

    async def _new_session(self) -> None:
        """Try to open a session until the patience is over. Raises the last ConnectionError."""
        deadline = time.monotonic() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._reopen(self._env)
            except ConnectionError:
                if time.monotonic() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _reconnect(env: AwsEnv) -> None:
    await env.close()
    await env.connect()


def _fingerprint(result: AwsStepResult) -> tuple[Any, ...]:
    """Return everything that may matter of an answer, without what differs between equal sessions (ids, times,
    ports)."""
    seen = result.observation
    text = observation_text(seen.model_dump(), max_chars=_COMPARED_CHARS)
    task = seen.task.description if seen.task else None
    return (
        text,
        task,
        result.reward,
        result.done,
        seen.task_achieved,
        seen.partial_progress,
        seen.steps_left,
        seen.model_extra,
    )


def _check(what: str, before: AwsStepResult, now: AwsStepResult) -> None:
    pairs = list(zip(_fingerprint(before), _fingerprint(now), strict=True))
    if any(a != b for a, b in pairs):
        was, is_ = next((a, b) for a, b in pairs if a != b)
        raise ReplayDiverged(f"{what} was answered {str(was)[:120]!r}, in the new session {str(is_)[:120]!r}")
