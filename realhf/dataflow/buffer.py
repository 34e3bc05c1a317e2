"""Knows which sample is ready for which model function call: AsyncIOSequenceBuffer.

It holds metadata only and lives in one event loop. Every change of state is synchronous; only waiting is
asynchronous, so there are no locks and a cancelled waiter leaves nothing half done. Vocabulary: a *lease* is
one call's claim on a batch; a step batch is the sample set of one step; *birth* is the order of admission.
Handling k of R resident samples costs O(k log R), amortised, in array operations.

None of this is on the path of a sample; the functions scan the resident samples.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from realhf.api.experiment import MFCDef
from realhf.api.graph import DataFlowGraph
from realhf.api.sample import DuplicateKeyError, SequenceSample
from realhf.dataflow.sample_table import MetaView, Order, ReadyQueue, SampleTable

NO_STEP_BATCH = -1


class BatchTooLarge(ValueError):
    """A put can never fit."""


class DuplicateSampleError(ValueError):
    """A sample was put twice."""


class BufferClosed(RuntimeError):
    """A put after ``close_input``."""


class EndOfData(Exception):
    """The input is closed and this call has nothing left to do."""


@dataclass(eq=False)
class BatchLease:
    """One call's claim on a batch. ``meta`` (its input keys and all metadata so far) is a snapshot, put
    together when first read."""

    lease_id: int
    mfc: str
    view: MetaView = field(repr=False)
    slots: np.ndarray = field(repr=False)

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the samples, in the order of the view."""
        return self.view.ids

    @property
    def meta(self) -> SequenceSample:
        """The metadata of the samples; it holds no tensor."""
        return self.view.sample


@dataclass(eq=False)
class Retired:
    """Samples that left the buffer after their last call."""

    view: MetaView = field(repr=False)
    births: list[int]
    step_batches: list[int]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the samples, in the order of the view."""
        return self.view.ids


@dataclass(eq=False)
class Waiter:
    """A getter that waits for a batch of its step batch (None: of any)."""

    step_batch: int | None
    future: asyncio.Future[BatchLease]


@dataclass(eq=False)
class Station:
    """The buffer's state for one model function call; ``queues`` by step batch."""

    name: str
    n_seqs: int
    bit: int
    inputs: tuple[str, ...]
    required: int
    queues: dict[int, ReadyQueue] = field(default_factory=dict)
    waiters: deque[Waiter] = field(default_factory=deque)
    leased: int = 0

    @classmethod
    def of(cls, mfc: MFCDef, index: int, inputs: Sequence[str], table: SampleTable) -> Station:
        """Return the station of a call that reads ``inputs`` and has the bit ``index``."""
        return cls(mfc.name, mfc.n_seqs, 1 << index, tuple(inputs), table.key_mask(inputs))

    @property
    def ready(self) -> int:
        """Samples that could be leased now."""
        return sum(queue.live for queue in self.queues.values())

    def queue(self, step_batch: int) -> ReadyQueue:
        """Return the queue of a step batch, a new one the first time."""
        found = self.queues.get(step_batch)
        if found is None:
            found = self.queues[step_batch] = ReadyQueue()
        return found

    def eligible(self, step_batch: int | None) -> list[ReadyQueue]:
        """Return the queues that a batch of this step batch (None: of any) may be taken from."""
        if step_batch is None:
            return list(self.queues.values())
        return [self.queues[step_batch]] if step_batch in self.queues else []

    def take(self, queues: Sequence[ReadyQueue], count: int) -> np.ndarray:
        """Slots of the ``count`` oldest samples over these queues, oldest first."""
        if len(queues) == 1:
            return queues[0].take(count)
        parts: list[np.ndarray] = []
        while count > 0:
            heads: list[tuple[Order, int]] = []
            for index, queue in enumerate(queues):
                head = queue.head()
                if head is not None:
                    heads.append((head, index))
            heads.sort()
            limit = heads[1][0] if len(heads) > 1 else None
            parts.append(queues[heads[0][1]].take(count, limit))
            count -= len(parts[-1])
        return np.concatenate(parts)


@dataclass(eq=False)
class _PutWaiter:
    count: int
    future: asyncio.Future[None]


class SpaceQueue:
    """Space is *reserved* for a waiter at the moment it becomes free, so nobody can overtake it; the waiter
    turns the reservation into samples, or gives it back, with ``settle``."""

    def __init__(self, max_size: int, size: Callable[[], int]) -> None:
        self.max_size = max_size
        self.reserved = 0
        self._size = size
        self._waiters: list[_PutWaiter] = []

    def __len__(self) -> int:
        """Puts that wait."""
        return len(self._waiters)

    @property
    def busy(self) -> bool:
        """Somebody waits, or was given space that is not filled yet."""
        return bool(self._waiters) or self.reserved > 0

    def fits(self, count: int) -> bool:
        """Whether ``count`` more samples would fit beside those that are held and reserved."""
        return self._size() + self.reserved + count <= self.max_size

    def first_fits(self) -> bool:
        """The first waiter could go on now (it never should be able to while it waits)."""
        return bool(self._waiters) and self.fits(self._waiters[0].count)

    async def wait(self, count: int) -> None:
        """Until ``count`` places are reserved for the caller. A cancelled waiter holds no reservation."""
        waiter = _PutWaiter(count, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.future
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.future.cancelled() and waiter.future.exception() is None:
                self.reserved -= count
            self.wake()
            raise

    def settle(self, count: int) -> None:
        """The caller of ``wait`` has put its samples, or failed to."""
        self.reserved -= count
        self.wake()

    def wake(self) -> None:
        """Reserve what became free for the first waiters."""
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.future.done():
                if not self.fits(waiter.count):
                    return
                self.reserved += waiter.count
                waiter.future.set_result(None)
            self._waiters.pop(0)

    def abort(self, error: BaseException) -> None:
        """Every waiter raises ``error``."""
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)
        self._waiters.clear()


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


class AsyncIOSequenceBuffer:
    """``max_size`` bounds the resident samples. ``remembered`` bounds the ids of samples that left and are still known
    as duplicates. ``on_retire`` is called with every set of samples that leaves. The attributes are for reports; change
    state by the methods."""

    def __init__(
        self,
        graph: DataFlowGraph,
        *,
        max_size: int,
        remembered: int | None = None,
        on_retire: Callable[[Retired], None] | None = None,
    ) -> None:
        if max_size < graph.n_seqs:
            raise ValueError(f"max_size={max_size} cannot hold a step: needs {graph.n_seqs}")
        if remembered is not None and remembered < max_size:
            raise ValueError(f"remembered={remembered} is less than max_size={max_size}")
        self.graph = graph
        self.max_size = max_size
        self._on_retire = on_retire
        self.table = SampleTable(min(max_size, 1024))
        self.stations = {
            mfc.name: Station.of(mfc, bit, graph.inputs(mfc.name), self.table) for bit, mfc in enumerate(graph.mfcs)
        }
        self._all_done = (1 << len(self.stations)) - 1
        self._readers = {
            key: [self.stations[name] for name in graph.consumers(key)]
            for mfc in graph.mfcs
            for key in graph.inputs(mfc.name)
        }
        self.step_batch_sizes: Counter[int] = Counter()
        self.leases: dict[int, BatchLease] = {}
        self._next_lease = 0
        self._next_birth = 0
        self.space = SpaceQueue(max_size, self.__len__)
        self._retired = RecentIds(max(REMEMBERED, 4 * max_size) if remembered is None else remembered)
        self.closed: str | None = None
        self.failure: BaseException | None = None
        self.put_total = 0
        self.evicted_total = 0
        self.released: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self.table.slot_of

    # ---- putting

    async def put_batch(self, meta: SequenceSample, *, step_batch: int | None = None) -> None:
        """Admit a batch, all or nothing; waits for room, in order.

        Raises BatchTooLarge at once if it never fits, DuplicateSampleError, BufferClosed after ``close_input``,
        ValueError on data or missing keys. A put that is cancelled while it waits has put nothing.
        """
        self._check_put(meta, step_batch)
        count = len(meta)
        where = NO_STEP_BATCH if step_batch is None else step_batch
        if not self.space.busy and self.space.fits(count):
            self._insert(meta, where)
            return
        await self.space.wait(count)
        try:
            self._check_put(meta, step_batch)
            self._insert(meta, where)
        finally:
            self.space.settle(count)

    def _check_put(self, meta: SequenceSample, step_batch: int | None) -> None:
        if self.failure is not None:
            raise self.failure
        if self.closed is not None:
            raise BufferClosed(f"no more input: {self.closed}")
        if meta.data is not None:
            raise ValueError("the buffer holds metadata only; put sample.meta()")
        if len(meta) > self.max_size:
            raise BatchTooLarge(f"{len(meta)} samples never fit a buffer of {self.max_size}")
        if step_batch is not None and step_batch < 0:
            raise ValueError(f"step batch {step_batch} is negative")
        missing = sorted(set(self.graph.required_dataset_keys()) - meta.keys)
        if missing:
            raise ValueError(f"samples lack dataset keys {missing}, so no call could ever take them")
        ids = meta.ids
        if not (self.table.slot_of.keys().isdisjoint(ids) and self._retired.isdisjoint(ids)):
            known = [i for i in ids if i in self.table.slot_of or i in self._retired]
            raise DuplicateSampleError(f"{len(known)} samples were put before: {known[:5]}")

    def _insert(self, meta: SequenceSample, step_batch: int) -> None:
        count, table = len(meta), self.table
        mask = table.key_mask(meta.keys)
        order = np.arange(self._next_birth, self._next_birth + count)
        self._next_birth += count
        slots = table.add(meta.ids, order, step_batch, time.monotonic())
        table.write(slots, meta, mask)
        self.put_total += count
        self.step_batch_sizes[step_batch] += count
        for station in self.stations.values():
            queue = station.queue(step_batch)
            queue.not_issued += count
            if station.required & ~mask == 0:
                table.ready[slots] |= station.bit
                queue.push(order, table.serial[slots], slots)
        for station in self.stations.values():
            self._serve(station)

    # ---- getting

    async def get_batch_for_rpc(self, mfc: str, step_batch: int | None = None) -> BatchLease:
        """The ``n_seqs`` oldest samples that ``mfc`` may run on, leased to the caller; waits for them.

        With ``step_batch`` only that step batch is eligible. Concurrent getters of one call are served in order.
        Raises EndOfData when the input is closed and nothing is left, or the exception given to ``abort``.
        """
        station = self.stations[mfc]
        if self.failure is not None:
            raise self.failure
        waiter = Waiter(step_batch, asyncio.get_running_loop().create_future())
        station.waiters.append(waiter)
        self._serve(station)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter in station.waiters:
                station.waiters.remove(waiter)
            future = waiter.future
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result(), "cancelled")
            raise

    @asynccontextmanager
    async def lease(self, mfc: str, step_batch: int | None = None) -> AsyncIterator[BatchLease]:
        """A lease that goes back to ready when the block is left without ``complete``."""
        lease = await self.get_batch_for_rpc(mfc, step_batch)
        try:
            yield lease
        finally:
            if lease.lease_id in self.leases:
                self.release(lease, "not completed")

    def _serve(self, station: Station) -> None:
        """Give batches to the waiters of one call, in order, while there are full ones."""
        waiting = [w for w in station.waiters if not w.future.done()]
        station.waiters.clear()
        for waiter in waiting:
            queues = station.eligible(waiter.step_batch)
            available = sum(queue.live for queue in queues)
            if available >= station.n_seqs:
                waiter.future.set_result(self._issue(station, queues, station.n_seqs))
            elif self.closed is not None and not self.space.busy:
                self._settle_tail(station, waiter, queues, available)
            if not waiter.future.done():
                station.waiters.append(waiter)

    def _settle_tail(self, station: Station, waiter: Waiter, queues: list[ReadyQueue], available: int) -> None:
        """No more input will come: serve what is smaller than a batch, or say that it is over."""
        left = sum(queue.not_issued for queue in queues)
        if left and (left >= station.n_seqs or available < left):
            return
        if left:
            waiter.future.set_result(self._issue(station, station.eligible(waiter.step_batch), left))
        else:
            waiter.future.set_exception(EndOfData(f"{station.name}: {self.closed}"))

    def _issue_back(self, station: Station, slots: np.ndarray) -> None:
        for step_batch in np.unique(self.table.step_batch[slots]).tolist():
            part = slots[self.table.step_batch[slots] == step_batch]
            station.queue(step_batch).push(self.table.birth[part], self.table.serial[part], part)

    def _issue(self, station: Station, queues: list[ReadyQueue], count: int) -> BatchLease:
        table = self.table
        slots = station.take(queues, count)
        self._count_not_issued(station, slots, -1)
        table.leased[slots] |= station.bit
        station.leased += len(slots)
        self._next_lease += 1
        view = table.view(slots, station.inputs)
        lease = BatchLease(self._next_lease, station.name, view, slots)
        self.leases[lease.lease_id] = lease
        return lease

    def _count_not_issued(self, station: Station, slots: np.ndarray, sign: int) -> None:
        for step_batch, count in zip(*_counts(self.table.step_batch[slots]), strict=True):
            station.queue(step_batch).not_issued += sign * count

    # ---- answering

    def _check_amend(self, slots: np.ndarray, ids: tuple[str, ...], meta: SequenceSample) -> None:
        if meta.data is not None:
            raise ValueError("the buffer holds metadata only; amend with sample.meta()")
        if meta.ids != ids:
            raise ValueError("the outputs are about other samples, or in another order")
        present = int(np.bitwise_or.reduce(self.table.keys[slots])) & self.table.key_mask(meta.keys)
        if present:
            raise DuplicateKeyError(f"samples already have keys {self.table.key_names(present)}")

    def _amend(self, slots: np.ndarray, meta: SequenceSample) -> None:
        table = self.table
        table.write(slots, meta, table.key_mask(meta.keys))
        keys = table.keys[slots]
        readers = {s.name: s for key in sorted(meta.keys) for s in self._readers.get(key, ())}
        for station in readers.values():
            new = slots[((keys & station.required) == station.required) & (table.ready[slots] & station.bit == 0)]
            table.ready[new] |= station.bit
            self._issue_back(station, new)
        for station in readers.values():
            self._serve(station)

    def complete(self, lease: BatchLease, outputs: SequenceSample | None = None) -> None:
        """The call has run: add its outputs, wake the calls that can run now, and mark its samples done, in one
        change. Samples that every call has completed leave the buffer. Raises DuplicateKeyError, or ValueError on
        outputs about other samples and on a lease that is not active; then nothing has changed."""
        station = self._active(lease)
        if outputs is not None:
            self._check_amend(lease.slots, lease.ids, outputs)
        del self.leases[lease.lease_id]
        table, slots = self.table, lease.slots
        table.leased[slots] &= ~station.bit
        table.done[slots] |= station.bit
        station.leased -= len(slots)
        if outputs is not None:
            self._amend(slots, outputs)
        finished = slots[table.done[slots] == self._all_done]
        retired = self._retire(finished) if len(finished) else None
        self._serve_closed()
        if retired is not None and self._on_retire is not None:
            self._on_retire(retired)

    def release(self, lease: BatchLease, reason: str) -> None:
        """Give the batch back, births unchanged (the call failed or was cancelled)."""
        station = self._active(lease)
        del self.leases[lease.lease_id]
        self.table.leased[lease.slots] &= ~station.bit
        station.leased -= len(lease.slots)
        self.released[reason] += len(lease.slots)
        self._count_not_issued(station, lease.slots, 1)
        self._issue_back(station, lease.slots)
        self._serve(station)
        self._serve_closed()

    def _active(self, lease: BatchLease) -> Station:
        if self.leases.get(lease.lease_id) is not lease:
            raise ValueError(f"lease {lease.lease_id} of {lease.mfc} is not active (completed or released)")
        return self.stations[lease.mfc]

    def _retire(self, slots: np.ndarray) -> Retired:
        """Let samples leave that every call has done."""
        table = self.table
        retired = Retired(table.view(slots), table.birth[slots].tolist(), table.step_batch[slots].tolist())
        for step_batch, count in zip(*_counts(table.step_batch[slots]), strict=True):
            self.step_batch_sizes[step_batch] -= count
        table.remove(slots)
        for step_batch in {c for c in retired.step_batches if self.step_batch_sizes[c] == 0}:
            del self.step_batch_sizes[step_batch]
            for station in self.stations.values():
                station.queues.pop(step_batch, None)
        self._retired.add(retired.ids)
        self.evicted_total += len(slots)
        self.space.wake()
        return retired

    # ---- ending

    def close_input(self, reason: str) -> None:
        """Nothing more will be put: getters drain what is there, then get EndOfData with this reason. A put
        that waits for space must be finished or cancelled first (ValueError)."""
        if self.space.busy:
            raise ValueError("close_input while a put waits for space")
        self.closed = reason
        self._serve_closed()

    def _serve_closed(self) -> None:
        if self.closed is not None:
            for station in self.stations.values():
                self._serve(station)

    def abort(self, error: BaseException) -> None:
        """Every present and future waiter raises ``error``."""
        self.failure = error
        self.space.abort(error)
        for station in self.stations.values():
            for waiter in station.waiters:
                if not waiter.future.done():
                    waiter.future.set_exception(error)
            station.waiters.clear()

    # ---- reports

    def stats(self) -> dict[str, Any]:
        """Resident samples, per call ready/leased/waiting, the oldest age in seconds, and totals."""
        return stats(self)

    def explain_wait(self, mfc: str, step_batch: int | None = None) -> str:
        """Why ``mfc`` does not run: which keys are missing on how many samples, and who produces them."""
        return explain_wait(self, mfc, step_batch)

    def check_invariants(self) -> None:
        """Recompute everything from the table; AssertionError names the invariant that does not hold."""
        check_invariants(self)


def _counts(values: np.ndarray) -> tuple[list[int], list[int]]:
    """Distinct values and how often each occurs."""
    if not len(values):
        return [], []
    first = int(values[0])
    if (values == first).all():
        return [first], [len(values)]
    distinct, counts = np.unique(values, return_counts=True)
    return distinct.tolist(), counts.tolist()


def stats(buffer: AsyncIOSequenceBuffer) -> dict[str, Any]:
    """Figures for the log; ages in seconds."""
    slots = buffer.table.resident()
    oldest = time.monotonic() - float(buffer.table.put_time[slots].min()) if len(slots) else 0.0
    return {
        "resident": len(buffer),
        "max_size": buffer.max_size,
        "putters_waiting": len(buffer.space),
        "oldest_age_s": oldest,
        "put": buffer.put_total,
        "evicted": buffer.evicted_total,
        "released": dict(buffer.released),
        "calls": {
            s.name: {"ready": s.ready, "leased": s.leased, "waiting": len(s.waiters)} for s in buffer.stations.values()
        },
    }


def explain_wait(buffer: AsyncIOSequenceBuffer, mfc: str, step_batch: int | None) -> str:
    """One line: what ``mfc`` has, what is missing and who produces it."""
    station, table = buffer.stations[mfc], buffer.table
    slots = table.resident()
    if step_batch is not None:
        slots = slots[table.step_batch[slots] == step_batch]
    slots = slots[(table.leased[slots] | table.done[slots]) & station.bit == 0]
    ready = int(np.count_nonzero(table.ready[slots] & station.bit))
    where = "" if step_batch is None else f" of step {step_batch}"
    text = f"{mfc} takes {station.n_seqs} samples{where}: {ready} ready, {len(slots)} not yet taken"
    for key in station.inputs:
        missing = int(np.count_nonzero(table.keys[slots] & table.key_mask([key]) == 0))
        if missing:
            text += f"; {missing} lack {key!r} (from {' or '.join(buffer.graph.producers(key))})"
    if len(slots) < station.n_seqs:
        text += f"; the source owes {station.n_seqs - len(slots)}"
    return text


def check_invariants(buffer: AsyncIOSequenceBuffer) -> None:
    """Check invariants 1, 2, 3, 6, 8, 9 and 11 of docs/reference/dataflow.md 4; the others need a history."""
    table, slots = buffer.table, buffer.table.resident()
    _check(len(slots) == len(table) == sum(buffer.step_batch_sizes.values()), 11, "resident count")
    _check(all(table.ids[s] == i for i, s in table.slot_of.items()), 11, "index of ids")
    _check(buffer.put_total == len(slots) + buffer.evicted_total, 1, "put = resident + evicted")
    _check(len(slots) + buffer.space.reserved <= buffer.max_size, 8, "resident exceeds max_size")
    everyone = sum(s.bit for s in buffer.stations.values())
    _check(not (table.done[slots] == everyone).any(), 6, "a sample stays after all calls are done")
    for station in buffer.stations.values():
        _check_station(buffer, station, slots)
    _check(not buffer.space.first_fits(), 9, "a put waits while there is room")


def _check_station(buffer: AsyncIOSequenceBuffer, station: Station, slots: np.ndarray) -> None:
    table, name = buffer.table, station.name
    ready = table.ready[slots] & station.bit != 0
    leased = table.leased[slots] & station.bit != 0
    done = table.done[slots] & station.bit != 0
    has_keys = (table.keys[slots] & station.required) == station.required
    _check(bool((ready == has_keys).all()), 2, f"{name}: ready differs from required keys present")
    _check(not (leased & done).any(), 3, f"{name}: a sample is leased and done")
    _check(not (leased & ~ready).any(), 3, f"{name}: a leased sample is not ready")
    _check(station.leased == int(leased.sum()), 11, f"{name}: leased counter")
    by_lease = sum(len(lease.ids) for lease in buffer.leases.values() if lease.mfc == name)
    _check(station.leased == by_lease, 11, f"{name}: active leases")
    free = ~leased & ~done
    for step_batch in {*station.queues, *table.step_batch[slots].tolist()}:
        inside = table.step_batch[slots] == step_batch
        queue = station.queues.get(step_batch)
        _check(queue is not None, 11, f"{name}: no queue for step batch {step_batch}")
        if queue is not None:
            held = sorted(queue.slots().tolist())
            _check(held == sorted(slots[inside & free & ready].tolist()), 11, f"{name}: queue {step_batch}")
            _check(queue.live == len(held), 11, f"{name}: live counter of {step_batch}")
            _check(queue.not_issued == int((inside & free).sum()), 11, f"{name}: not_issued of {step_batch}")
    for waiter in station.waiters:
        if not waiter.future.done():
            available = sum(queue.live for queue in station.eligible(waiter.step_batch))
            _check(available < station.n_seqs, 9, f"{name}: waits while a batch is ready")


def _check(holds: bool, number: int, what: str) -> None:
    if not holds:
        raise AssertionError(f"buffer invariant {number}: {what}")
