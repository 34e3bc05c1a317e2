"""Holds the columns that describe resident samples, and the queues that order them for each call.

A sample's lengths are not copied out of the batch they came in: a column per key remembers the batch and the
row, and ``MetaView`` puts a ``SequenceSample`` together only when somebody reads it.

A heap of *runs*: samples that became ready together stay one sorted run of arrays, so handling k samples
costs a few array operations and O(log R) heap steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from realhf.api.sample import Lengths, SequenceSample

MAX_KEYS = 62


class _Column:
    """Where one key (or one metadata field) of every slot is found: ``part[slot]`` at ``row[slot]``."""

    __slots__ = ("part", "row")

    def __init__(self, capacity: int) -> None:
        self.part = np.full(capacity, None, dtype=object)
        self.row = np.zeros(capacity, np.int64)

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` samples; new ones are nowhere."""
        self.part = np.concatenate([self.part, np.full(capacity - len(self.part), None, dtype=object)])
        self.row = _grown(self.row, capacity, 0)


class MetaView:
    """The metadata of some samples as it was when the view was taken."""

    def __init__(
        self,
        ids: tuple[str, ...],
        columns: Mapping[str, tuple[np.ndarray, np.ndarray]],
        fields: Mapping[str, tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self.ids = ids
        self._columns = columns
        self._fields = fields

    @cached_property
    def metadata(self) -> dict[str, list[Any]]:
        """Every metadata field that all samples of the view have, one list item per sample."""
        found: dict[str, list[Any]] = {}
        for name, (parts, rows) in self._fields.items():
            if any(part is None for part in parts):
                continue
            lists = {id(part): part.metadata[name] for part in _distinct(parts)}
            found[name] = [lists[id(part)][row] for part, row in zip(parts, rows.tolist(), strict=True)]
        return found

    @cached_property
    def sample(self) -> SequenceSample:
        """A metadata-only sample of the view's keys, in the order of ``ids``. Raises ValueError when a key
        has more than one dtype or trailing shape among these samples."""
        lengths: dict[str, Lengths] = {}
        dtypes: dict[str, str] = {}
        trailing: dict[str, tuple[int, ...]] = {}
        for key, (parts, rows) in self._columns.items():
            batches = _distinct(parts)
            kinds = {(batch.dtypes[key], batch.trailing_shapes[key]) for batch in batches}
            if len(kinds) != 1:
                raise ValueError(f"key {key!r} has several dtypes or shapes in one batch: {sorted(kinds)}")
            ((dtypes[key], trailing[key]),) = kinds
            if len(batches) == 1:
                lengths[key] = batches[0].lengths(key).take(rows)
            else:
                nested = {id(batch): batch.lengths(key).nested() for batch in batches}
                pairs = zip(parts, rows.tolist(), strict=True)
                lengths[key] = Lengths.of([nested[id(part)][row] for part, row in pairs])
        return SequenceSample.from_lengths(self.ids, lengths, dtypes, trailing, None, self.metadata)


def _distinct(parts: np.ndarray) -> list[SequenceSample]:
    return list({id(part): part for part in parts}.values())


class SampleTable:
    """Arrays with one entry per slot: ``birth``, ``serial`` (unique, -1 in a free slot), ``step_batch``,
    ``put_time`` and the bit masks ``keys``, ``ready``, ``leased`` and ``done``."""

    def __init__(self, capacity: int) -> None:
        self.birth = np.zeros(capacity, np.int64)
        self.serial = np.full(capacity, -1, np.int64)
        self.step_batch = np.zeros(capacity, np.int64)
        self.put_time = np.zeros(capacity, np.float64)
        self.keys = np.zeros(capacity, np.int64)
        self.ready = np.zeros(capacity, np.int64)
        self.leased = np.zeros(capacity, np.int64)
        self.done = np.zeros(capacity, np.int64)
        self.ids = np.full(capacity, None, dtype=object)
        self.slot_of: dict[str, int] = {}
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self._n_free = capacity
        self._next_serial = 0
        self._key_bits: dict[str, int] = {}
        self._columns: dict[str, _Column] = {}
        self._fields: dict[str, _Column] = {}

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def capacity(self) -> int:
        """How many samples fit before the columns grow."""
        return len(self.birth)

    def key_mask(self, keys: Iterable[str]) -> int:
        """The bits of ``keys``; a new key gets the next bit. Raises ValueError beyond 62 keys."""
        mask = 0
        for key in keys:
            if key not in self._key_bits:
                if len(self._key_bits) == MAX_KEYS:
                    raise ValueError(f"no bit left for key {key!r}: a buffer holds at most {MAX_KEYS} keys")
                self._key_bits[key] = 1 << len(self._key_bits)
                self._columns[key] = _Column(self.capacity)
            mask |= self._key_bits[key]
        return mask

    def key_names(self, mask: int) -> list[str]:
        """Return the keys whose bits are set in ``mask``, the inverse of ``key_mask``."""
        return [key for key, bit in self._key_bits.items() if mask & bit]

    def add(self, ids: Sequence[str], births: np.ndarray, step_batch: int, now: float) -> np.ndarray:
        """Give each id a slot; int64 slots in the order of ``ids``, which must be new."""
        count = len(ids)
        if count > self._n_free:
            self._grow(count)
        self._n_free -= count
        slots = self._free[self._n_free : self._n_free + count][::-1].copy()
        self.birth[slots] = births
        self.serial[slots] = np.arange(self._next_serial, self._next_serial + count)
        self._next_serial += count
        self.step_batch[slots] = step_batch
        self.put_time[slots] = now
        for column in (self.keys, self.ready, self.leased, self.done):
            column[slots] = 0
        self.ids[slots] = ids
        self.slot_of.update(zip(ids, slots.tolist(), strict=True))
        return slots

    def remove(self, slots: np.ndarray) -> None:
        """Free the slots and forget what their samples referred to."""
        for sample_id in self.ids[slots]:
            del self.slot_of[sample_id]
        self.serial[slots] = -1
        self.ids[slots] = None
        for column in (*self._columns.values(), *self._fields.values()):
            column.part[slots] = None
        self._free[self._n_free : self._n_free + len(slots)] = slots[::-1]
        self._n_free += len(slots)

    def _grow(self, at_least: int) -> None:
        old = self.capacity
        new = max(2 * old, old + at_least)
        for name in ("birth", "step_batch", "put_time", "keys", "ready", "leased", "done"):
            setattr(self, name, _grown(getattr(self, name), new, 0))
        self.serial = _grown(self.serial, new, -1)
        self.ids = np.concatenate([self.ids, np.full(new - old, None, dtype=object)])
        free = np.empty(new, np.int64)
        free[: new - old] = np.arange(new - 1, old - 1, -1)
        free[new - old : new - old + self._n_free] = self._free[: self._n_free]
        self._free, self._n_free = free, self._n_free + new - old
        for column in (*self._columns.values(), *self._fields.values()):
            column.grow(new)

    def resident(self) -> np.ndarray:
        """All occupied slots; O(capacity), for reports and checks."""
        return np.flatnonzero(self.serial >= 0)

    def write(self, slots: np.ndarray, meta: SequenceSample, mask: int) -> None:
        """Refer these slots to the rows of ``meta`` for its keys and metadata fields."""
        rows = np.arange(len(slots), dtype=np.int64)
        self.keys[slots] |= mask
        for key in meta.keys:
            column = self._columns[key]
            column.part[slots] = meta
            column.row[slots] = rows
        for name in meta.metadata:
            column = self._fields.get(name)
            if column is None:
                column = self._fields[name] = _Column(self.capacity)
            column.part[slots] = meta
            column.row[slots] = rows

    def view(self, slots: np.ndarray, keys: Iterable[str] = ()) -> MetaView:
        """A snapshot of these samples: their ids, the given keys and all metadata fields."""
        columns = {key: (c.part[slots], c.row[slots]) for key in keys for c in [self._columns[key]]}
        fields = {name: (c.part[slots], c.row[slots]) for name, c in self._fields.items()}
        return MetaView(tuple(self.ids[slots]), columns, fields)

    def lengths(self, slot: int, key: str) -> list[int]:
        """Sequence lengths of one resident sample; for checks."""
        column = self._columns[key]
        return column.part[slot].lengths(key).nested()[column.row[slot]]


def _grown(array: np.ndarray, capacity: int, fill: float) -> np.ndarray:
    extra = np.full(capacity - len(array), fill, dtype=array.dtype)
    return np.concatenate([array, extra])


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
