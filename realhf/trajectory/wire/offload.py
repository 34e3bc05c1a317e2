"""Runs a process beside the server for bodies that would stop the event loop if they were parsed there."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from realhf.trajectory.base.refusal import Refusal

T = TypeVar("T")
DEADLINE_S = 120.0
"""How long the child may take for one body."""
CLOSE_S = 5.0
"""How long ``close`` waits for a child that still works."""


class Offload:
    """Runs picklable functions in one child process, started when it is first needed.

    ``turn`` lets bodies that are parsed on the event loop be parsed one by one, so that between two groups the loop
    serves other requests.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Semaphore(1)
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return the result of ``function(*args)``. A child that died is replaced once, because it may have died
        before. Raises Refusal 503 when the next one died too, or took too long."""
        try:
            return await self._attempt(function, *args)
        except TimeoutError as error:
            raise _failed("it took too long") from error
        except (BrokenProcessPool, OSError):
            pass
        try:
            return await self._attempt(function, *args)
        except (BrokenProcessPool, TimeoutError) as error:
            raise _failed("it died") from error
        except OSError as error:  # no descriptor or memory for it at present
            raise _failed(str(error)) from error

    async def close(self) -> None:
        """End the child; one that still works is left to end by itself after a few seconds."""
        pool, self._pool = self._pool, None
        if pool is not None:
            end = asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end, CLOSE_S)

    async def _attempt(self, function: Callable[..., T], *args: Any) -> T:
        pool = self._started()
        try:
            work = asyncio.get_running_loop().run_in_executor(pool, function, *args)
            return await asyncio.wait_for(work, DEADLINE_S)
        except (BrokenProcessPool, OSError):  # TimeoutError is one, too
            self._give_up(pool)
            raise

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=_end_with_the_server)
        return self._pool

    def _give_up(self, pool: ProcessPoolExecutor) -> None:
        """Abandon the child. Requests that wait for it may still get their answer; the next body gets another child."""
        if self._pool is pool:
            self._pool = None
        pool.shutdown(wait=False)


def _failed(how: str) -> Refusal:
    return Refusal(503, f"the parser process failed on this body: {how}", {"Retry-After": "1"})


def _end_with_the_server() -> None:
    """Leave Ctrl-C to the server, and end when the server is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_for_the_server, daemon=True).start()


def _wait_for_the_server() -> None:
    server = multiprocessing.parent_process()
    if server is not None:
        server.join()
        os._exit(0)
