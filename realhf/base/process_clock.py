"""The clock for all deadlines of this process, which excludes the time for which the process was
suspended.

A process is suspended by live migration of its machine, ``docker pause`` or SIGSTOP, while
``time.monotonic()`` goes on. A peer may have been suspended with it, or may have answered without
being read, so this time must not count towards a timeout. ``now``, ``wait`` and the timers of the
loops of ``realhf/base/event_loops.py`` exclude it. Reported durations are measured by
``time.monotonic()``.

A thread reads the time every ``READ_INTERVAL_S`` seconds, and so does every call of ``now``. A much longer
interval between two readings means that the process was suspended, or that something held the
interpreter lock. Pauses of up to ``READ_INTERVAL_S`` + ``READ_TOLERANCE_S`` are not detected.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
READ_INTERVAL_S = 0.25
"""Maximum seconds between two readings in a running process."""
READ_TOLERANCE_S = 0.5
"""Seconds by which a reading may be late on a busy machine without counting as a pause."""
_MIN_LOGGED_PAUSE_S = 10.0
"""Minimum length in seconds of a pause that is logged."""
_log = logging.getLogger(__name__)


class PauseDetector:
    """A clock based on ``read`` that excludes the pauses between readings that are too long to be
    caused by a busy machine."""

    def __init__(self, read: Callable[[], float] = time.monotonic, paused_s: float = 0.0) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._last_reading = read()
        self.paused_s = paused_s
        """Total seconds of all pauses until the last reading."""

    def now(self) -> float:
        """Take a reading, and return the time in seconds without pauses. It never decreases."""
        with self._lock:
            now = self._read()
            late = now - self._last_reading - READ_INTERVAL_S
            self._last_reading = now
            if late > READ_TOLERANCE_S:
                self.paused_s += late
            return now - self.paused_s


class ProcessClock:
    """The clock of this process: a ``PauseDetector`` with a thread that takes regular readings.

    The thread starts at the first call of ``now``, also in a forked child.
    """

    def __init__(self) -> None:
        self._pauses = PauseDetector()
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def now(self) -> float:
        """Return the time for deadlines, in seconds."""
        if not self._is_started:
            self._start_thread()
        return self._pauses.now()

    @property
    def paused_s(self) -> float:
        """Total seconds of all detected pauses until now."""
        self.now()
        return self._pauses.paused_s

    def _reset(self) -> None:
        # A forked child keeps the total, because it may have deadlines from before the fork.
        self._pauses = PauseDetector(paused_s=self._pauses.paused_s)
        self._starting = threading.Lock()
        self._is_started = False

    def _start_thread(self) -> None:
        with self._starting:
            if not self._is_started:
                self._pauses = PauseDetector(paused_s=self._pauses.paused_s)
                threading.Thread(target=self._run, name="process clock", daemon=True).start()
                self._is_started = True

    def _run(self) -> None:
        reported = 0.0
        while True:
            time.sleep(READ_INTERVAL_S)
            self._pauses.now()
            paused = self._pauses.paused_s
            if paused - reported > _MIN_LOGGED_PAUSE_S:
                _log.warning(
                    "this process stood still for %.1f s, which count for no deadline",
                    paused - reported,
                )
            reported = paused


CLOCK = ProcessClock()
"""The only clock of this process."""


def now() -> float:
    """Return the time for deadlines, in seconds: ``time.monotonic()`` without the pauses of this
    process."""
    return CLOCK.now()


def wait(attempt: Callable[[float], T], seconds: float) -> T:
    """Return the result of ``attempt(seconds)``, repeated with the remaining time if this process
    was suspended.

    attempt: a wait with a timeout in seconds that returns a false value on timeout, such as
    ``threading.Event.wait``.
    """
    deadline = now() + seconds
    while True:
        outcome = attempt(max(0.0, deadline - now()))
        if outcome or now() >= deadline:
            return outcome
