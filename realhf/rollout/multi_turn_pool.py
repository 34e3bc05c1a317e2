"""N environment sessions for a blocking trainer: a sync facade with its own thread and event loop.

Generation runs in the caller's thread, environment steps on the pool's loop, which answers pings while
the caller generates or trains. Source: environment spec 9.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol, TypeVar

from realhf.api.env import ChatFormat, RolloutOutcome
from realhf.api.model import GenOutput, GenRequest
from realhf.api.observation_text import OBSERVATION_CHARS
from realhf.rollout.env_client import CapacityError, OpenEnvClient
from realhf.rollout.lockstep import LockstepPlay, Seat
from realhf.rollout.rollout_state import Job, Limits

T = TypeVar("T")
_REOPEN_S = 5.0


class Policy(Protocol):
    """What a pool asks for tokens."""

    @property
    def chat(self) -> ChatFormat: ...

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]: ...

    def free(self, slots: Sequence[int]) -> None: ...


class PoolClosed(RuntimeError):
    """The pool was closed, or never connected."""


class MultiTurnEnvPool:
    """Plays groups of episodes over ``size`` sessions.

    Args:
        base_url: address of the environment server.
        max_turns: policy turns of an episode. max_total_tokens: prompt and completion of an episode.
        turn_tokens: the engine's ``max_new_tokens``; an episode without room for a turn ends (token_budget).
        observation_chars: cap of the text of one observation.
        message_timeout_s: reset or step, each. connect_timeout_s: opening all sessions.
        retry_capacity_s: keep trying to connect that long while the server is full.
        on_failure: ``retry`` plays an episode whose environment failed once more, on a new connection;
            ``drop`` returns it as a failed outcome.

    ``timings`` sums ``env_s`` (of it ``reset_s``: the first resets of a run), ``generation_s``, ``rounds``,
    ``env_steps`` and ``episodes`` of all runs.
    """

    def __init__(
        self,
        base_url: str,
        size: int = 8,
        *,
        max_turns: int = 6,
        max_total_tokens: int = 4096,
        turn_tokens: int = 64,
        observation_chars: int = OBSERVATION_CHARS,
        message_timeout_s: float = 60.0,
        connect_timeout_s: float = 20.0,
        retry_capacity_s: float = 0.0,
        on_failure: str = "retry",
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one session, not {size}")
        if on_failure not in ("retry", "drop"):
            raise ValueError(f"on_failure is {on_failure!r}; allowed: retry, drop")
        self.size = size
        self.timings: dict[str, float] = {
            "env_s": 0.0, "reset_s": 0.0, "generation_s": 0.0, "rounds": 0.0, "env_steps": 0.0, "episodes": 0.0,
        }  # fmt: skip
        self._base_url = base_url
        self._limits = Limits(max_turns, max_total_tokens, turn_tokens, observation_chars)
        self._timeouts = {"connect_timeout_s": connect_timeout_s, "message_timeout_s": message_timeout_s}
        self._retry_capacity_s = retry_capacity_s
        self._retry = on_failure == "retry"
        self._clients: list[OpenEnvClient | None] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()
        self._playing = threading.Lock()

    def connect(self) -> None:
        """Open all sessions or none. A second call does nothing; after a failure a retry is possible.

        Raises CapacityError or ConnectError: the first error, after every opened session is closed again."""
        self._check_usable()
        if self._clients:
            return
        self._start_loop()
        try:
            self._clients = list(self._call(_until_capacity(self._open_all, self._retry_capacity_s)))
        except BaseException:
            self._stop_loop(1.0)
            raise

    def run_group(
        self, task: Mapping[str, Any], policy: Policy, *, group_size: int | None = None, seed: int = 0
    ) -> list[RolloutOutcome]:
        """``group_size`` (default: ``size``) episodes of one task instance. See ``run_groups``."""
        return self.run_groups([task], policy, group_size=group_size or self.size, seeds=[seed])[0]

    def run_groups(
        self, tasks: Sequence[Mapping[str, Any]], policy: Policy, *, group_size: int, seeds: Sequence[int]
    ) -> list[list[RolloutOutcome]]:
        """Play ``group_size`` episodes of every task and return them per task, in order.

        ``tasks[i]`` are reset arguments (``{"task": {...}}`` or ``{"task_id": ...}``), ``seeds[i]`` their
        seed. A failed environment is an outcome without reward; an error of the policy is raised. The same
        policy outputs give the same sequence of batches."""
        if len(tasks) != len(seeds):
            raise ValueError(f"{len(tasks)} tasks, but {len(seeds)} seeds")
        self._check_usable()
        if not self._clients:
            raise PoolClosed("the pool is not connected; call connect() first")
        if not self._playing.acquire(blocking=False):
            raise RuntimeError("this pool is playing already; one run at a time")
        try:
            return self._play(tasks, policy, group_size, seeds)
        finally:
            self._playing.release()

    def _play(
        self, tasks: Sequence[Mapping[str, Any]], policy: Policy, group_size: int, seeds: Sequence[int]
    ) -> list[list[RolloutOutcome]]:
        self._clients = self._call(self._reopen_lost())
        seats = [Seat(index, client) for index, client in enumerate(self._clients)]
        jobs = [
            Job(number * group_size + member, task, seed)
            for number, (task, seed) in enumerate(zip(tasks, seeds, strict=True))
            for member in range(group_size)
        ]
        play = LockstepPlay(seats, jobs, policy.chat, self._limits, retry=self._retry, reopen=self._reopen)
        try:
            self._rounds(play, policy)
        finally:
            self._clients = [seat.client for seat in seats]
            policy.free(range(self.size))
            self.timings["env_steps"] += play.env_steps
        outcomes = [outcome for outcome in play.outcomes if outcome is not None]
        if len(outcomes) != len(jobs):
            raise AssertionError(f"{len(jobs)} episodes, but {len(outcomes)} outcomes")
        self.timings["episodes"] += len(jobs)
        return [outcomes[start : start + group_size] for start in range(0, len(jobs), group_size)]

    def _rounds(self, play: LockstepPlay, policy: Policy) -> None:
        with self._clock("env_s"), self._clock("reset_s"):
            self._call(play.fill())
        round_index = 0
        while requests := play.requests():
            with self._clock("generation_s"):
                outputs = policy.generate(requests, round_index)
            with self._clock("env_s"):
                play.take_outputs(outputs)
                self._call(play.advance())
            if freed := play.take_freed():
                policy.free(freed)
            round_index += 1
            self.timings["rounds"] += 1

    @contextmanager
    def _clock(self, key: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.timings[key] += time.perf_counter() - began

    def close(self, timeout_s: float = 10.0) -> None:
        """Close all sessions and stop the thread; harmless when repeated or when the server is gone."""
        self._closed = True
        if self._loop is None or os.getpid() != self._pid:
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close_all(), self._loop).result(timeout_s)
        self._stop_loop(timeout_s)

    def __enter__(self) -> MultiTurnEnvPool:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise PoolClosed("the pool is closed")
        if os.getpid() != self._pid:
            raise RuntimeError("a pool cannot be used in a forked child; make a new one there")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise RuntimeError("MultiTurnEnvPool blocks; do not call it from a coroutine, use a thread")

    def _start_loop(self) -> None:
        if self._loop is not None:
            return
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_loop, args=(loop,), name="env-pool", daemon=True)
        thread.start()
        self._loop, self._thread = loop, thread

    def _stop_loop(self, timeout_s: float) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout_s)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the pool's loop. Its waits carry the message and connect timeouts."""
        if self._loop is None:
            coroutine.close()
            raise PoolClosed("the pool is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _open_all(self) -> list[OpenEnvClient]:
        clients = [OpenEnvClient(self._base_url, **self._timeouts) for _ in range(self.size)]
        tasks = [asyncio.ensure_future(client.connect()) for client in clients]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)
            raise
        return clients

    async def _reopen(self, client: OpenEnvClient | None) -> OpenEnvClient:
        """A new session for a lost one; waits a moment for the server to notice the loss."""
        if client is not None:
            await client.close()

        async def open_one() -> OpenEnvClient:
            fresh = OpenEnvClient(self._base_url, **self._timeouts)
            await fresh.connect()
            return fresh

        return await _until_capacity(open_one, _REOPEN_S)

    async def _reopen_lost(self) -> list[OpenEnvClient | None]:
        """Sessions lost in the run before, opened again; raises ConnectionError when none is left."""
        clients = list(self._clients)
        last_error: ConnectionError | None = None
        for index, client in enumerate(clients):
            if client is None or not client.usable:
                try:
                    clients[index] = await self._reopen(client)
                except ConnectionError as error:
                    clients[index], last_error = None, error
        if last_error is not None and not any(clients):
            raise last_error
        return clients

    async def _close_all(self) -> None:
        open_clients = [client for client in self._clients if client is not None]
        await asyncio.gather(*(client.close() for client in open_clients), return_exceptions=True)


async def _until_capacity(open_session: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Try again while the server is full, as long as the patience lasts."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return await open_session()
        except CapacityError as error:
            if time.monotonic() + error.retry_after_s > deadline:
                raise
            await asyncio.sleep(error.retry_after_s)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.wait(pending, timeout=1.0))
    finally:
        loop.close()
