"""The samples that wait for one model function call, oldest first.

A heap of *runs*: samples that became ready together stay one sorted run of arrays, so handling k samples
costs a few array operations and O(log R) heap steps. Entries of dropped samples die in place (their serial no
longer matches the table) and are skipped; when half of the entries are dead the runs are rebuilt.
"""

from __future__ import annotations

import heapq

import numpy as np

Order = tuple[int, int]
Run = tuple[np.ndarray, np.ndarray, np.ndarray]

COMPACT_ABOVE = 64


class ReadyQueue:
    """Ordered by (birth, serial). ``live`` counts entries that can be taken; ``not_issued`` counts the
    resident samples of the step batch that this call has neither leased nor done, ready or not."""

    __slots__ = ("_dead", "_heap", "live", "not_issued")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Run]] = []
        self._dead = 0
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
        """A lower bound of the oldest entry's order (the first entry may be dead)."""
        return self._heap[0][:2] if self._heap else None

    def take(self, n: int, serial_of: np.ndarray, limit: Order | None = None) -> np.ndarray:
        """Remove and return the slots of up to ``n`` oldest live entries, only those before ``limit``."""
        parts: list[np.ndarray] = []
        while n > 0 and self._heap and (limit is None or self._heap[0][:2] < limit):
            births, serials, slots = heapq.heappop(self._heap)[2]
            bound = min((order for order in (self.head(), limit) if order is not None), default=None)
            stop = min(n, len(slots))
            if bound is not None and births[stop - 1] >= bound[0]:
                stop = max(1, int(births[:stop].searchsorted(bound[0])))
            taken = slots[:stop]
            if self._dead:
                taken = taken[serial_of[taken] == serials[:stop]]
                self._dead -= stop - len(taken)
            if stop < len(slots):
                self._push_run((births[stop:], serials[stop:], slots[stop:]))
            n -= len(taken)
            self.live -= len(taken)
            parts.append(taken)
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def discard(self, n: int, serial_of: np.ndarray) -> None:
        """Note that ``n`` entries died; their slots in the table carry another serial by now."""
        self.live -= n
        self._dead += n
        if self._dead > max(self.live, COMPACT_ABOVE):
            self._compact(serial_of)

    def _compact(self, serial_of: np.ndarray) -> None:
        runs = [run for _, _, run in self._heap]
        births, serials, slots = (np.concatenate(column) for column in zip(*runs, strict=True))
        alive = serial_of[slots] == serials
        self._heap, self._dead, self.live = [], 0, 0
        self.push(births[alive], serials[alive], slots[alive])

    def live_slots(self, serial_of: np.ndarray) -> np.ndarray:
        """Slots of all live entries in no order; for checks, O(entries)."""
        runs = [run for _, _, run in self._heap]
        alive = [slots[serial_of[slots] == serials] for _, serials, slots in runs]
        return np.concatenate([np.empty(0, np.int64), *alive])
