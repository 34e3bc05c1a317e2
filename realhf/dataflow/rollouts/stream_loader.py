"""Follows finished samples from the receivers that hold them into the buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from realhf.api.calls import (
    CLEAR,
    STREAM_CHECK,
    STREAM_OPEN,
    STREAM_PRUNE,
    STREAM_RESTORE,
    Arrival,
    ClearRequest,
    Nothing,
    OpenStreamRequest,
    PayloadRef,
    PruneStreamRequest,
    RestoreStreamRequest,
    rank_of,
)
from realhf.api.sample import SequenceSample
from realhf.base.messages import Call
from realhf.base.partition import parts_near
from realhf.dataflow.buffer import AsyncIOSequenceBuffer
from realhf.dataflow.journal.ledger import RolloutLedger
from realhf.dataflow.step_source import StepLoader
from realhf.dataflow.storage_map import StorageMap
from realhf.dataflow.worker_group import A, Q, ask
from realhf.transport.rpc_master import RpcMaster

if TYPE_CHECKING:
    from realhf.dataflow.rollouts.control import RolloutControl


class Holders:
    """Knows which worker holds each sample that has arrived, for as long as its attempt counts."""

    def __init__(self) -> None:
        self._worker_of: dict[str, str] = {}

    def record(self, sample_id: str, worker: str) -> None:
        """A worker holds a sample."""
        self._worker_of[sample_id] = worker

    def elsewhere(self, sample_id: str, worker: str) -> bool:
        """Return whether another worker than this one is known to hold a sample."""
        return self._worker_of.get(sample_id, worker) != worker

    def by_worker(self, ids: Iterable[str]) -> dict[str, list[str]]:
        """Return {worker: those of the ids that it holds}."""
        found: dict[str, list[str]] = {}
        for sample_id in ids:
            found.setdefault(self._worker_of[sample_id], []).append(sample_id)
        return found

    def keep(self, counts: Callable[[str], bool]) -> None:
        """Forget all samples but those of which ``counts`` says that they still do."""
        self._worker_of = {i: worker for i, worker in self._worker_of.items() if counts(i)}


class Receivers:
    """The master's calls to the receivers of ``workers``, which are in the order of ranks; each has ``timeout_s``."""

    def __init__(self, caller: RpcMaster, workers: Sequence[str], timeout_s: float) -> None:
        self._caller, self._workers, self._timeout_s = caller, tuple(workers), timeout_s

    async def open(self, request: OpenStreamRequest) -> list[str]:
        """Have every worker listen, and return where. What a producer may have on its way is divided among them."""
        each = -(-request.credits // len(self._workers))
        requests = [replace(request, credits=each, rank=rank) for rank in range(len(self._workers))]
        answers = await asyncio.gather(
            *(self._ask(worker, STREAM_OPEN, own) for worker, own in zip(self._workers, requests, strict=True))
        )
        return [answer.endpoint for answer in answers]

    async def restore(
        self, items: Sequence[tuple[str, int, PayloadRef]], holders: Holders, timeout_s: float
    ) -> list[Arrival]:
        """Have logged samples (id, attempt, ref) brought back, each by one worker; return their arrivals, in order."""
        parts = share_out([ref for _, _, ref in items], len(self._workers))
        answers = await asyncio.gather(
            *(
                self._ask(worker, STREAM_RESTORE, RestoreStreamRequest([items[i] for i in part]), timeout_s)
                for worker, part in zip(self._workers, parts, strict=True)
            )
        )
        arrivals: dict[int, Arrival] = {}
        for worker, part, answer in zip(self._workers, parts, answers, strict=True):
            for i, arrival in zip(part, answer.arrivals, strict=True):
                arrivals[i] = arrival
                holders.record(arrival.id, worker)
        return [arrivals[i] for i in range(len(items))]

    async def prune(self, ledger: RolloutLedger) -> None:
        """Have payloads deleted that no recovery needs. The first worker also looks after the logs of workers that this
        start of the run does not have."""
        ranks, alive = len(self._workers), ledger.state.refs()
        kept: list[list[PayloadRef]] = [[] for _ in self._workers]
        for ref in alive:
            kept[rank if (rank := rank_of(ref)) < ranks else 0].append(ref)
        await asyncio.gather(
            *(
                self._ask(worker, STREAM_PRUNE, PruneStreamRequest(kept[rank], ledger.newest_payloads.get(rank), ranks))
                for rank, worker in enumerate(self._workers)
            )
        )

    async def check(self) -> None:
        """Raise what the first of them raises that cannot receive any more."""
        await asyncio.gather(*(self._ask(worker, STREAM_CHECK, Nothing()) for worker in self._workers))

    async def clear(self, ids_of: Mapping[str, Sequence[str]]) -> None:
        """Have each worker free samples."""
        await asyncio.gather(*(self._ask(worker, CLEAR, ClearRequest(list(ids))) for worker, ids in ids_of.items()))

    async def _ask(self, worker: str, call: Call[Q, A], request: Q, timeout_s: float | None = None) -> A:
        return await ask(self._caller, worker, call, request, timeout_s=timeout_s or self._timeout_s)


def share_out(refs: Sequence[PayloadRef], ranks: int) -> list[list[int]]:
    """Return the positions of the payloads that each of so many ranks reads: those of its own log, as long as these are
    no more bytes than its share, which they are after a start with fewer ranks."""
    homes = [rank_of(ref) if rank_of(ref) < ranks else None for ref in refs]
    return parts_near([ref[2] for ref in refs], homes, ranks)


class StreamLoader(StepLoader):
    """Knows nothing that a checkpoint has to hold: the journal does. ``source`` hands out the samples of a step,
    ``held_by(ids)`` says which worker holds the tensors of which; ``keys`` enter the buffer."""

    def __init__(
        self,
        source: RolloutControl,
        buffer: AsyncIOSequenceBuffer,
        storage: StorageMap,
        *,
        held_by: Callable[[Sequence[str]], Mapping[str, Sequence[str]]],
        keys: Sequence[str],
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._source, self._buffer, self._storage = source, buffer, storage
        self._held_by, self._keys = held_by, tuple(keys)
        self._waits_for: int | None = None
        self._busy = busy

    @property
    def busy(self) -> bool:
        """Whether samples are in play, or what they wait for is on its way."""
        return self._busy()

    @property
    def activity(self) -> str:
        """What it waits for."""
        if self._waits_for is None:
            return "waits until a step is finished"
        return f"step {self._waits_for}: {self._source.waiting_for(self._waits_for)}"

    async def run(self, first_step: int) -> None:
        """Put step batch after step batch. A smaller one is the last, and can be trained only when the buffer knows
        that no more comes."""
        step = first_step
        while True:
            await self._free.acquire()
            self._waits_for = step
            metas = await self._source.step_batch(step)
            self._waits_for = None
            if metas:
                meta = SequenceSample.gather([meta.select(self._keys) for meta in metas], allow_metadata_loss=True)
                for worker, ids in self._held_by(meta.ids).items():
                    self._storage.record(ids, meta.keys, worker)
                await self._buffer.put_batch(meta, step_batch=step)
            if len(metas) < self._buffer.graph.n_seqs:
                self._buffer.close_input("the run has all its samples")
                return
            step += 1
