"""A scheduler that gives every worker cores of its own, so that they do not take them from each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

from realhf.api.option import option
from realhf.scheduler.base import Scheduler, SchedulerDefinition, WorkerEvent, WorkerSpec
from realhf.scheduler.local import LocalScheduler


@dataclass
class PinnedOptions:
    """How cores are dealt out."""

    cores: int = option(1, "Every worker gets this many cores, the next ones in turn.", at_least=1)

    def problems(self, name: str) -> Iterator[str]:
        """A worker cannot get a core twice."""
        if self.cores > (most := len(os.sched_getaffinity(0))):
            yield f"{name}.cores={self.cores}: this machine has {most}"


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

    def kill(self, name: str, cause: str, *, pid: int = 0, started: int = 0) -> None:
        """Kill one worker; see ``Scheduler``."""
        self._scheduler.kill(name, cause, pid=pid, started=started)

    def interrupt(self, name: str) -> None:
        """Ask one worker to end by itself; see ``Scheduler``."""
        self._scheduler.interrupt(name)

    def stop(self, grace_s: float = 8.0) -> None:
        """Stop all workers; see ``Scheduler``."""
        self._scheduler.stop(grace_s)


def make(options: PinnedOptions) -> PinnedScheduler:
    """Return a scheduler over the one of this machine, which kills what workers leave behind."""
    return PinnedScheduler(LocalScheduler(adopts_orphans=True), options.cores)


PINNED = SchedulerDefinition(PinnedOptions, make)
