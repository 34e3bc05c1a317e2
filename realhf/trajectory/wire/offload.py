"""A process beside the server for bodies that would stop the event loop if they were parsed there."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from realhf.trajectory.refusal import Refusal

T = TypeVar("T")
DEADLINE_S = 120.0


class Offload:
    """Runs picklable functions in one child process, started when it is first needed. ``turn``: bodies that are
    parsed on the event loop are parsed one by one, so that between two groups it serves everybody else."""

    def __init__(self) -> None:
        self.turn = asyncio.Semaphore(1)
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Result of ``function(*args)``. Raises Refusal 503 when the child died or took too long."""
        pool, work = self._submit(function, *args)
        try:
            return await asyncio.wait_for(work, DEADLINE_S)
        except (BrokenProcessPool, TimeoutError) as error:
            self._give_up(pool)
            raise Refusal(503, f"the parser process failed on this body: {type(error).__name__}",
                          {"Retry-After": "1"}) from error  # fmt: skip

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, function: Callable[..., T], *args: Any) -> tuple[ProcessPoolExecutor, asyncio.Future[T]]:
        """A child that died while it had nothing to do is replaced."""
        loop = asyncio.get_running_loop()
        pool = self._started()
        try:
            return pool, loop.run_in_executor(pool, function, *args)
        except BrokenProcessPool:
            self._give_up(pool)
            pool = self._started()
            return pool, loop.run_in_executor(pool, function, *args)

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=_end_with_the_server)
        return self._pool

    def _give_up(self, pool: ProcessPoolExecutor) -> None:
        """What else waits for this child may still get its answer; the next body gets another child."""
        if self._pool is pool:
            self._pool = None
        pool.shutdown(wait=False)


def _end_with_the_server() -> None:
    """Ctrl-C is the server's to answer; a killed server leaves no child behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_for_the_server, daemon=True).start()


def _wait_for_the_server() -> None:
    server = multiprocessing.parent_process()
    if server is not None:
        server.join()
        os._exit(0)
