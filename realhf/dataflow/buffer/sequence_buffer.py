"""AsyncIOSequenceBuffer: which sample is ready for which model function call (docs/reference/dataflow.md 4).

It holds metadata only and lives in one event loop. Every change of state is synchronous; only waiting is
asynchronous, so there are no locks and a cancelled waiter leaves nothing half done. Vocabulary: a *lease* is
one call's claim on a batch; a step batch is the sample set of one step; *birth* is the order of admission.
Handling k of R resident samples costs O(k log R), amortised, in array operations.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from realhf.api.graph import DataFlowGraph
from realhf.api.sample import DuplicateKeyError, SequenceSample
from realhf.dataflow.buffer import report as buffer_report
from realhf.dataflow.buffer.ready_queue import ReadyQueue
from realhf.dataflow.buffer.recent_ids import REMEMBERED, RecentIds
from realhf.dataflow.buffer.sample_table import SampleTable
from realhf.dataflow.buffer.space_queue import SpaceQueue
from realhf.dataflow.buffer.types import (
    NO_STEP_BATCH,
    BatchLease,
    BatchTooLarge,
    BufferClosed,
    DuplicateSampleError,
    EndOfData,
    Retired,
    Station,
    Waiter,
)


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
        return buffer_report.stats(self)

    def explain_wait(self, mfc: str, step_batch: int | None = None) -> str:
        """Why ``mfc`` does not run: which keys are missing on how many samples, and who produces them."""
        return buffer_report.explain_wait(self, mfc, step_batch)

    def check_invariants(self) -> None:
        """Recompute everything from the table; AssertionError names the invariant that does not hold."""
        buffer_report.check_invariants(self)


def _counts(values: np.ndarray) -> tuple[list[int], list[int]]:
    """Distinct values and how often each occurs."""
    if not len(values):
        return [], []
    first = int(values[0])
    if (values == first).all():
        return [first], [len(values)]
    distinct, counts = np.unique(values, return_counts=True)
    return distinct.tolist(), counts.tolist()
