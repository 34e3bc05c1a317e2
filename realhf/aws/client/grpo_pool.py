"""N environment sessions for asynchronous code such as notebooks. They run on the caller's event
loop; only generation has a thread of its own.

    async with GrpoPool("http://127.0.0.1:8100", 8, curriculum) as pool:
        await pool.reset_group(task)
        returns = await pool.run_group(rollout)        # async def rollout(env: AwsEnv) -> float
        pool.record_group_result(task, returns)

Source: docs/reference/environment.md 9.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from realhf.aws.client.aws_env import AwsEnv, parse_result
from realhf.aws.client.session_group import (
    FAILURES,
    GroupError,
    GroupResetError,
    ResultSink,
    RolloutFailure,
    SessionGroup,
    as_failure,
    describe_failures,
    reset_arguments,
)
from realhf.aws.models import AwsStepResult
from realhf.base.loop_thread import check_process
from realhf.env.openenv_client import OpenEnvClient, StepResult

T = TypeVar("T")


class GrpoPool(SessionGroup):
    """N sessions on which groups of rollouts run. Use it on one event loop.

    ``envs`` are the sessions, [] until connected. ``session``: further arguments of
    ``SessionGroup``. ``on_failure`` is one of them and decides what happens to a rollout whose
    environment failed:

    - ``drop``: the result is a RolloutFailure
    - ``retry``: the rollout runs once more on a new connection, reset like the last ``reset_group``
    - ``raise``: GroupError is raised
    """

    def __init__(
        self, base_url: str, size: int = 8, curriculum: ResultSink | None = None, **session: Any
    ) -> None:
        super().__init__(base_url, size, curriculum, **session)
        self.envs: list[AwsEnv] = []
        self._base_url = base_url
        self._reset_arguments: Mapping[str, Any] | None = None
        self._playing = False
        self._generator: ThreadPoolExecutor | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._pid = os.getpid()

    async def connect(self) -> None:
        """See ``SessionGroup.connect``."""
        check_process(self._pid)
        await super().connect()
        if not self.envs:
            self.envs = [AwsEnv(self._base_url, session=client) for client in self.clients]
            for env in self.envs:
                env.metadata = self.metadata
            self._finalizer = weakref.finalize(
                self, _abort, list(self.clients), asyncio.get_running_loop()
            )

    async def close(self) -> None:
        """Close all sessions. Idempotent, and harmless if the server is gone."""
        if os.getpid() != self._pid:
            return
        await super().close()
        self.envs = []
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._generator is not None:
            self._generator.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> GrpoPool:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def reset_group(
        self, task: Any, seed: int | None = None, *, chaos: bool = False
    ) -> list[AwsStepResult]:
        """Reset all sessions to the same task instance and return the results. ``task``: a ``Task``
        or reset arguments.

        Lost sessions are reopened first. Raises GroupResetError with all outcomes if one reset
        fails; the other resets have completed by then.
        """
        self._check_usable()
        arguments = reset_arguments(task, seed, chaos)
        try:
            results = await self.reset(arguments)
        except GroupResetError as error:
            outcomes = [parse_result(o) if isinstance(o, StepResult) else o for o in error.outcomes]
            raise GroupResetError(str(error), outcomes) from None
        self._reset_arguments = arguments
        return [parse_result(result) for result in results]

    async def run_group_step(
        self, actions: Sequence[str | None]
    ) -> list[AwsStepResult | RolloutFailure | None]:
        """Run one command per session, concurrently, and return the results in order.

        None instead of a command skips the session, for example because its episode is over. If the
        environment fails, the result is a RolloutFailure. Raises ValueError when the lengths
        differ.
        """
        self._check_usable()
        results = await self.step(actions)
        return [
            parse_result(result) if isinstance(result, StepResult) else result for result in results
        ]

    async def run_group(
        self, rollout_fn: Callable[[AwsEnv], Awaitable[T]]
    ) -> list[T | RolloutFailure]:
        """Run ``rollout_fn`` on every session concurrently and return the results in the order of
        the sessions.

        ``on_failure`` decides what happens when an environment fails. If ``rollout_fn`` raises any
        other error, the remaining rollouts get ``message_timeout_s`` seconds to finish; then
        GroupError is raised with all outcomes. Raises RuntimeError while another group is running.
        """
        self._check_usable()
        if self._playing:
            raise RuntimeError("this pool is playing already; one run at a time")
        self._playing = True
        try:
            await self.reopen_lost()
            results = await self._run_all(rollout_fn)
        finally:
            self._playing = False
        errors = [result for result in results if isinstance(result, BaseException)]
        outcomes = [
            as_failure(result) if isinstance(result, BaseException) else result
            for result in results
        ]
        failed = describe_failures([o if isinstance(o, RolloutFailure) else None for o in outcomes])
        if errors or (failed and self.on_failure == "raise"):
            raise GroupError(f"rollouts failed: {failed}", outcomes) from (
                errors[0] if errors else None
            )
        return outcomes

    async def _run_all(
        self, rollout_fn: Callable[[AwsEnv], Awaitable[T]]
    ) -> list[T | RolloutFailure | BaseException]:
        """Return the result or error of each rollout. After the first error, the others get
        ``message_timeout_s`` seconds to finish."""
        tasks = [
            asyncio.ensure_future(self._run_one(rollout_fn, index)) for index in range(self.size)
        ]
        unfinished: set[asyncio.Task[T | RolloutFailure]] = set()
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            _, unfinished = await asyncio.wait(tasks, timeout=self.message_timeout_s)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        timeout_message = f"not over {self.message_timeout_s:g} s after another rollout's error"
        return [
            TimeoutError(timeout_message) if task in unfinished else result
            for task, result in zip(tasks, results, strict=True)
        ]

    async def _run_one(
        self, rollout_fn: Callable[[AwsEnv], Awaitable[T]], index: int
    ) -> T | RolloutFailure:
        env = self.envs[index]
        client = self.clients[index]
        try:
            return await rollout_fn(env)
        except FAILURES as error:
            if self.on_failure != "retry":
                return as_failure(error)
        try:
            await self.reopen(client)
            if self._reset_arguments is not None:
                await client.reset(**self._reset_arguments)
            return await rollout_fn(env)
        except FAILURES as error:
            return as_failure(error)

    async def generate(self, fn: Callable[..., T], *args: Any) -> T:
        """Run ``fn(*args)`` in the generation thread and return its result. Calls are queued. The
        event loop stays free to serve the sockets."""
        self._check_usable()
        if self._generator is None:
            self._generator = ThreadPoolExecutor(1, thread_name_prefix="grpo-generate")
        return await asyncio.get_running_loop().run_in_executor(self._generator, fn, *args)

    def _check_usable(self) -> None:
        check_process(self._pid)
        self.check_connected()


def _abort(clients: Sequence[OpenEnvClient], loop: asyncio.AbstractEventLoop) -> None:
    """Close the sessions of a pool that was garbage collected without ``close``; otherwise they
    would stay open as long as the loop runs."""
    for client in clients:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(client.abort)
