"""The samples that wait for one model function call, oldest first.

A heap of *runs*: samples that became ready together stay one sorted run of arrays, so handling k samples
costs a few array operations and O(log R) heap steps.
"""

from __future__ import annotations

import heapq

import numpy as np

Order = tuple[int, int]
Run = tuple[np.ndarray, np.ndarray, np.ndarray]


class ReadyQueue:
    """Ordered by (birth, serial). ``live`` counts entries that can be taken; ``not_issued`` counts the
    resident samples of the step batch that this call has neither leased nor done, ready or not."""

    __slots__ = ("_heap", "live", "not_issued")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Run]] = []
        self.live = 0
        self.not_issued = 0

    def push(self, births: np.ndarray, serials: np.ndarray, slots: np.ndarray) -> None:
        """Add one run; the three int64 arrays of equal length need not be sorted."""
        if len(slots) == 0:
            return
        if len(slots) > 1 and not (births[1:] > births[:-1]).all():
            order = np.lexsort((serials, births))
            births, serials, slots = births[order], serials[order], slots[order]
        self.live += len(slots)
        self._push_run((births, serials, slots))

    def _push_run(self, run: Run) -> None:
        heapq.heappush(self._heap, (int(run[0][0]), int(run[1][0]), run))

    def head(self) -> Order | None:
        """The oldest entry's order."""
        return self._heap[0][:2] if self._heap else None

    def take(self, n: int, limit: Order | None = None) -> np.ndarray:
        """Remove and return the slots of up to ``n`` oldest entries, only those before ``limit``."""
        parts: list[np.ndarray] = []
        while n > 0 and self._heap and (limit is None or self._heap[0][:2] < limit):
            births, serials, slots = heapq.heappop(self._heap)[2]
            bound = min((order for order in (self.head(), limit) if order is not None), default=None)
            stop = min(n, len(slots))
            if bound is not None and births[stop - 1] >= bound[0]:
                stop = max(1, int(births[:stop].searchsorted(bound[0])))
            taken = slots[:stop]
            if stop < len(slots):
                self._push_run((births[stop:], serials[stop:], slots[stop:]))
            n -= len(taken)
            self.live -= len(taken)
            parts.append(taken)
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def slots(self) -> np.ndarray:
        """Slots of all entries in no order; for checks, O(entries)."""
        return np.concatenate([np.empty(0, np.int64), *(slots for _, _, (_, _, slots) in self._heap)])
