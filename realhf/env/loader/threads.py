"""Runs an author's blocking code in threads, so that it stops neither the event loop nor the end of
the process.

``concurrent.futures`` is not used: it waits for its threads at exit, and a thread that never
returns would keep the process alive. Here a job that nobody waits for any longer gives its place to
another thread.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from realhf.api.environment import EnvironmentFailure

T = TypeVar("T")

MOST_THREADS = 32
"""Jobs of one environment that run at once; more wait in a queue."""
MOST_STUCK = 64
"""Jobs that were given up and still run; beyond, the environment refuses new ones."""
IDLE_S = 20.0
"""A thread without a job ends after these seconds."""


class _Job:
    __slots__ = ("after", "finished", "future", "given_up", "loop", "started", "work")

    def __init__(self, work: Callable[[], Any], after: Callable[[], Any] | None) -> None:
        self.work = work
        self.after = after
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.started = self.finished = self.given_up = False


class Threads:
    """A bounded number of daemon threads that start when they are needed. Used from any number of
    event loops. A thread without a job ends after ``idle_s`` seconds; None: it stays until
    ``stop``."""

    def __init__(self, name: str, size: int = MOST_THREADS, idle_s: float | None = IDLE_S) -> None:
        self._name = name
        self._size = size
        self._idle_s = idle_s
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._idle = self._waiting = self._stuck = 0

    @property
    def stuck(self) -> int:
        """Jobs that were given up and have not returned yet."""
        return self._stuck

    async def run(self, work: Callable[[], T], after: Callable[[], Any] | None = None) -> T:
        """Return what ``work`` returns in a thread, or raise what it raises. When the caller is
        cancelled, the job runs on without a reader, and then ``after`` in the same thread. Raises
        EnvironmentFailure("capacity") when too many jobs have been given up and still run."""
        if self._stuck >= MOST_STUCK:
            raise EnvironmentFailure(
                "capacity", f"{self._name}: {self._stuck} calls have not returned"
            )
        job = _Job(work, after)
        self._submit(job)
        try:
            result, error = await job.future
        except asyncio.CancelledError:
            self._give_up(job)
            raise
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """Let the threads end, each after the job that it has; no other is taken."""
        with self._lock:
            self._size = 0
            for _ in range(self._idle):
                self._queue.put(None)

    def _submit(self, job: _Job) -> None:
        with self._lock:
            self._waiting += 1
            more = self._waiting > self._idle and self._threads < self._size + self._stuck
            if more:
                self._threads += 1
                self._idle += 1
        self._queue.put(job)
        if more:
            threading.Thread(target=self._serve, name=f"{self._name} tools", daemon=True).start()

    def _give_up(self, job: _Job) -> None:
        with self._lock:
            job.given_up = True
            finished = job.finished
            self._stuck += job.started and not finished
        if finished:
            self._submit(job)  # its thread could not know, so another one runs what comes after

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
        """Run a job and hand over its result; False if there are too many threads now, and this one
        ends."""
        with self._lock:
            self._waiting -= 1
            self._idle -= 1
            job.started = not job.given_up
        result: Any = None
        error: BaseException | None = None
        if job.started:
            try:
                result = job.work()
            except BaseException as raised:
                error = raised
        with self._lock:
            given_up = job.given_up
            self._stuck -= given_up and job.started
            job.finished = True
            stays = self._threads <= self._size + self._stuck
            if stays:
                self._idle += 1
            else:
                self._threads -= 1
        if given_up:
            _run_after(job)
        else:
            _deliver(job, result, error)
        return stays


def _deliver(job: _Job, result: Any, error: BaseException | None) -> None:
    def hand_over() -> None:
        if not job.future.done():
            job.future.set_result((result, error))

    try:
        job.loop.call_soon_threadsafe(hand_over)
    except RuntimeError:
        return  # the loop is closed, nobody waits


def _run_after(job: _Job) -> None:
    if job.after is None:
        return
    try:
        job.after()
    except BaseException:
        return  # nobody is left who could be told
