"""Runs one node of the graph: takes a batch, splits it over the role's workers, gathers and reports the replies.

A call that the workers make together (``group_call``) goes to all of them with the whole batch.

Only ids, lengths and statistics pass through here; the workers fetch tensors from one another.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from realhf.api.calls import CALL, CallAnswer, CallRequest, FetchPart, GroupPart
from realhf.api.experiment import InterfaceType, MFCDef
from realhf.api.model import MEANS_OVER
from realhf.api.parallel import Parallel
from realhf.api.sample import SequenceSample, inverse_perm
from realhf.api.source import SampleResult
from realhf.base.messages import MessageError
from realhf.base.partition import balanced_parts, parts_near
from realhf.dataflow.buffer import AsyncIOSequenceBuffer, BatchLease
from realhf.dataflow.storage_map import Fetch, StorageMap
from realhf.dataflow.worker_group import (
    GroupFailed,
    RanksDiffer,
    ask_all,
    check_agreement,
    gather_weights,
    is_group_call,
)
from realhf.transport.codec import decode_sample
from realhf.transport.rpc_master import RpcMaster

if TYPE_CHECKING:  # Model workers import this module and make no graph.
    from realhf.api.graph import DataFlowGraph


@dataclass(frozen=True)
class CallReport:
    """One call of a model function call: times in seconds. ``queue_s``: waiting for its batch; ``call_s``: from
    sending to the last reply; ``compute_s`` and ``fetch_s``: the longest among its workers."""

    mfc: str
    ids: tuple[str, ...]
    stats: Mapping[str, Any]
    queue_s: float
    call_s: float
    compute_s: float
    fetch_s: float
    n_tokens: int


@dataclass(frozen=True)
class StepReport:
    """One executed step. ``stats[mfc]`` are the interface's statistics, ``times[mfc]`` the sums over its calls
    of ``queue_s``, ``call_s``, ``compute_s``, ``fetch_s``; ``results`` in the order of drawing."""

    step: int
    wall_s: float
    calls: tuple[CallReport, ...]
    results: tuple[SampleResult, ...]
    stats: Mapping[str, Mapping[str, Any]]
    times: Mapping[str, Mapping[str, float]]
    buffer: Mapping[str, Any]
    source: Mapping[str, float] = field(default_factory=dict)

    @property
    def n_samples(self) -> int:
        """Samples (groups) that the step trained."""
        return len(self.results)


def step_report(
    step: int,
    wall_s: float,
    calls: Sequence[CallReport],
    results: Sequence[SampleResult],
    buffer: Mapping[str, Any],
    source: Mapping[str, float],
) -> StepReport:
    """Group the calls by model function call."""
    by_mfc: dict[str, list[CallReport]] = {}
    for call in calls:
        by_mfc.setdefault(call.mfc, []).append(call)
    stats = {
        mfc: merge_stats([c.stats for c in group], [len(c.ids) for c in group], parallel=False)
        for mfc, group in by_mfc.items()
    }
    times = {
        mfc: {name: sum(getattr(c, name) for c in group) for name in ("queue_s", "call_s", "compute_s", "fetch_s")}
        for mfc, group in by_mfc.items()
    }
    return StepReport(step, wall_s, tuple(calls), tuple(results), stats, times, buffer, source)


def merge_stats(parts: Sequence[Mapping[str, Any]], weights: Sequence[int], *, parallel: bool) -> dict[str, Any]:
    """Statistics of several shards (``parallel``) or of several calls after one another.

    Names ending in ``_seconds`` or ``_s`` are durations: the longest of shards, the sum of calls. Names ending
    in ``_tokens`` or ``rollouts``, beginning with ``n_``, ``failed/`` or ``retried/``, and ``skipped`` are counts:
    summed. Other numbers are means, weighted by samples or by what ``MEANS_OVER`` says; lists are joined; of anything
    else the first is kept.
    """
    if len(parts) == 1:
        return dict(parts[0])
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        found = [
            (part[name], part.get(MEANS_OVER, {}).get(name, weight))
            for part, weight in zip(parts, weights, strict=True)
            if name in part
        ]
        merged[name] = _merge(name, found, parallel)
    return merged


def _merge(name: str, found: Sequence[tuple[Any, int]], parallel: bool) -> Any:
    values = [value for value, _ in found]
    if name == MEANS_OVER:
        return {key: sum(value.get(key, 0) for value in values) for key in dict.fromkeys(k for v in values for k in v)}
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if not all(isinstance(value, (int, float)) for value in values):
        return values[0]
    if name.endswith(("_seconds", "_s")):
        return max(values) if parallel else sum(values)
    if name.endswith(("_tokens", "rollouts")) or name.startswith(("n_", "failed/", "retried/")) or name == "skipped":
        return sum(values)
    total = sum(weight for _, weight in found)
    return sum(value * weight for value, weight in found) / total if total else 0.0


WAITS = "waits"


class MFCFailed(RuntimeError):
    """A call failed; the message names the call, the step, the worker, the samples and the cause."""

    def __init__(self, mfc: str, step: int, worker: str, ids: Sequence[str], cause: BaseException) -> None:
        shown = ", ".join(ids[:4]) + (", ..." if len(ids) > 4 else "")
        super().__init__(f"{mfc} failed at step {step} on {worker} (samples {shown}): {cause}")
        self.mfc, self.step, self.worker, self.ids, self.cause = mfc, step, worker, tuple(ids), cause


class WrongReply(ValueError):
    """A worker answered with other samples or keys than the call was about."""


@dataclass(frozen=True)
class Shard:
    """The part of a batch that one worker runs; ``group`` says which rank it is in a call that all make together."""

    worker: str
    meta: SequenceSample
    fetches: tuple[Fetch, ...]
    cost: int
    group: GroupPart | None = None


@dataclass(frozen=True)
class _Round:
    """What the workers answered about ``n_samples``: outputs in their order, statistics, and times in seconds."""

    n_samples: int
    outputs: SequenceSample | None
    stats: dict[str, Any]
    compute_s: float
    fetch_s: float
    cost: int


def _row(sample: SequenceSample, row: int) -> dict[str, Any]:
    return {name: values[row] for name, values in sample.metadata.items()}


async def _no_more(step: int, n: int) -> SequenceSample | None:
    return None


def call_seed(run_seed: int, mfc: str, step: int, call: int, shard: int) -> int:
    """A 63-bit seed that depends on all five and on nothing else."""
    text = f"{run_seed}/{mfc}/{step}/{call}/{shard}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class ModelFunctionCall:
    """Runs one ``MFCDef`` on ``workers``. Training and evaluation run on a single worker, or on as many as ``parallel``
    says (ValueError otherwise). ``numbers`` counts the group calls of a run. With ``mfc.resample``,
    ``more(step, n)`` gives further samples, and ``dropped(step, [(birth, result), ...])`` is told of those that gave
    way."""

    def __init__(
        self,
        mfc: MFCDef,
        graph: DataFlowGraph,
        buffer: AsyncIOSequenceBuffer,
        storage: StorageMap,
        caller: RpcMaster,
        workers: Sequence[str],
        *,
        seed: int,
        endpoints: Mapping[str, Sequence[str]],
        parallel: Parallel | None = None,
        numbers: Iterator[int] | None = None,
        more: Callable[[int, int], Awaitable[SequenceSample | None]] = _no_more,
        dropped: Callable[[int, Sequence[tuple[int, SampleResult]]], None] = lambda step, results: None,
    ) -> None:
        self._more, self._dropped = more, dropped
        self._parallel, self._numbers = parallel or Parallel(), numbers or itertools.count(1)
        if not workers:
            raise ValueError(f"{mfc.name}: model role {mfc.model_role!r} has no worker")
        if not mfc.interface_type.produces_keys and len(workers) != self._parallel.size:
            method, wanted = mfc.interface_type.value, self._parallel.size
            raise ValueError(
                f"{mfc.name}: {method} runs on {wanted} worker(s), role {mfc.model_role!r} has {len(workers)}"
            )
        self.mfc = mfc
        self.inputs = graph.inputs(mfc.name)
        self.activity = WAITS
        self.last_step_begun = -1
        """The last step of which a batch was taken, whatever became of it."""
        self._buffer, self._storage, self._caller = buffer, storage, caller
        self._workers = tuple(workers)
        self._seed = seed
        self._endpoints = {kind: list(urls) for kind, urls in endpoints.items()}

    async def run(self, step: int, call: int) -> CallReport:
        """Take one batch through the call. Raises EndOfData when the source is exhausted, MFCFailed when a
        worker fails or answers wrongly; the batch is ready again then."""
        began = time.monotonic()
        try:
            async with self._buffer.lease(self.mfc.name, step) as lease:
                queued = time.monotonic()
                self.last_step_begun = step
                self.activity = f"runs on {', '.join(self._workers)} since {time.strftime('%H:%M:%S')}"
                return await self._run_lease(lease, step, call, queued - began)
        finally:
            self.activity = WAITS

    async def _run_lease(self, lease: BatchLease, step: int, call: int, queue_s: float) -> CallReport:
        sent = time.monotonic()
        rounds = [await self._round(lease.ids, lease.meta, step, call)]
        outputs = rounds[0].outputs
        figures = {}
        if self.mfc.resample and outputs is not None:
            outputs, figures = await self._resample(lease, outputs, rounds, step, call)
        self._buffer.amend_batch(lease, outputs)
        stats = merge_stats([one.stats for one in rounds], [one.n_samples for one in rounds], parallel=False)
        return CallReport(
            self.mfc.name,
            lease.ids,
            {**stats, **figures},
            queue_s,
            time.monotonic() - sent,
            sum(one.compute_s for one in rounds),
            sum(one.fetch_s for one in rounds),
            sum(one.cost for one in rounds),
        )

    async def _resample(
        self, lease: BatchLease, outputs: SequenceSample, rounds: list[_Round], step: int, call: int
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Play others in the place of the groups that teach nothing, round after round, until none is left, the bound
        is reached or the source has no more: the dynamic sampling of DAPO (Yu et al. 2025). Returns the outputs in the
        order of the lease, and what it cost."""
        began, dropped = time.monotonic(), 0
        most = int(self.mfc.resample * len(lease.ids))
        while True:
            rows = {sample_id: _row(outputs, i) for i, sample_id in enumerate(outputs.ids)}
            flat = [sample_id for sample_id, row in rows.items() if not self.mfc.signal.of(SampleResult.of("", row))]
            fresh = await self._more(step, n) if (n := min(len(flat), most - dropped)) else None
            if fresh is None:
                break
            gone = flat[: len(fresh)]
            lost = self._buffer.exchange(lease, gone, fresh)
            self._dropped(step, [(s.birth, SampleResult.of(s.id, {**s.metadata, **rows[s.id]})) for s in lost])
            dropped += len(gone)
            stay = [i for i, sample_id in enumerate(outputs.ids) if sample_id not in set(gone)]
            places = list(range(len(stay), len(lease.ids)))
            rounds.append(await self._round(fresh.ids, lease.meta.select_ids(places), step, call))
            played = rounds[-1].outputs
            assert played is not None
            outputs = SequenceSample.gather([outputs.select_ids(stay), played]) if stay else played
        figures = {
            "n_dropped_groups": float(dropped),
            "n_resample_rounds": float(len(rounds) - 1),
            "n_groups_without_signal": float(len(flat)),
            "resample_seconds": time.monotonic() - began,
        }
        return outputs, figures

    async def _round(self, ids: Sequence[str], meta: SequenceSample, step: int, call: int) -> _Round:
        """Run samples on the workers."""
        together = is_group_call(self.mfc, self._parallel)
        try:
            parts = [list(range(len(meta)))] * len(self._workers) if together else self._split(meta)
            shards = self._shards(meta, parts, together)
        except (ValueError, KeyError) as error:
            raise MFCFailed(self.mfc.name, step, "master", ids, error) from error
        if self._parallel.fsdp > 1 and self.mfc.interface_type is InterfaceType.GENERATE:
            await self._gather_weights(step, ids)
        answers = await self._call_all(shards, step, call)
        longest = {name: max(getattr(answer, name) for answer in answers) for name in ("compute_s", "fetch_s")}
        if together:
            self._check_ranks(shards, answers, step)
            shards, answers, parts = shards[:1], answers[:1], parts[:1]
        outputs = [self._checked(shard, answer, step) for shard, answer in zip(shards, answers, strict=True)]
        metas = [output for output in outputs if output is not None]
        for shard, output in zip(shards, metas, strict=False):
            self._storage.record(output.ids, output.keys, shard.worker)
        order = inverse_perm([i for part in parts for i in part])
        return _Round(
            len(ids),
            SequenceSample.gather(metas).reorder(order) if metas else None,
            merge_stats([answer.stats for answer in answers], [len(s.meta) for s in shards], parallel=True),
            longest["compute_s"],
            longest["fetch_s"],
            sum(shard.cost for shard in shards),
        )

    def _split(self, meta: SequenceSample) -> list[list[int]]:
        """Positions of the batch for each worker; fewer parts than workers when there are fewer samples."""
        count = min(len(self._workers), len(meta))
        if count == 1:
            return [list(range(len(meta)))]
        if self.mfc.balance == "tokens" and self.mfc.interface_type is InterfaceType.INFERENCE:
            return parts_near(meta.costs(), [self._home(sample_id, count) for sample_id in meta.ids], count)
        if self.mfc.balance == "tokens":
            return [part for part in balanced_parts(meta.costs(), count) if part]
        return [list(range(len(meta) * i // count, len(meta) * (i + 1) // count)) for i in range(count)]

    def _home(self, sample_id: str, count: int) -> int | None:
        """The number of the worker, among the first ``count``, that holds the most inputs of a sample; None where none
        holds any."""
        owners = [self._storage.owners(sample_id, key) for key in self.inputs]
        held = [sum(worker in those for those in owners) for worker in self._workers[:count]]
        most = max(held)
        return held.index(most) if most else None

    async def _gather_weights(self, step: int, ids: Sequence[str]) -> None:
        """Bring the whole weights together on every worker, each of which then plays its own samples."""
        try:
            await gather_weights(
                self._caller,
                self._numbers,
                self.mfc.model_role,
                self._workers,
                everywhere=True,
                timeout_s=self.mfc.timeout_s,
                step=step,
            )
        except GroupFailed as error:
            raise MFCFailed(self.mfc.name, step, error.worker, ids, error.cause) from error

    def _check_ranks(self, shards: Sequence[Shard], answers: Sequence[CallAnswer], step: int) -> None:
        try:
            check_agreement([answer.stats for answer in answers], self._workers)
        except RanksDiffer as error:
            raise MFCFailed(self.mfc.name, step, ", ".join(self._workers), shards[0].meta.ids, error) from error

    def _shards(self, meta: SequenceSample, parts: Sequence[Sequence[int]], together: bool) -> list[Shard]:
        roster = self._caller.roster
        metas = [meta.select_ids(part) for part in parts]
        placement = {worker: m.ids for worker, m in zip(self._workers, metas, strict=False)}
        hosts = {name: info.host for name, info in roster.items()}
        plan = self._storage.plan(placement, self.inputs, hosts)
        groups: Sequence[GroupPart | None] = [None] * len(metas)
        if together:
            number, size = next(self._numbers), len(self._workers)
            groups = [GroupPart(number, rank, size) for rank in range(size)]
        return [
            Shard(worker, m, tuple(fetch for fetch in plan if fetch.dst == worker), sum(m.costs()), group)
            for worker, m, group in zip(self._workers, metas, groups, strict=False)
        ]

    def _request(self, shard: Shard, index: int, step: int, call: int) -> CallRequest:
        roster = self._caller.roster
        return CallRequest(
            mfc=self.mfc.name,
            role=self.mfc.model_role,
            ids=list(shard.meta.ids),
            keys=list(self.inputs),
            metadata=shard.meta.metadata,
            fetches=[FetchPart(roster[f.src].data_endpoint, list(f.ids), list(f.keys)) for f in shard.fetches],
            step=step,
            seed=call_seed(self._seed, self.mfc.name, step, call, 0 if shard.group else index),
            endpoints=self._endpoints,
            group=shard.group,
        )

    async def _call_all(self, shards: Sequence[Shard], step: int, call: int) -> list[CallAnswer]:
        try:
            found = await ask_all(
                self._caller,
                [shard.worker for shard in shards],
                CALL,
                [self._request(shard, index, step, call) for index, shard in enumerate(shards)],
                together=shards[0].group is not None,
                timeout_s=self.mfc.timeout_s,
                step=step,
                mfc=self.mfc.name,
            )
        except GroupFailed as failed:
            shard = next(shard for shard in shards if shard.worker == failed.worker)
            raise MFCFailed(self.mfc.name, step, shard.worker, shard.meta.ids, failed.cause) from failed.cause
        return [self._read(shard, payload, step) for shard, payload in zip(shards, found, strict=True)]

    def _read(self, shard: Shard, payload: Any, step: int) -> CallAnswer:
        try:
            return CALL.unpack_answer(payload, shard.worker)
        except MessageError as error:
            raise MFCFailed(self.mfc.name, step, shard.worker, shard.meta.ids, error) from error

    def _checked(self, shard: Shard, answer: CallAnswer, step: int) -> SequenceSample | None:
        """The answer's metadata, exactly about the shard's samples and the declared keys."""
        meta = None if answer.meta is None else decode_sample(answer.meta)
        try:
            if meta is None:
                if self.mfc.output_keys:
                    raise WrongReply(f"no outputs, expected keys {sorted(self.mfc.output_keys)}")
                return None
            if meta.data is not None:
                raise WrongReply("tensors were sent to the master")
            if meta.ids != shard.meta.ids:
                raise WrongReply("the reply is about other samples, or in another order")
            check_keys(meta.keys, self.mfc.output_keys)
        except WrongReply as error:
            raise MFCFailed(self.mfc.name, step, shard.worker, shard.meta.ids, error) from error
        return meta


def check_keys(found: frozenset[str], declared: Sequence[str]) -> None:
    """Raises WrongReply unless both are the same set, naming what is missing and what is extra."""
    missing, extra = sorted(set(declared) - found), sorted(found - set(declared))
    if missing or extra:
        raise WrongReply(f"output keys differ from the declared ones: missing {missing}, extra {extra}")
