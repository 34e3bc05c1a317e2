"""A process beside the server for bodies so large that parsing them here would stop the event loop."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from realhf.trajectory.refusal import Refusal

T = TypeVar("T")
DEADLINE_S = 120.0


class Offload:
    """Runs picklable functions in one child process, started when it is first needed."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Result of ``function(*args)``. Raises Refusal 503 when the child died or took too long."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        work = asyncio.get_running_loop().run_in_executor(self._pool, function, *args)
        try:
            return await asyncio.wait_for(work, DEADLINE_S)
        except (BrokenProcessPool, TimeoutError) as error:
            self.close()
            raise Refusal(503, f"the parser process failed on this body: {type(error).__name__}",
                          {"Retry-After": "1"}) from error  # fmt: skip

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
