"""Spans that overlap without one lying within the other, as those of concurrent coroutines do, cannot share a line:
trace viewers drop them. Here the later one moves to a further lane of its line."""

from __future__ import annotations

from collections import deque

MAX_LANES = 64
REMEMBERED = 256
"""Spans of a lane that a longer one may still enclose."""


class Lanes:
    """Knows where spans lie; they arrive in the order of their ends, or nearly so."""

    def __init__(self) -> None:
        self._lanes: dict[str, list[deque[tuple[int, int]]]] = {}

    def place(self, line: str, began: int, ended: int) -> str:
        """The line itself, or the name of its second, third, .. lane."""
        lanes = self._lanes.setdefault(line, [])
        number = next((number for number, lane in enumerate(lanes, start=1) if _fits(lane, began, ended)),
                      min(len(lanes) + 1, MAX_LANES))
        if number > len(lanes):
            lanes.append(deque(maxlen=REMEMBERED))
        lane = lanes[number - 1]
        while lane and lane[-1][0] >= began and lane[-1][1] <= ended:
            lane.pop()
        lane.append((began, ended))
        return line if number == 1 else f"{line} ({number})"


def _fits(lane: deque[tuple[int, int]], began: int, ended: int) -> bool:
    """Whether a span encloses the last ones of a lane, or is apart from them."""
    for first, last in reversed(lane):
        if last <= began:
            return True
        if not (began <= first and last <= ended):
            return False
    return True
