"""Runs the blocking code of one environment instance on one thread, from its making to its closing: simulators and
connections often may be used by the thread alone that made them."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from realhf.api.environment import EnvironmentFailure

T = TypeVar("T")
MOST_STUCK = 64
"""Threads of one environment that were given up and still run; beyond, the environment makes no new instances."""


class StuckThreads:
    """Counts the threads of an environment that were given up in the middle of a call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """How many still run."""
        return self._count

    def change(self, by: int) -> None:
        """Note that one was given up, or has ended."""
        with self._lock:
            self._count += by


class InstanceThread:
    """A daemon thread for one instance, which starts with the first call. ``lost`` once a call was given up: the thread
    may still be in it, runs ``last`` when it comes back, and takes no other call."""

    def __init__(self, name: str, stuck: StuckThreads, last: Callable[[], Any]) -> None:
        self._name, self._stuck, self._last = name, stuck, last
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any, Any], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.lost = False

    async def run(self, work: Callable[[], T], what: str, limit_s: float) -> T:
        """Return what ``work`` returns on the thread, or raise what it raises. Raises EnvironmentFailure: ``timeout``
        after ``limit_s`` seconds, ``lost`` after that, ``capacity`` when too many threads are stuck."""
        if self.lost:
            raise EnvironmentFailure("lost", f"{self._name}: the call before has not returned; reset begins anew")
        if self._thread is None:
            if self._stuck.count >= MOST_STUCK:
                raise EnvironmentFailure("capacity", f"{self._name}: {self._stuck.count} calls have not returned")
            self._thread = threading.Thread(target=self._serve, name=f"{self._name} instance", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def deliver(result: Any, error: BaseException | None) -> None:
            def hand_over() -> None:
                if not future.done():
                    future.set_result((result, error))

            try:
                loop.call_soon_threadsafe(hand_over)
            except RuntimeError:
                return  # the loop is closed, nobody waits

        self._jobs.put((work, deliver))
        try:
            async with asyncio.timeout(limit_s):
                result, error = await future
        except BaseException as given_up:
            self._give_up()
            if isinstance(given_up, TimeoutError):
                raise EnvironmentFailure(
                    "timeout", f"{self._name}: {what} has not returned within env.timeout_s={limit_s:g} s"
                ) from None
            raise
        if error is None:
            return result
        if not isinstance(error, Exception):
            raise EnvironmentFailure("internal", f"{self._name}: {what} raised {type(error).__name__}: {error}")
        raise error

    def stop(self) -> None:
        """Let the thread end, after the calls that were made."""
        if self._thread is not None and not self.lost:
            self._jobs.put(None)
            self.lost = True

    def _give_up(self) -> None:
        self.lost = True
        self._stuck.change(1)

        def last() -> None:
            try:
                self._last()
            finally:
                self._stuck.change(-1)

        self._jobs.put((last, lambda result, error: None))
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, deliver = job
            try:
                deliver(work(), None)
            except BaseException as error:
                deliver(None, error)
