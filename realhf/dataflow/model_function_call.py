"""Execution of one node of the graph: lease a batch, split it over the role's workers, and gather
their answers.

For a group call, which the workers compute together (``is_group_call``), the whole batch is sent to
each of them.

Only ids, lengths and statistics pass through the master; the workers fetch tensors from one
another.
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
from realhf.base.partition import balanced_parts, balanced_parts_near_homes
from realhf.dataflow.buffer import AsyncIOSequenceBuffer, BatchLease
from realhf.dataflow.storage_map import Fetch, StorageMap
from realhf.dataflow.worker_group import (
    GroupCallFailed,
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
    """Report of one model function call on one batch. Times are in seconds."""

    mfc: str
    """Name of the model function call."""
    ids: tuple[str, ...]
    """Ids of the samples in the batch."""
    stats: Mapping[str, Any]
    """Statistics from the interface, merged over the workers."""
    queue_s: float
    """Time that the call waited for its batch."""
    call_s: float
    """Time from sending the requests to the last answer."""
    compute_s: float
    """Longest computation among the workers."""
    fetch_s: float
    """Longest fetch of inputs among the workers."""
    n_tokens: int
    """Number of tokens in the batch."""


@dataclass(frozen=True)
class StepReport:
    """Report of one executed step."""

    step: int
    """Number of the step, from 0."""
    wall_s: float
    """Duration in seconds."""
    calls: tuple[CallReport, ...]
    """Reports of all calls."""
    results: tuple[SampleResult, ...]
    """Results of the samples trained in the step, in the order of drawing."""
    stats: Mapping[str, Mapping[str, Any]]
    """Statistics from the interface, by model function call."""
    times: Mapping[str, Mapping[str, float]]
    """Sums of ``queue_s``, ``call_s``, ``compute_s`` and ``fetch_s``, by model function call."""
    buffer: Mapping[str, Any]
    """Statistics of the buffer."""
    source: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the data source."""

    @property
    def n_samples(self) -> int:
        """Number of samples (groups) trained in the step."""
        return len(self.results)


def build_step_report(
    step: int,
    wall_s: float,
    calls: Sequence[CallReport],
    results: Sequence[SampleResult],
    buffer: Mapping[str, Any],
    source: Mapping[str, float],
) -> StepReport:
    """Return the report of a step, with statistics and times merged by model function call."""
    by_mfc: dict[str, list[CallReport]] = {}
    for call in calls:
        by_mfc.setdefault(call.mfc, []).append(call)
    stats = {
        mfc: merge_stats([c.stats for c in group], [len(c.ids) for c in group], parallel=False)
        for mfc, group in by_mfc.items()
    }
    times = {
        mfc: {
            name: sum(getattr(c, name) for c in group)
            for name in ("queue_s", "call_s", "compute_s", "fetch_s")
        }
        for mfc, group in by_mfc.items()
    }
    return StepReport(step, wall_s, tuple(calls), tuple(results), stats, times, buffer, source)


def merge_stats(
    parts: Sequence[Mapping[str, Any]], weights: Sequence[int], *, parallel: bool
) -> dict[str, Any]:
    """Merge the statistics of several shards (``parallel``) or of consecutive calls. ``weights``
    are the numbers of samples.

    The name of a statistic determines how it is merged:

    - ``..._seconds``, ``..._s``: durations; the maximum over shards, the sum over calls;
    - ``..._tokens``, ``...rollouts``, ``n_...``, ``failed/...``, ``retried/...``, ``skipped``:
      counts, summed;
    - ``..._bytes``: the maximum;
    - other numbers: means, weighted by samples or by the count that ``MEANS_OVER`` names;
    - lists are concatenated; of any other type the first value is kept.
    """
    if len(parts) == 1:
        return dict(parts[0])
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        weighted_values = [
            (part[name], part.get(MEANS_OVER, {}).get(name, weight))
            for part, weight in zip(parts, weights, strict=True)
            if name in part
        ]
        merged[name] = _merge(name, weighted_values, parallel)
    return merged


def _merge(name: str, weighted_values: Sequence[tuple[Any, int]], parallel: bool) -> Any:
    values = [value for value, _ in weighted_values]
    if name == MEANS_OVER:
        return {
            key: sum(value.get(key, 0) for value in values)
            for key in dict.fromkeys(k for v in values for k in v)
        }
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if not all(isinstance(value, (int, float)) for value in values):
        return values[0]
    if name.endswith("_bytes"):
        return max(values)
    if name.endswith(("_seconds", "_s")):
        return max(values) if parallel else sum(values)
    if (
        name.endswith(("_tokens", "rollouts"))
        or name.startswith(("n_", "failed/", "retried/"))
        or name == "skipped"
    ):
        return sum(values)
    total = sum(weight for _, weight in weighted_values)
    return sum(value * weight for value, weight in weighted_values) / total if total else 0.0


WAITS = "waits"
"""``ModelFunctionCall.activity`` while the call is not running on any worker."""


class MFCFailed(RuntimeError):
    """Error: a call failed. The message names the call, the step, the worker, the samples and the
    cause."""

    def __init__(
        self, mfc: str, step: int, worker: str, ids: Sequence[str], cause: BaseException
    ) -> None:
        shown = ", ".join(ids[:4]) + (", ..." if len(ids) > 4 else "")
        super().__init__(f"{mfc} failed at step {step} on {worker} (samples {shown}): {cause}")
        self.mfc = mfc
        self.step = step
        self.worker = worker
        self.ids = tuple(ids)
        self.cause = cause


class WrongReply(ValueError):
    """Error: a worker's answer has other samples or keys than requested."""


@dataclass(frozen=True)
class Shard:
    """Part of a batch that one worker computes."""

    worker: str
    """Name of the worker."""
    meta: SequenceSample
    """Metadata of the shard's samples, in the order of the request."""
    fetches: tuple[Fetch, ...]
    """Transfers by which the worker first fetches inputs from other workers."""
    cost: int
    """Number of tokens in the shard."""
    group: GroupPart | None = None
    """Rank of the worker in a group call; None outside one."""


@dataclass(frozen=True)
class _RoundResult:
    """The workers' merged answers for some samples."""

    n_samples: int
    """Number of samples."""
    outputs: SequenceSample | None
    """Metadata of the outputs, in the order of the samples; None if the call has no outputs."""
    stats: dict[str, Any]
    """Merged statistics."""
    compute_s: float
    """Longest computation among the workers, in seconds."""
    fetch_s: float
    """Longest fetch of inputs among the workers, in seconds."""
    cost: int
    """Number of tokens in the samples."""


def _metadata_row(sample: SequenceSample, row: int) -> dict[str, Any]:
    return {name: values[row] for name, values in sample.metadata.items()}


async def _no_more(step: int, n: int) -> SequenceSample | None:
    return None


def call_seed(run_seed: int, mfc: str, step: int, call: int, shard: int) -> int:
    """Return a 63-bit seed that depends only on the five arguments."""
    text = f"{run_seed}/{mfc}/{step}/{call}/{shard}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class ModelFunctionCall:
    """Runner of one ``MFCDef`` on ``workers``.

    Training and evaluation run on a single worker, or on the number of workers in ``parallel``
    (ValueError otherwise). ``numbers`` provides the numbers of the run's group calls. With
    ``mfc.resample``, ``load_more(step, n)`` returns further samples, and ``on_dropped(step,
    [(birth, result), ...])`` is called with the samples that they replace.
    """

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
        load_more: Callable[[int, int], Awaitable[SequenceSample | None]] = _no_more,
        on_dropped: Callable[
            [int, Sequence[tuple[int, SampleResult]]], None
        ] = lambda step, results: None,
    ) -> None:
        self._load_more = load_more
        self._on_dropped = on_dropped
        self._parallel = parallel or Parallel()
        self._numbers = numbers or itertools.count(1)
        if not workers:
            raise ValueError(f"{mfc.name}: model role {mfc.model_role!r} has no worker")
        if not mfc.interface_type.produces_keys and len(workers) != self._parallel.size:
            raise ValueError(
                f"{mfc.name}: {mfc.interface_type.value} runs on {self._parallel.size} worker(s), "
                f"role "
                f"{mfc.model_role!r} has {len(workers)}"
            )
        self.mfc = mfc
        self.inputs = graph.inputs(mfc.name)
        self.activity = WAITS
        self.last_step_started = -1
        """The last step for which a batch was leased, whether or not the call succeeded."""
        self._buffer = buffer
        self._storage = storage
        self._caller = caller
        self._workers = tuple(workers)
        self._seed = seed
        self._endpoints = {kind: list(urls) for kind, urls in endpoints.items()}

    async def run(self, step: int, call: int) -> CallReport:
        """Run the call on one batch.

        Raises EndOfData when the source is exhausted, and MFCFailed when a worker fails or sends a
        wrong answer; the batch is then ready again.
        """
        started_at = time.monotonic()
        try:
            async with self._buffer.lease(self.mfc.name, step) as lease:
                leased_at = time.monotonic()
                self.last_step_started = step
                self.activity = (
                    f"runs on {', '.join(self._workers)} since {time.strftime('%H:%M:%S')}"
                )
                return await self._run_lease(lease, step, call, leased_at - started_at)
        finally:
            self.activity = WAITS

    async def _run_lease(
        self, lease: BatchLease, step: int, call: int, queue_s: float
    ) -> CallReport:
        sent_at = time.monotonic()
        rounds = [await self._run_round(lease.ids, lease.meta, step, call)]
        outputs = rounds[0].outputs
        resample_stats = {}
        if self.mfc.resample and outputs is not None:
            outputs, resample_stats = await self._resample(lease, outputs, rounds, step, call)
        self._buffer.amend_batch(lease, outputs)
        stats = merge_stats(
            [one.stats for one in rounds], [one.n_samples for one in rounds], parallel=False
        )
        return CallReport(
            self.mfc.name,
            lease.ids,
            {**stats, **resample_stats},
            queue_s,
            time.monotonic() - sent_at,
            sum(one.compute_s for one in rounds),
            sum(one.fetch_s for one in rounds),
            sum(one.cost for one in rounds),
        )

    async def _resample(
        self,
        lease: BatchLease,
        outputs: SequenceSample,
        rounds: list[_RoundResult],
        step: int,
        call: int,
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Replace groups without learning signal with further samples, as in the dynamic sampling
        of DAPO (Yu et al. 2025).

        Runs further rounds until every group has a signal, ``mfc.resample`` times the batch has
        been dropped, or the source is exhausted. Appends the rounds' results to ``rounds``; returns
        the outputs in the order of the lease, and statistics.
        """
        started_at = time.monotonic()
        n_dropped = 0
        max_dropped = int(self.mfc.resample * len(lease.ids))
        while True:
            rows = {sample_id: _metadata_row(outputs, i) for i, sample_id in enumerate(outputs.ids)}
            flat = [
                sample_id
                for sample_id, row in rows.items()
                if not self.mfc.signal.has_signal(SampleResult.from_metadata("", row))
            ]
            n_wanted = min(len(flat), max_dropped - n_dropped)
            new_samples = await self._load_more(step, n_wanted) if n_wanted else None
            if new_samples is None:
                break
            dropped_ids = flat[: len(new_samples)]
            dropped = self._buffer.exchange(lease, dropped_ids, new_samples)
            self._on_dropped(
                step,
                [
                    (s.birth, SampleResult.from_metadata(s.id, {**s.metadata, **rows[s.id]}))
                    for s in dropped
                ],
            )
            n_dropped += len(dropped_ids)
            # The lease now has the kept samples first, then the new ones; so do the outputs below.
            kept = [
                i for i, sample_id in enumerate(outputs.ids) if sample_id not in set(dropped_ids)
            ]
            new_positions = list(range(len(kept), len(lease.ids)))
            rounds.append(
                await self._run_round(
                    new_samples.ids, lease.meta.select_ids(new_positions), step, call
                )
            )
            new_outputs = rounds[-1].outputs
            assert new_outputs is not None
            outputs = (
                SequenceSample.gather([outputs.select_ids(kept), new_outputs])
                if kept
                else new_outputs
            )
        stats = {
            "n_dropped_groups": float(n_dropped),
            "n_resample_rounds": float(len(rounds) - 1),
            "n_groups_without_signal": float(len(flat)),
            "resample_seconds": time.monotonic() - started_at,
        }
        return outputs, stats

    async def _run_round(
        self, ids: Sequence[str], meta: SequenceSample, step: int, call: int
    ) -> _RoundResult:
        """Run some samples on the workers and merge their answers. Raises MFCFailed."""
        together = is_group_call(self.mfc, self._parallel)
        try:
            parts = [list(range(len(meta)))] * len(self._workers) if together else self._split(meta)
            shards = self._build_shards(meta, parts, together)
        except (ValueError, KeyError) as error:
            raise MFCFailed(self.mfc.name, step, "master", ids, error) from error
        if self._parallel.fsdp > 1 and self.mfc.interface_type is InterfaceType.GENERATE:
            await self._gather_weights(step, ids)
        answers = await self._call_all(shards, step, call)
        longest = {
            name: max(getattr(answer, name) for answer in answers)
            for name in ("compute_s", "fetch_s")
        }
        if together:
            self._check_ranks(shards, answers, step)
            shards = shards[:1]
            answers = answers[:1]
            parts = parts[:1]
        outputs = [
            self._parse_outputs(shard, answer, step)
            for shard, answer in zip(shards, answers, strict=True)
        ]
        metas = [output for output in outputs if output is not None]
        for shard, output in zip(shards, metas, strict=False):
            self._storage.record(output.ids, output.keys, shard.worker)
        # Gathered outputs are in the order of the parts; this permutation restores the order of the
        # batch.
        order = inverse_perm([i for part in parts for i in part])
        return _RoundResult(
            len(ids),
            SequenceSample.gather(metas).reorder(order) if metas else None,
            merge_stats(
                [answer.stats for answer in answers], [len(s.meta) for s in shards], parallel=True
            ),
            longest["compute_s"],
            longest["fetch_s"],
            sum(shard.cost for shard in shards),
        )

    def _split(self, meta: SequenceSample) -> list[list[int]]:
        """Return the positions in the batch that each worker computes. If there are fewer samples
        than workers, there are fewer parts."""
        count = min(len(self._workers), len(meta))
        if count == 1:
            return [list(range(len(meta)))]
        if self.mfc.balance == "tokens" and self.mfc.interface_type is InterfaceType.INFERENCE:
            # Prefer the worker that already stores most of the inputs of a sample: these need not
            # be fetched.
            return balanced_parts_near_homes(
                meta.costs(), [self._find_home(sample_id, count) for sample_id in meta.ids], count
            )
        if self.mfc.balance == "tokens":
            return [part for part in balanced_parts(meta.costs(), count) if part]
        return [
            list(range(len(meta) * i // count, len(meta) * (i + 1) // count)) for i in range(count)
        ]

    def _find_home(self, sample_id: str, count: int) -> int | None:
        """Return the index of the worker, among the first ``count``, that stores the most inputs of
        a sample; None if none of them stores any."""
        owners_by_key = [self._storage.owners(sample_id, key) for key in self.inputs]
        n_stored = [
            sum(worker in owners for owners in owners_by_key) for worker in self._workers[:count]
        ]
        max_stored = max(n_stored)
        return n_stored.index(max_stored) if max_stored else None

    async def _gather_weights(self, step: int, ids: Sequence[str]) -> None:
        """Gather the full weights of a sharded model on every worker, so that each worker can
        generate for its samples."""
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
        except GroupCallFailed as error:
            raise MFCFailed(self.mfc.name, step, error.worker, ids, error.cause) from error

    def _check_ranks(
        self, shards: Sequence[Shard], answers: Sequence[CallAnswer], step: int
    ) -> None:
        try:
            check_agreement([answer.stats for answer in answers], self._workers)
        except RanksDiffer as error:
            raise MFCFailed(
                self.mfc.name, step, ", ".join(self._workers), shards[0].meta.ids, error
            ) from error

    def _build_shards(
        self, meta: SequenceSample, parts: Sequence[Sequence[int]], together: bool
    ) -> list[Shard]:
        """Return the shard of each worker, including the fetches of its inputs. Raises DataLost."""
        roster = self._caller.roster
        metas = [meta.select_ids(part) for part in parts]
        placement = {worker: m.ids for worker, m in zip(self._workers, metas, strict=False)}
        hosts = {name: info.host for name, info in roster.items()}
        plan = self._storage.plan(placement, self.inputs, hosts)
        groups: Sequence[GroupPart | None] = [None] * len(metas)
        if together:
            number = next(self._numbers)
            size = len(self._workers)
            groups = [GroupPart(number, rank, size) for rank in range(size)]
        return [
            Shard(
                worker,
                m,
                tuple(fetch for fetch in plan if fetch.dst == worker),
                sum(m.costs()),
                group,
            )
            for worker, m, group in zip(self._workers, metas, groups, strict=False)
        ]

    def _build_request(self, shard: Shard, index: int, step: int, call: int) -> CallRequest:
        roster = self._caller.roster
        return CallRequest(
            mfc=self.mfc.name,
            role=self.mfc.model_role,
            ids=list(shard.meta.ids),
            keys=list(self.inputs),
            metadata=shard.meta.metadata,
            fetches=[
                FetchPart(roster[f.src].data_endpoint, list(f.ids), list(f.keys))
                for f in shard.fetches
            ],
            step=step,
            seed=call_seed(self._seed, self.mfc.name, step, call, 0 if shard.group else index),
            endpoints=self._endpoints,
            group=shard.group,
        )

    async def _call_all(self, shards: Sequence[Shard], step: int, call: int) -> list[CallAnswer]:
        try:
            payloads = await ask_all(
                self._caller,
                [shard.worker for shard in shards],
                CALL,
                [
                    self._build_request(shard, index, step, call)
                    for index, shard in enumerate(shards)
                ],
                together=shards[0].group is not None,
                timeout_s=self.mfc.timeout_s,
                step=step,
                mfc=self.mfc.name,
            )
        except GroupCallFailed as failed:
            shard = next(shard for shard in shards if shard.worker == failed.worker)
            raise MFCFailed(
                self.mfc.name, step, shard.worker, shard.meta.ids, failed.cause
            ) from failed.cause
        return [
            self._parse_answer(shard, payload, step)
            for shard, payload in zip(shards, payloads, strict=True)
        ]

    def _parse_answer(self, shard: Shard, payload: Any, step: int) -> CallAnswer:
        try:
            return CALL.unpack_answer(payload, shard.worker)
        except MessageError as error:
            raise MFCFailed(self.mfc.name, step, shard.worker, shard.meta.ids, error) from error

    def _parse_outputs(self, shard: Shard, answer: CallAnswer, step: int) -> SequenceSample | None:
        """Return the metadata of the outputs in an answer; None for a call without outputs.

        Raises MFCFailed unless they are for the shard's samples, in their order, with exactly the
        declared keys.
        """
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


def check_keys(keys: frozenset[str], declared: Sequence[str]) -> None:
    """Raise WrongReply, naming missing and extra keys, unless ``keys`` are exactly the declared
    ones."""
    missing = sorted(set(declared) - keys)
    extra = sorted(keys - set(declared))
    if missing or extra:
        raise WrongReply(
            f"output keys differ from the declared ones: missing {missing}, extra {extra}"
        )
