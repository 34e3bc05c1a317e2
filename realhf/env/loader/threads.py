"""Thread pool for an author's blocking code, which blocks neither the event loop nor the exit of
the process.

``concurrent.futures`` waits for its threads at exit, so a call that never returns would keep the
process alive. Here threads are daemons, and a thread whose job was abandoned is replaced.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from realhf.api.environment import EnvironmentFailure

T = TypeVar("T")

MAX_THREADS = 32
"""Maximum number of one environment's jobs that run at once; further jobs wait in a queue."""
MAX_STUCK = 64
"""Maximum number of abandoned jobs that are still running; beyond it, new jobs are refused."""
IDLE_S = 20.0
"""Seconds without a job after which a thread ends."""


class _Job:
    """A call to run in a thread; its result is delivered to a future of an event loop."""

    __slots__ = ("abandoned", "after", "finished", "future", "loop", "started", "work")

    def __init__(self, work: Callable[[], Any], after: Callable[[], Any] | None) -> None:
        self.work = work
        self.after = after
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.started = self.finished = self.abandoned = False


class Threads:
    """Thread pool of limited size whose daemon threads start on demand. Jobs may come from several
    event loops.

    A thread without a job ends after ``idle_s`` seconds; if that is None, it runs until ``stop``.
    """

    def __init__(self, name: str, size: int = MAX_THREADS, idle_s: float | None = IDLE_S) -> None:
        self._name = name
        self._size = size
        self._idle_s = idle_s
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._idle = self._waiting = self._stuck = 0

    @property
    def stuck(self) -> int:
        """Number of abandoned jobs that have not returned yet."""
        return self._stuck

    async def run(self, work: Callable[[], T], after: Callable[[], Any] | None = None) -> T:
        """Run ``work`` in a thread and return its result or raise its error.

        If the caller is cancelled, the job runs to its end, its result is dropped, and ``after`` is
        called in the same thread. Raises EnvironmentFailure("capacity") while too many abandoned
        jobs still run.
        """
        if self._stuck >= MAX_STUCK:
            raise EnvironmentFailure(
                "capacity", f"{self._name}: {self._stuck} calls have not returned"
            )
        job = _Job(work, after)
        self._submit(job)
        try:
            result, error = await job.future
        except asyncio.CancelledError:
            self._abandon(job)
            raise
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """Let each thread end after its current job; queued jobs are not started."""
        with self._lock:
            self._size = 0
            for _ in range(self._idle):
                self._queue.put(None)

    def _submit(self, job: _Job) -> None:
        with self._lock:
            self._waiting += 1
            needs_thread = self._waiting > self._idle and self._threads < self._size + self._stuck
            if needs_thread:
                self._threads += 1
                self._idle += 1
        self._queue.put(job)
        if needs_thread:
            threading.Thread(target=self._serve, name=f"{self._name} tools", daemon=True).start()

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            job.abandoned = True
            finished = job.finished
            self._stuck += job.started and not finished
        if finished:
            # The job ended before it was abandoned, so another thread must run its follow-up.
            self._submit(job)

    def _serve(self) -> None:
        while True:
            try:
                job = self._queue.get(timeout=self._idle_s)
            except queue.Empty:
                job = None
            if job is None:
                with self._lock:
                    if self._waiting:
                        continue
                    self._threads -= 1
                    self._idle -= 1
                return
            if not self._run(job):
                return

    def _run(self, job: _Job) -> bool:
        """Run a job and deliver its result. Return False if there are now too many threads, so that
        this one must end."""
        with self._lock:
            self._waiting -= 1
            self._idle -= 1
            job.started = not job.abandoned
        result: Any = None
        error: BaseException | None = None
        if job.started:
            try:
                result = job.work()
            except BaseException as raised_error:
                error = raised_error
        with self._lock:
            abandoned = job.abandoned
            self._stuck -= abandoned and job.started
            job.finished = True
            keeps_thread = self._threads <= self._size + self._stuck
            if keeps_thread:
                self._idle += 1
            else:
                self._threads -= 1
        if abandoned:
            _run_after(job)
        else:
            _deliver(job, result, error)
        return keeps_thread


def _deliver(job: _Job, result: Any, error: BaseException | None) -> None:
    """Set the result of the job's future, on the future's event loop."""

    def set_result() -> None:
        if not job.future.done():
            job.future.set_result((result, error))

    try:
        job.loop.call_soon_threadsafe(set_result)
    except RuntimeError:
        return  # the loop is closed, so no caller waits


def _run_after(job: _Job) -> None:
    """Run the follow-up of an abandoned job. Its errors are dropped, because no caller waits for
    them."""
    if job.after is None:
        return
    try:
        job.after()
    except BaseException:
        return
