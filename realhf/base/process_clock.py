"""Clock for all deadlines of this process. It excludes the time for which the process was
suspended.

A process is suspended by live migration of its machine, ``docker pause`` or SIGSTOP, while
``time.monotonic()`` continues. That time must not count towards a timeout: the peer may have been
suspended too, or its answer may have arrived but not been read. ``now``, ``wait`` and the timers of
the loops in ``realhf/base/event_loops.py`` exclude it. Durations that are reported to users are
measured with ``time.monotonic()``.

A thread reads the time every ``READ_INTERVAL_S`` seconds, and every call of ``now`` reads it too.
If the interval between two readings is much longer, the process was suspended, or something held
the interpreter lock. Pauses of up to ``READ_INTERVAL_S`` + ``READ_TOLERANCE_S`` are not detected.
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
"""Interval in seconds at which the thread reads the time."""
READ_TOLERANCE_S = 0.5
"""Seconds by which a reading may be late on a busy machine without counting as a pause."""
_MIN_LOGGED_PAUSE_S = 10.0
"""Minimum length in seconds of a pause that is logged."""
_log = logging.getLogger(__name__)


class PauseDetector:
    """Clock based on ``read`` that detects and excludes pauses: intervals between two readings that
    are too long to be caused by a busy machine."""

    def __init__(self, read: Callable[[], float] = time.monotonic, paused_s: float = 0.0) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._last_reading = read()
        self.paused_s = paused_s
        """Total seconds of all pauses detected until the last reading."""

    def now(self) -> float:
        """Take a reading, and return the time in seconds without pauses. The returned time never
        decreases."""
        with self._lock:
            now = self._read()
            late = now - self._last_reading - READ_INTERVAL_S
            self._last_reading = now
            if late > READ_TOLERANCE_S:
                self.paused_s += late
            return now - self.paused_s


class ProcessClock:
    """Clock of this process: a ``PauseDetector`` with a thread that takes regular readings.

    The thread starts at the first call of ``now``, also in a forked child.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._pauses = PauseDetector(read)
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

    def wait(self, attempt: Callable[[float], T], seconds: float) -> T:
        """Return the result of ``attempt(seconds)``. If the process was suspended meanwhile, repeat
        the attempt with the remaining time.

        attempt: a wait with a timeout in seconds that returns a false value on timeout, such as
        ``threading.Event.wait``.
        """
        deadline = self.now() + seconds
        while True:
            outcome = attempt(max(0.0, deadline - self.now()))
            if outcome or self.now() >= deadline:
                return outcome

    def _reset(self) -> None:
        # A forked child keeps the total, because it may have deadlines from before the fork.
        self._pauses = PauseDetector(self._read, self._pauses.paused_s)
        self._starting = threading.Lock()
        self._is_started = False

    def _start_thread(self) -> None:
        with self._starting:
            if not self._is_started:
                self._pauses = PauseDetector(self._read, self._pauses.paused_s)
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
    """Wait by the clock of this process (``ProcessClock.wait``)."""
    return CLOCK.wait(attempt, seconds)
