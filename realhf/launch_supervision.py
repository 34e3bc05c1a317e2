"""What to do about a worker that ended before the run did: start it again, begin again from the last checkpoint, or
give up."""

from __future__ import annotations

import time
from collections import Counter

from realhf.scheduler.base import WorkerExit, WorkerSpec

RESTARTABLE = ("rollout_worker", "generation", "env")
"""Kinds of workers that hold nothing which the run cannot do without."""
ONE_OF_SEVERAL = ("rollout_worker", "generation")
"""Kinds of which one can be missing while others run: they take its work."""
MAX_ERRORS = 3
MAX_QUICK_DEATHS = 3
QUICK_S = 10.0


class Supervisor:
    """Knows the workers of one asynchronous run. A worker that fails by itself may do so ``MAX_ERRORS`` times; one that
    is killed, as often as it lived ``QUICK_S`` seconds before."""

    def __init__(self) -> None:
        self._specs: dict[str, tuple[WorkerSpec, float]] = {}
        self._errors: Counter[str] = Counter()
        self._quick: Counter[str] = Counter()
        self._running: set[str] = set()
        self.restarts: Counter[str] = Counter()

    def started(self, spec: WorkerSpec) -> None:
        """A worker is running."""
        self._specs[spec.name] = (spec, time.monotonic())
        self._running.add(spec.name)

    def successor(self, exit_: WorkerExit) -> WorkerSpec | None:
        """The worker to start in place of one that ended; None when there is none, see ``dispensable``."""
        kind = exit_.name.partition("/")[0]
        self._running.discard(exit_.name)
        if kind not in RESTARTABLE or exit_.name not in self._specs:
            return None
        spec, since = self._specs[exit_.name]
        self._errors[exit_.name] += exit_.exit_code > 0
        quick = time.monotonic() - since < QUICK_S
        self._quick[exit_.name] = self._quick[exit_.name] + 1 if quick else 0
        if self._errors[exit_.name] > MAX_ERRORS or self._quick[exit_.name] > MAX_QUICK_DEATHS:
            return None
        self.restarts[kind] += 1
        return spec

    def dispensable(self, name: str) -> bool:
        """Whether the run can go on without a worker that is not started again, because others of its kind run."""
        kind = name.partition("/")[0]
        return kind in ONE_OF_SEVERAL and any(other.startswith(f"{kind}/") for other in self._running)
