"""Detects that this process was paused, so that peers are not declared dead for it."""

from __future__ import annotations

import time

LATE_S = 0.5
"""Less than this is how long a busy machine keeps anybody waiting, and no pause."""


class PauseDetector:
    """Detects pauses of its caller, who waits at most ``every_s`` between two looks.

    A machine that stands still for some seconds comes too late to its looks. Its peers may have stood still with it, or
    have spoken meanwhile and were not read, so the time counts for nobody.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._looked = time.monotonic()

    def look(self) -> float:
        """Return for how many seconds the caller stood still since the last look; 0.0 when it came about in time."""
        now = time.monotonic()
        late, self._looked = now - self._looked - self._every_s, now
        return late if late > LATE_S else 0.0

    def excused(self, heard: float) -> float:
        """Look, and return when somebody counts as heard who was heard then."""
        return excused(heard, self.look())


def excused(heard: float, paused_s: float) -> float:
    """Return when somebody counts as heard who was heard then, after a pause: never later than now. Whoever was read at
    the end of a long look would have its time twice."""
    return min(time.monotonic(), heard + paused_s)
