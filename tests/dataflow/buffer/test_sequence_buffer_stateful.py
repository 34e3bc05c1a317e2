"""Random histories of the sequence buffer against its invariants (docs/reference/dataflow.md 4)."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from realhf.dataflow.buffer import AsyncIOSequenceBuffer, BatchLease, BufferClosed, EndOfData, Retired
from tests.dataflow.buffer.toy_buffer import buffer_graph, meta_of, outputs_of

MAX_SIZE = 24
SIZES = {"gen": 2, "ref": 3, "rew": 1, "train": 6}
STEP_BATCHES = st.sampled_from([None, 0, 1])


class WatchedBuffer(AsyncIOSequenceBuffer):
    """Checks every batch at the instant it is issued: full or final, and birth-minimal (invariants 4, 5)."""

    def _issue(self, station: Any, queues: Any, count: int) -> BatchLease:
        table, slots = self.table, self.table.resident()
        step_batches = {c for c, queue in station.queues.items() if any(queue is q for q in queues)}
        free = (table.ready[slots] & station.bit != 0) & ((table.leased[slots] | table.done[slots]) & station.bit == 0)
        free &= np.isin(table.step_batch[slots], sorted(step_batches))
        eligible = sorted((int(table.birth[s]), int(table.serial[s]), table.ids[s]) for s in slots[free])
        lease = super()._issue(station, queues, count)
        assert list(lease.ids) == [sample_id for _, _, sample_id in eligible[:count]]
        assert len(set(lease.ids)) == count == len(lease.ids)
        assert count == station.n_seqs or (self.closed is not None and count == len(eligible))
        return lease


class BufferMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.graph = buffer_graph(**SIZES)
        self.buffer = WatchedBuffer(self.graph, max_size=MAX_SIZE, on_retire=self.note_retired)
        self.count = 0
        self.getters: list[tuple[str, asyncio.Task[BatchLease]]] = []
        self.putters: list[asyncio.Task[None]] = []
        self.leases: list[BatchLease] = []
        self.lengths: dict[tuple[str, str], list[int]] = {}
        self.done: Counter[tuple[str, str]] = Counter()
        self.retired: list[str] = []

    # ---- rules

    @rule(n=st.integers(1, 9), step_batch=STEP_BATCHES)
    def put(self, n: int, step_batch: int | None) -> None:
        ids = [f"s{self.count + i}" for i in range(n)]
        self.count += n
        self.putters.append(self.loop.create_task(self.buffer.put_batch(meta_of(ids), step_batch=step_batch)))

    @rule(mfc=st.sampled_from(sorted(SIZES)), step_batch=STEP_BATCHES)
    def get(self, mfc: str, step_batch: int | None) -> None:
        self.getters.append((mfc, self.loop.create_task(self.buffer.get_batch_for_rpc(mfc, step_batch))))

    @rule()
    def tick(self) -> None:
        self.settle()

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99))
    def complete(self, pick: int) -> None:
        lease = self.leases.pop(pick % len(self.leases))
        self.buffer.complete(lease, outputs_of(self.graph, lease))
        self.done.update((sample_id, lease.mfc) for sample_id in lease.ids)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        self.buffer.release(self.leases.pop(pick % len(self.leases)), "test")

    @precondition(lambda self: self.getters or self.putters)
    @rule(pick=st.integers(0, 99), settle=st.booleans())
    def cancel(self, pick: int, settle: bool) -> None:
        tasks = [task for _, task in self.getters] + self.putters
        tasks[pick % len(tasks)].cancel()
        if settle:
            self.settle()

    # ---- what the rules share

    def settle(self) -> None:
        """Let every task run as far as it can; collect the leases."""

        async def pause() -> None:
            for _ in range(4):
                await asyncio.sleep(0)

        self.loop.run_until_complete(pause())
        for mfc, task in [item for item in self.getters if item[1].done()]:
            self.getters.remove((mfc, task))
            if not task.cancelled() and not isinstance(task.exception(), EndOfData):
                self.leases.append(task.result())
        for task in [task for task in self.putters if task.done()]:
            self.putters.remove(task)
            if not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), BufferClosed), task.exception()

    def note_retired(self, retired: Retired) -> None:
        self.retired += retired.ids

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "buffer"):
            return
        self.buffer.check_invariants()
        assert all(count == 1 for count in self.done.values())
        assert len(self.retired) == len(set(self.retired))
        table = self.buffer.table
        for sample_id, slot in table.slot_of.items():
            for key in table.key_names(int(table.keys[slot])):
                now = table.lengths(slot, key)
                assert self.lengths.setdefault((sample_id, key), now) == now

    def teardown(self) -> None:
        """After any history, what is left runs to its end: no path waits for ever (invariant 10)."""
        if not hasattr(self, "buffer"):
            return
        for _, task in self.getters:
            task.cancel()
        for task in self.putters:
            task.cancel()
        self.settle()
        for lease in self.leases:
            self.buffer.release(lease, "end")
        self.buffer.close_input("end of the test")
        self.loop.run_until_complete(asyncio.wait_for(self.drain(), 60))
        assert len(self.buffer) == 0
        assert self.buffer.put_total == len(self.retired)
        self.loop.close()

    async def drain(self) -> None:
        async def work(mfc: str) -> None:
            while True:
                try:
                    async with self.buffer.lease(mfc) as lease:
                        self.buffer.complete(lease, outputs_of(self.graph, lease))
                except EndOfData:
                    return
                self.buffer.check_invariants()

        await asyncio.gather(*(work(mfc) for mfc in SIZES))


TestBuffer = pytest.mark.slow(BufferMachine.TestCase)
TestBuffer.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
