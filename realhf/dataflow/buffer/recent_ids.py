"""The ids of the samples that left last, so that one which is delivered twice is known."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

REMEMBERED = 1 << 18
"""What is sent again after an interruption is at most a few steps old, and the journal refuses it before. This bound
also covers a source that repeats itself, for as many samples as a dataset usually has."""


class RecentIds:
    """Keeps the last ``limit`` ids. Every operation costs the same, however many there are."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: set[str] = set()
        self._order: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._ids

    def add(self, ids: Iterable[str]) -> None:
        """The oldest are forgotten beyond the limit."""
        fresh = [sample_id for sample_id in ids if sample_id not in self._ids]
        self._ids.update(fresh)
        self._order.extend(fresh)
        while len(self._order) > self._limit:
            self._ids.discard(self._order.popleft())

    def isdisjoint(self, ids: Iterable[str]) -> bool:
        """Whether none of these is kept."""
        return self._ids.isdisjoint(ids)
