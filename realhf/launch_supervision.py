"""What to do about a worker that ended before the run did: start it again, begin again from the last checkpoint, or
give up."""

from __future__ import annotations

import time
from collections import Counter

from realhf.scheduler.base import WorkerExit, WorkerSpec

RESTARTABLE = ("rollout_worker", "generation", "env")
"""Kinds of workers that hold nothing which the run cannot do without."""
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
        self.restarts: Counter[str] = Counter()

    def started(self, spec: WorkerSpec) -> None:
        """A worker is running."""
        self._specs[spec.name] = (spec, time.monotonic())

    def successor(self, exit_: WorkerExit) -> WorkerSpec | None:
        """The worker to start in place of one that ended; None when the run cannot go on that way."""
        kind = exit_.name.partition("/")[0]
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
