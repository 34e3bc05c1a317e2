"""Random histories of the sequence buffer against its invariants (docs/reference/dataflow.md 4)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from realhf.dataflow.buffer import (
    AsyncIOSequenceBuffer,
    BatchLease,
    BufferClosed,
    BufferedSample,
    EndOfData,
)
from tests.dataflow.toy_buffer import buffer_graph, check_invariants, meta_of, outputs_of

MAX_SIZE = 24
SIZES = {"gen": 2, "ref": 3, "rew": 1, "train": 6}
STEP_BATCHES = st.sampled_from([0, 1])


class WatchedBuffer(AsyncIOSequenceBuffer):
    """Checks every batch at the instant it is issued: full or final, and birth-minimal (invariants
    4, 5)."""

    def _issue(self, call: Any, step_batch: int, count: int) -> BatchLease:
        eligible = sorted(
            (sample.birth, sample.id)
            for sample in self.samples.values()
            if sample.step_batch == step_batch and sample.state.get(call.name) == "ready"
        )
        lease = super()._issue(call, step_batch, count)
        assert list(lease.ids) == [sample_id for _, sample_id in eligible[:count]]
        assert len(set(lease.ids)) == count == len(lease.ids)
        assert count == call.n_seqs or (self.closed is not None and count == len(eligible))
        return lease


class BufferMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.graph = buffer_graph(**SIZES)
        self.buffer = WatchedBuffer(self.graph, max_size=MAX_SIZE, on_retire=self.note_retired)
        self.count = 0
        self.getters: list[tuple[str, asyncio.Task[BatchLease]]] = []
        self.putters: list[tuple[int, asyncio.Task[None]]] = []
        self.leases: list[BatchLease] = []
        self.lengths: dict[tuple[str, str], list[int]] = {}
        self.done: Counter[tuple[str, str]] = Counter()
        self.retired: list[str] = []

    # ---- rules

    @rule(n=st.integers(1, 9), step_batch=STEP_BATCHES)
    def put(self, n: int, step_batch: int) -> None:
        ids = [f"s{self.count + i}" for i in range(n)]
        self.count += n
        task = self.loop.create_task(self.buffer.put_batch(meta_of(ids), step_batch=step_batch))
        self.putters.append((n, task))

    @rule(mfc=st.sampled_from(sorted(SIZES)), step_batch=STEP_BATCHES)
    def get(self, mfc: str, step_batch: int) -> None:
        self.getters.append(
            (mfc, self.loop.create_task(self.buffer.get_batch_for_rpc(mfc, step_batch)))
        )

    @rule()
    def tick(self) -> None:
        self.settle()

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99))
    def complete(self, pick: int) -> None:
        lease = self.leases.pop(pick % len(self.leases))
        self.buffer.amend_batch(lease, outputs_of(self.graph, lease))
        self.done.update((sample_id, lease.mfc) for sample_id in lease.ids)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        self.buffer.release(self.leases.pop(pick % len(self.leases)), "test")

    @precondition(lambda self: self.getters or self.putters)
    @rule(pick=st.integers(0, 99), settle=st.booleans())
    def cancel(self, pick: int, settle: bool) -> None:
        tasks = [task for _, task in [*self.getters, *self.putters]]
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
        for n, task in [item for item in self.putters if item[1].done()]:
            self.putters.remove((n, task))
            if not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), BufferClosed), task.exception()
        if self.putters:  # invariant 9: a put waits only while there is no room
            assert len(self.buffer) + self.putters[0][0] > MAX_SIZE

    def note_retired(self, samples: Sequence[BufferedSample]) -> None:
        self.retired += [sample.id for sample in samples]

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "buffer"):
            return
        check_invariants(self.buffer)
        assert all(count == 1 for count in self.done.values())
        assert len(self.retired) == len(set(self.retired))
        for sample in self.buffer.samples.values():
            for key, (batch, row) in sample.keys.items():
                now = batch.lengths(key).nested()[row]
                assert self.lengths.setdefault((sample.id, key), now) == now

    def teardown(self) -> None:
        """After any history, what is left runs to its end: no path waits for ever (invariant
        10)."""
        if not hasattr(self, "buffer"):
            return
        for _, task in [*self.getters, *self.putters]:
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
        async def work(mfc: str, step_batch: int) -> None:
            while True:
                try:
                    async with self.buffer.lease(mfc, step_batch) as lease:
                        self.buffer.amend_batch(lease, outputs_of(self.graph, lease))
                except EndOfData:
                    return
                check_invariants(self.buffer)

        await asyncio.gather(*(work(mfc, step_batch) for mfc in SIZES for step_batch in (0, 1)))


TestBuffer = pytest.mark.slow(BufferMachine.TestCase)
TestBuffer.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
