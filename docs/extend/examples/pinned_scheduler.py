"""A scheduler that gives every worker cores of its own, so that they do not take them from each other."""

from __future__ import annotations

import os
from itertools import cycle

from realhf.scheduler.base import Scheduler, WorkerEvent, WorkerSpec


class PinnedScheduler:
    """Deals out the cores of this machine in turn, ``cores`` for each start, and leaves the rest to ``scheduler``."""

    def __init__(self, scheduler: Scheduler, cores: int = 1) -> None:
        self._scheduler, self._cores = scheduler, cores
        self._next = cycle(sorted(os.sched_getaffinity(0)))

    def start(self, spec: WorkerSpec) -> None:
        """Start a worker on the next cores. A child begins with the affinity of the thread that starts it."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {next(self._next) for _ in range(self._cores)})
        try:
            self._scheduler.start(spec)
        finally:
            os.sched_setaffinity(0, before)

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """Return what happened; see ``Scheduler``."""
        return self._scheduler.wait(timeout_s)

    def stop(self, grace_s: float = 8.0) -> None:
        """Stop all workers; see ``Scheduler``."""
        self._scheduler.stop(grace_s)
