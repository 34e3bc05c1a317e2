"""Counts the seconds in which this process could run, for every deadline of the process.

A machine that is moved to another host, ``docker pause`` and SIGSTOP let a process stand still, and
``time.monotonic()`` goes on. Whoever is waited for may have stood still with it, or have answered
and was not read. Such seconds count for nobody: ``now`` leaves them out, and so do ``wait`` and the
timers of the loops of ``realhf/base/event_loops.py``. Durations that are reported are measured by
``time.monotonic()``.

A thread looks at the time every ``EVERY_S`` seconds, and whoever asks for the time looks, too. The
process stood still when there was no look for much longer, which is also the case while something
holds the interpreter. Up to ``EVERY_S`` + ``LATE_S`` of a pause are not noticed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
EVERY_S = 0.25
"""The longest time between two looks of a process that runs."""
LATE_S = 0.5
"""Less than this is how long a busy machine keeps anybody waiting, and no pause."""
_REPORTED_S = 10.0
"""A shorter pause is no news."""
_log = logging.getLogger(__name__)


class PauseDetector:
    """Counts the seconds of ``read`` without those in which nobody looked for longer than a busy
    machine explains."""

    def __init__(self, read: Callable[[], float] = time.monotonic, paused_s: float = 0.0) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._looked = read()
        self.paused_s = paused_s
        """How long the process stood still until the last look."""

    def now(self) -> float:
        """Look, and return the time without all pauses. It never goes back."""
        with self._lock:
            now = self._read()
            late = now - self._looked - EVERY_S
            self._looked = now
            if late > LATE_S:
                self.paused_s += late
            return now - self.paused_s


class ProcessClock:
    """The clock of this process: a ``PauseDetector`` and the thread that keeps it looking, which
    the first question begins, in a forked child again."""

    def __init__(self) -> None:
        self._pauses = PauseDetector()
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def now(self) -> float:
        """Return the time for deadlines, in seconds."""
        if not self._watched:
            self._watch()
        return self._pauses.now()

    @property
    def paused_s(self) -> float:
        """How long the process stood still until now, without what was too short to notice."""
        self.now()
        return self._pauses.paused_s

    def _begin(self) -> None:
        # A forked child goes on counting: it may hold deadlines that were made before the fork.
        self._pauses = PauseDetector(paused_s=self._pauses.paused_s)
        self._starting = threading.Lock()
        self._watched = False

    def _watch(self) -> None:
        with self._starting:
            if not self._watched:
                self._pauses = PauseDetector(paused_s=self._pauses.paused_s)
                threading.Thread(target=self._look, name="process clock", daemon=True).start()
                self._watched = True

    def _look(self) -> None:
        reported = 0.0
        while True:
            time.sleep(EVERY_S)
            self._pauses.now()
            paused = self._pauses.paused_s
            if paused - reported > _REPORTED_S:
                _log.warning(
                    "this process stood still for %.1f s, which count for no deadline",
                    paused - reported,
                )
            reported = paused


CLOCK = ProcessClock()
"""The one clock of this process."""


def now() -> float:
    """Return the time for deadlines, in seconds: that of ``time.monotonic()`` without pauses of
    this process."""
    return CLOCK.now()


def wait(attempt: Callable[[float], T], seconds: float) -> T:
    """Return what ``attempt(seconds)`` returns, a wait that does not know of pauses and returns
    something false when the seconds are over, as ``threading.Event.wait``. It is repeated with what
    is left where this process stood still."""
    deadline = now() + seconds
    while True:
        found = attempt(max(0.0, deadline - now()))
        if found or now() >= deadline:
            return found
