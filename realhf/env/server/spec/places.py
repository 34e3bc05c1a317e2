"""Hands out places for sessions of one environment: the pool of slots of its server."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from realhf.api.environment import Environment, EnvironmentFailure
from realhf.base.loop_thread import LoopThread
from realhf.env.server.spec.place import Place

MOST_STUCK = 64
"""Threads that were left behind in the environment's code; beyond, no session is opened until some of them end."""
_LOG = logging.getLogger(__name__)


class Places:
    """Implements ``realhf.env.server.served.SlotPool``: at most ``size`` places at once, each new for its session.
    ``make`` returns an instance of the environment ``name``; ``timeout_s`` bounds each of its calls."""

    def __init__(self, name: str, make: Callable[[], Environment], size: int, timeout_s: float) -> None:
        self._name, self._make, self.size, self._timeout_s = name, make, size, timeout_s
        self._lock = threading.Lock()
        self._taken: set[Place] = set()
        self._left: list[LoopThread] = []
        self._failures: Counter[str] = Counter()
        self._acquired = 0

    def acquire(self) -> Place:
        """Take a place. Raises RuntimeError when there is none."""
        with self._lock:
            if self._free <= 0:
                raise RuntimeError(f"environment {self._name}: no place is free")
            place = Place(self._name, self._make, self._timeout_s, self._on_stuck)
            self._taken.add(place)
            self._acquired += 1
            return place

    def release(self, slot: Place) -> None:
        """Close the environment of a place; the place is free then, whatever came of it."""
        try:
            slot.close()
        finally:
            with self._lock:
                self._taken.discard(slot)

    def stop(self) -> None:
        """Break off every call, so that no thread waits for the environment."""
        with self._lock:
            taken = list(self._taken)
        for place in taken:
            place.kill(for_good=True)

    def count(self, failure: EnvironmentFailure) -> None:
        """Count and log a failure of the environment."""
        with self._lock:
            self._failures[failure.kind] += 1
        _LOG.warning("%s: %s", failure.kind, failure)

    @property
    def free_count(self) -> int:
        """How many sessions could begin now."""
        with self._lock:
            return self._free

    def metrics(self) -> dict[str, Any]:
        """Return numbers for ``/metrics``: places, threads left behind, failures by kind."""
        with self._lock:
            self._forget_ended()
            return {
                "size": self.size,
                "free": self._free,
                "acquired": self._acquired,
                "stuck_threads": len(self._left),
                "failures": dict(self._failures),
            }

    @property
    def _free(self) -> int:
        self._forget_ended()
        return 0 if len(self._left) >= MOST_STUCK else self.size - len(self._taken)

    def _forget_ended(self) -> None:
        self._left = [thread for thread in self._left if thread.alive]

    def _on_stuck(self, thread: LoopThread) -> None:
        with self._lock:
            self._left.append(thread)
