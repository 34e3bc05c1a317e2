"""The master's side of the sample stream: calls to the workers that receive finished samples, and
the loader of the step batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

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
    payload_rank,
)
from realhf.api.sample import SequenceSample
from realhf.base.messages import Call
from realhf.base.partition import balanced_parts_near_homes
from realhf.dataflow.buffer import AsyncIOSequenceBuffer
from realhf.dataflow.journal.ledger import RolloutLedger
from realhf.dataflow.rollouts.control import RolloutControl
from realhf.dataflow.rollouts.rollout_state import SampleLocations
from realhf.dataflow.step_source import StepLoader
from realhf.dataflow.storage_map import StorageMap
from realhf.dataflow.worker_group import A, Q, ask
from realhf.transport.rpc_master import RpcMaster


class Receivers:
    """The master's calls to the model workers that receive the stream of finished samples.

    ``workers`` are in the order of ranks. ``timeout_s`` limits each call.
    """

    def __init__(self, caller: RpcMaster, workers: Sequence[str], timeout_s: float) -> None:
        self._caller = caller
        self._workers = tuple(workers)
        self._timeout_s = timeout_s

    async def open(self, request: OpenStreamRequest) -> list[str]:
        """Open a receiver on every worker and return their endpoints.

        The credits of a producer (samples it may have in flight) are divided among the receivers,
        rounded up.
        """
        credits_per_worker = -(-request.credits // len(self._workers))
        requests = [
            replace(request, credits=credits_per_worker, rank=rank)
            for rank in range(len(self._workers))
        ]
        answers = await asyncio.gather(
            *(
                self._ask(worker, STREAM_OPEN, own)
                for worker, own in zip(self._workers, requests, strict=True)
            )
        )
        return [answer.endpoint for answer in answers]

    async def restore(
        self,
        items: Sequence[tuple[str, int, PayloadRef]],
        locations: SampleLocations,
        timeout_s: float,
    ) -> list[Arrival]:
        """Have the workers read logged samples back, each sample on one worker. Returns their
        arrivals in the order of ``items`` and records their locations.

        ``items`` are (id, attempt, location in the payload log).
        """
        parts = split_by_bytes([ref for _, _, ref in items], len(self._workers))
        answers = await asyncio.gather(
            *(
                self._ask(
                    worker,
                    STREAM_RESTORE,
                    RestoreStreamRequest([items[i] for i in part]),
                    timeout_s,
                )
                for worker, part in zip(self._workers, parts, strict=True)
            )
        )
        arrivals: dict[int, Arrival] = {}
        for worker, part, answer in zip(self._workers, parts, answers, strict=True):
            for i, arrival in zip(part, answer.arrivals, strict=True):
                arrivals[i] = arrival
                locations.record(arrival.id, worker)
        return [arrivals[i] for i in range(len(items))]

    async def prune(self, ledger: RolloutLedger) -> None:
        """Have the workers delete payloads that no recovery needs.

        The first worker also prunes the logs of ranks that the run had before but no longer has.
        """
        ranks = len(self._workers)
        kept: list[list[PayloadRef]] = [[] for _ in self._workers]
        for ref in ledger.state.refs():
            rank = payload_rank(ref)
            kept[rank if rank < ranks else 0].append(ref)
        await asyncio.gather(
            *(
                self._ask(
                    worker,
                    STREAM_PRUNE,
                    PruneStreamRequest(kept[rank], ledger.newest_payloads.get(rank), ranks),
                )
                for rank, worker in enumerate(self._workers)
            )
        )

    async def check(self) -> None:
        """Raise the error of a worker that can no longer receive samples."""
        await asyncio.gather(
            *(self._ask(worker, STREAM_CHECK, Nothing()) for worker in self._workers)
        )

    async def clear(self, ids_of: Mapping[str, Sequence[str]]) -> None:
        """Have workers free samples. ``ids_of`` maps each worker to sample ids."""
        await asyncio.gather(
            *(self._ask(worker, CLEAR, ClearRequest(list(ids))) for worker, ids in ids_of.items())
        )

    async def _ask(
        self, worker: str, call: Call[Q, A], request: Q, timeout_s: float | None = None
    ) -> A:
        return await ask(
            self._caller, worker, call, request, timeout_s=timeout_s or self._timeout_s
        )


def split_by_bytes(refs: Sequence[PayloadRef], ranks: int) -> list[list[int]]:
    """Assign logged payloads to ranks; return the indices into ``refs`` for each rank.

    A rank reads its own log up to its share of the bytes. Other ranks read the rest, and also the
    logs of ranks that no longer exist after a restart with fewer ranks.
    """
    homes = [payload_rank(ref) if payload_rank(ref) < ranks else None for ref in refs]
    return balanced_parts_near_homes([ref[2] for ref in refs], homes, ranks)


class StreamLoader(StepLoader):
    """Loader of the step batches of an asynchronous run.

    ``source`` releases the samples of a step, ``held_by(ids)`` groups sample ids by the worker that
    stores their tensors, ``keys`` are the keys that enter the buffer, and ``busy()`` returns
    whether samples or weights are in flight. The loader has no state for a checkpoint, because the
    journal holds it.

    ``run``
      produces: step batches in the buffer;
      waits for: the end of the previous step, then ``RolloutControl.step_batch``;
      unblocked by: ``step_finished``, and arrivals that complete a batch.
    """

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
        self._source = source
        self._buffer = buffer
        self._storage = storage
        self._held_by = held_by
        self._keys = tuple(keys)
        self._waiting_for_step: int | None = None
        self._busy = busy

    @property
    def busy(self) -> bool:
        """Whether samples are being played, or weights that they wait for are being loaded."""
        return self._busy()

    @property
    def activity(self) -> str:
        """A phrase that explains what the loader waits for."""
        if self._waiting_for_step is None:
            return "waits until a step is finished"
        return f"step {self._waiting_for_step}: {self._source.waiting_for(self._waiting_for_step)}"

    async def run(self, first_step: int) -> None:
        """Put one step batch after another into the buffer.

        A batch that is smaller than the others is the last one; the buffer releases it only once
        its input is closed.
        """
        step = first_step
        while True:
            await self._free.acquire()
            self._waiting_for_step = step
            metas = await self._source.step_batch(step)
            self._waiting_for_step = None
            if metas:
                meta = SequenceSample.gather(
                    [meta.select(self._keys) for meta in metas], allow_metadata_loss=True
                )
                for worker, ids in self._held_by(meta.ids).items():
                    self._storage.record(ids, meta.keys, worker)
                await self._buffer.put_batch(meta, step_batch=step)
            if len(metas) < self._buffer.graph.n_seqs:
                self._buffer.close_input("the run has all its samples")
                return
            step += 1
