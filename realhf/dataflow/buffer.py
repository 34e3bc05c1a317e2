"""Knows which sample is ready for which model function call: AsyncIOSequenceBuffer.

It holds metadata only and lives in one event loop. Every change of state is synchronous; only waiting is
asynchronous, so there are no locks on the state and a cancelled waiter leaves nothing half done. Vocabulary: a
*lease* is one call's claim on a batch; a step batch is the sample set of one step; *birth* is the order of admission.
A sample's way through it has three verbs: ``put_batch`` brings it in, ``get_batch_for_rpc`` leases it to a call, and
``amend_batch`` adds what the call made. Handling k samples costs O(k); where some become ready out of order, sorting
those of the call.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from realhf.api.sample import DuplicateKeyError, Lengths, SequenceSample

if TYPE_CHECKING:  # Model workers import this module and make no graph.
    from realhf.api.graph import DataFlowGraph

REMEMBERED = 1 << 18
"""Ids of samples that left are still known as duplicates, the last so many. What is sent again after an interruption is
at most a few steps old, and the journal refuses it before. This bound also covers a source that repeats itself, for as
many samples as a dataset usually has."""


class BatchTooLarge(ValueError):
    """A put can never fit."""


class DuplicateSampleError(ValueError):
    """A sample was put twice."""


class BufferClosed(RuntimeError):
    """A put after ``close_input``."""


class EndOfData(Exception):
    """The input is closed and this call has nothing left to do."""


@dataclass(eq=False, slots=True)
class Sample:
    """One resident sample. ``keys`` says in which batch a key came in, and in which row of it, so that lengths need no
    copy, and ``bits`` which keys there are; ``state`` says of a call whose inputs are all there how far it is with the
    sample, and ``left`` how many calls have not done it."""

    id: str
    birth: int
    step_batch: int
    put_at: float
    left: int
    bits: int = 0
    keys: dict[str, tuple[SequenceSample, int]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Literal["ready", "leased", "done"]] = field(default_factory=dict)


@dataclass(eq=False)
class BatchLease:
    """One call's claim on a batch, in the order of births, with the metadata that it had when it was leased."""

    mfc: str
    inputs: tuple[str, ...]
    samples: list[Sample] = field(repr=False)
    metadata: dict[str, list[Any]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.renew(self.samples)

    def renew(self, samples: list[Sample]) -> None:
        """Claim these samples from now on."""
        self.samples, self.metadata = samples, {}
        for name in samples[0].metadata:
            with suppress(KeyError):  # a field that not all of them have
                self.metadata[name] = [sample.metadata[name] for sample in samples]
        for cached in ("ids", "meta"):
            vars(self).pop(cached, None)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The ids of the samples."""
        return tuple(sample.id for sample in self.samples)

    @cached_property
    def meta(self) -> SequenceSample:
        """A metadata-only sample of the input keys. Raises ValueError when a key has more than one dtype or trailing
        shape among these samples."""
        lengths: dict[str, Lengths] = {}
        dtypes: dict[str, str] = {}
        trailing: dict[str, tuple[int, ...]] = {}
        for key in self.inputs:
            parts, rows = zip(*[sample.keys[key] for sample in self.samples], strict=True)
            batches = list(dict(zip(map(id, parts), parts, strict=True)).values())
            kinds = {(batch.dtypes[key], batch.trailing_shapes[key]) for batch in batches}
            if len(kinds) != 1:
                raise ValueError(f"key {key!r} has several dtypes or shapes in one batch: {sorted(kinds)}")
            ((dtypes[key], trailing[key]),) = kinds
            if len(batches) == 1:
                lengths[key] = batches[0].lengths(key).take(np.array(rows))
            else:
                nested = {id(batch): batch.lengths(key).nested() for batch in batches}
                lengths[key] = Lengths.of([nested[id(batch)][row] for batch, row in zip(parts, rows, strict=True)])
        return SequenceSample.from_lengths(self.ids, lengths, dtypes, trailing, None, self.metadata)


@dataclass(eq=False)
class CallState:
    """The buffer's state for one model function call. ``bits``: of its inputs. By step batch: ``queues``, the samples
    that it may take, by birth, and ``not_issued``, how many it has neither leased nor done, ready or not."""

    name: str
    n_seqs: int
    inputs: tuple[str, ...]
    bits: int
    queues: defaultdict[int, deque[Sample]] = field(default_factory=lambda: defaultdict(deque))
    not_issued: Counter[int] = field(default_factory=Counter)
    waiters: deque[tuple[int, asyncio.Future[BatchLease]]] = field(default_factory=deque)
    leased: int = 0


class AsyncIOSequenceBuffer:
    """``max_size`` bounds the resident samples. ``on_retire`` is called with every set of samples that leaves. The
    attributes are for reports; change state by the methods. What names no step batch is of step batch 0."""

    def __init__(
        self,
        graph: DataFlowGraph,
        *,
        max_size: int,
        on_retire: Callable[[Sequence[Sample]], None] = lambda samples: None,
    ) -> None:
        if max_size < graph.n_seqs:
            raise ValueError(f"max_size={max_size} cannot hold a step: needs {graph.n_seqs}")
        self.graph = graph
        self.max_size = max_size
        self._on_retire = on_retire
        self.samples: dict[str, Sample] = {}
        self._bits: dict[str, int] = {}
        inputs = {mfc.name: tuple(graph.inputs(mfc.name)) for mfc in graph.mfcs}
        self.calls = {
            mfc.name: CallState(mfc.name, mfc.n_seqs, inputs[mfc.name], self._bits_of(inputs[mfc.name]))
            for mfc in graph.mfcs
        }
        self.leases: set[BatchLease] = set()
        self.closed: str | None = None
        self.failure: BaseException | None = None
        self.put_total = 0
        self.evicted_total = 0
        self.released: Counter[str] = Counter()
        self._putting = asyncio.Lock()
        self._putters = 0
        self._left = asyncio.Event()
        self._gone: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.samples)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self.samples

    # ---- putting

    async def put_batch(self, meta: SequenceSample, *, step_batch: int = 0) -> None:
        """Admit a batch, all or nothing; waits for room, in order.

        Raises BatchTooLarge at once if it never fits, DuplicateSampleError, BufferClosed after ``close_input``,
        ValueError on data or missing keys. A put that is cancelled while it waits has put nothing.
        """
        self._check_put(meta)
        self._putters += 1
        try:
            async with self._putting:
                while len(self) + len(meta) > self.max_size and self.failure is None:
                    self._left.clear()
                    await self._left.wait()
                self._check_put(meta)
                self._insert(meta, step_batch)
        finally:
            self._putters -= 1

    def _check_put(self, meta: SequenceSample) -> None:
        if self.failure is not None:
            raise self.failure
        if self.closed is not None:
            raise BufferClosed(f"no more input: {self.closed}")
        if meta.data is not None:
            raise ValueError("the buffer holds metadata only; put sample.meta()")
        if len(meta) > self.max_size:
            raise BatchTooLarge(f"{len(meta)} samples never fit a buffer of {self.max_size}")
        missing = sorted(set(self.graph.required_dataset_keys()) - meta.keys)
        if missing:
            raise ValueError(f"samples lack dataset keys {missing}, so no call could ever take them")
        known = [i for i in meta.ids if i in self.samples or i in self._gone]
        if known:
            raise DuplicateSampleError(f"{len(known)} samples were put before: {known[:5]}")

    def _insert(self, meta: SequenceSample, step_batch: int) -> None:
        now, first = time.monotonic(), self.put_total
        samples = [
            Sample(sample_id, first + i, step_batch, now, len(self.calls)) for i, sample_id in enumerate(meta.ids)
        ]
        self.put_total += len(samples)
        self.samples.update((sample.id, sample) for sample in samples)
        for call in self.calls.values():
            call.not_issued[step_batch] += len(samples)
        self._add_keys(samples, meta, self.calls)

    def _add_keys(self, samples: Sequence[Sample], meta: SequenceSample, readers: Iterable[str]) -> None:
        """Note what ``meta`` says about the samples, and serve those calls that may run now."""
        keys, bits, columns = meta.keys, self._bits_of(meta.keys), meta.metadata.items()
        for row, sample in enumerate(samples):
            place = meta, row
            for key in keys:
                sample.keys[key] = place
            sample.bits |= bits
            for name, column in columns:
                sample.metadata[name] = column[row]
        for name in readers:
            call = self.calls[name]
            needs = call.bits
            self._make_ready(call, [s for s in samples if s.bits & needs == needs and name not in s.state])
            self._serve(call)

    def _bits_of(self, keys: Iterable[str]) -> int:
        """A number with one bit for each key."""
        return sum(self._bits.setdefault(key, 1 << len(self._bits)) for key in keys)

    @staticmethod
    def _make_ready(call: CallState, samples: Sequence[Sample]) -> None:
        """Let a call take samples of one step batch, which are in the order of births."""
        if not samples:
            return
        for sample in samples:
            sample.state[call.name] = "ready"
        queue = call.queues[samples[0].step_batch]
        in_order = not queue or queue[-1].birth < samples[0].birth
        queue.extend(samples)
        if not in_order:
            call.queues[samples[0].step_batch] = deque(sorted(queue, key=lambda sample: sample.birth))

    # ---- getting

    async def get_batch_for_rpc(self, mfc: str, step_batch: int = 0) -> BatchLease:
        """The ``n_seqs`` oldest samples of the step batch that ``mfc`` may run on, leased to the caller; waits for
        them. Concurrent getters of one call are served in order.

        Raises EndOfData when the input is closed and nothing is left, or the exception given to ``abort``.
        """
        if self.failure is not None:
            raise self.failure
        call = self.calls[mfc]
        future: asyncio.Future[BatchLease] = asyncio.get_running_loop().create_future()
        call.waiters.append((step_batch, future))
        self._serve(call)
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._serve(call)  # which forgets the waiter
            elif future.exception() is None:
                self.release(future.result(), "cancelled")
            raise

    @asynccontextmanager
    async def lease(self, mfc: str, step_batch: int = 0) -> AsyncIterator[BatchLease]:
        """A lease that goes back to ready when the block is left without ``amend_batch``."""
        lease = await self.get_batch_for_rpc(mfc, step_batch)
        try:
            yield lease
        finally:
            if lease in self.leases:
                self.release(lease, "not completed")

    def _serve(self, call: CallState) -> None:
        """Give batches to the waiters of one call, in order, while there are full ones. When no more input will come,
        serve what is smaller than a batch, or say that it is over."""
        waiting = [waiter for waiter in call.waiters if not waiter[1].done()]
        call.waiters.clear()
        for step_batch, future in waiting:
            ready, left = len(call.queues[step_batch]), call.not_issued[step_batch]
            if ready >= call.n_seqs or (self.closed is not None and 0 < left == ready):
                future.set_result(self._issue(call, step_batch, min(ready, call.n_seqs)))
            elif self.closed is not None and not left:
                future.set_exception(EndOfData(f"{call.name}: {self.closed}"))
            else:
                call.waiters.append((step_batch, future))

    def _issue(self, call: CallState, step_batch: int, count: int) -> BatchLease:
        queue = call.queues[step_batch]
        samples = [queue.popleft() for _ in range(count)]
        for sample in samples:
            sample.state[call.name] = "leased"
        call.not_issued[step_batch] -= count
        call.leased += count
        lease = BatchLease(call.name, call.inputs, samples)
        self.leases.add(lease)
        return lease

    def exchange(self, lease: BatchLease, gone: Sequence[str], meta: SequenceSample) -> list[Sample]:
        """Put the samples of ``meta`` behind the others of a lease, in the place of ``gone``, which leave the buffer
        and are returned. Raises DuplicateSampleError, and ValueError where another call may have begun with one of
        them, where the new ones lack an input of the call, or the numbers differ; then nothing has changed."""
        call, names = self._active(lease), set(gone)
        self._check_put(meta)
        left = [sample for sample in lease.samples if sample.id in names]
        if not len(left) == len(gone) == len(meta):
            raise ValueError(f"{len(meta)} samples cannot take the place of {len(left)} of {len(gone)}")
        if busy := [sample.id for sample in left if sample.state.keys() != {call.name}]:
            raise ValueError(f"other calls than {call.name} may run on {busy[:5]} already")
        if not meta.keys.issuperset(call.inputs):
            raise ValueError(f"samples that take the place of others lack inputs of {call.name}")
        step_batch = left[0].step_batch
        for sample in left:
            del self.samples[sample.id]
            self._gone[sample.id] = None
        self.evicted_total += len(left)
        for other in self.calls.values():
            other.not_issued[step_batch] -= len(left) * (other is not call)
        self._insert(meta, step_batch)
        fresh = [self.samples[sample_id] for sample_id in meta.ids]
        for sample in fresh:
            call.queues[step_batch].remove(sample)
            sample.state[call.name] = "leased"
        call.not_issued[step_batch] -= len(fresh)
        lease.renew([sample for sample in lease.samples if sample.id not in names] + fresh)
        return left

    # ---- answering

    def amend_batch(self, lease: BatchLease, outputs: SequenceSample | None = None) -> None:
        """Add to a batch what its call made, wake the calls that can run now, and mark its samples done, in one change.

        Samples that every call has completed leave the buffer. Raises DuplicateKeyError, or ValueError on outputs
        about other samples and on a lease that is not active; then nothing has changed.
        """
        call = self._active(lease)
        if outputs is not None:
            self._check_outputs(lease, outputs)
        self.leases.remove(lease)
        call.leased -= len(lease.samples)
        for sample in lease.samples:
            sample.state[call.name] = "done"
            sample.left -= 1
        if outputs is not None:
            readers = dict.fromkeys(name for key in sorted(outputs.keys) for name in self.graph.consumers(key))
            self._add_keys(lease.samples, outputs, readers)
        finished = [sample for sample in lease.samples if not sample.left]
        if finished:
            self._retire(finished)
            self._on_retire(finished)

    def _check_outputs(self, lease: BatchLease, outputs: SequenceSample) -> None:
        if outputs.data is not None:
            raise ValueError("the buffer holds metadata only; amend with sample.meta()")
        if outputs.ids != lease.ids:
            raise ValueError("the outputs are about other samples, or in another order")
        bits = self._bits_of(outputs.keys)
        if any(sample.bits & bits for sample in lease.samples):
            present = {key for sample in lease.samples for key in sample.keys.keys() & outputs.keys}
            raise DuplicateKeyError(f"samples already have keys {sorted(present)}")

    def release(self, lease: BatchLease, reason: str) -> None:
        """Give the batch back, births unchanged (the call failed or was cancelled)."""
        call = self._active(lease)
        self.leases.remove(lease)
        call.leased -= len(lease.samples)
        self.released[reason] += len(lease.samples)
        call.not_issued[lease.samples[0].step_batch] += len(lease.samples)
        self._make_ready(call, lease.samples)
        self._serve(call)

    def _active(self, lease: BatchLease) -> CallState:
        if lease not in self.leases:
            raise ValueError(f"the lease of {lease.mfc} is not active (completed or released)")
        return self.calls[lease.mfc]

    def _retire(self, samples: Sequence[Sample]) -> None:
        """Let samples of one step batch leave that every call has done."""
        for sample in samples:
            del self.samples[sample.id]
            self._gone[sample.id] = None
        while len(self._gone) > max(REMEMBERED, 4 * self.max_size):
            self._gone.popitem(last=False)
        step_batch = samples[0].step_batch
        for call in self.calls.values():
            if not call.not_issued[step_batch]:
                call.queues.pop(step_batch, None)
                del call.not_issued[step_batch]
        self.evicted_total += len(samples)
        self._left.set()

    # ---- ending

    def close_input(self, reason: str) -> None:
        """Nothing more will be put: getters drain what is there, then get EndOfData with this reason. A put
        that waits for space must be finished or cancelled first (ValueError)."""
        if self._putters:
            raise ValueError("close_input while a put waits for space")
        self.closed = reason
        for call in self.calls.values():
            self._serve(call)

    def abort(self, error: BaseException) -> None:
        """Every present and future waiter raises ``error``."""
        self.failure = error
        self._left.set()
        for call in self.calls.values():
            for _, future in call.waiters:
                if not future.done():
                    future.set_exception(error)
            call.waiters.clear()

    # ---- reports

    def stats(self) -> dict[str, Any]:
        """Resident samples, per call ready/leased/waiting, the oldest age in seconds, and totals."""
        now = time.monotonic()
        return {
            "resident": len(self),
            "max_size": self.max_size,
            "putters_waiting": self._putters,
            "oldest_age_s": max((now - sample.put_at for sample in self.samples.values()), default=0.0),
            "put": self.put_total,
            "evicted": self.evicted_total,
            "released": dict(self.released),
            "calls": {
                name: {"ready": sum(map(len, c.queues.values())), "leased": c.leased, "waiting": len(c.waiters)}
                for name, c in self.calls.items()
            },
        }

    def explain_wait(self, mfc: str, step_batch: int = 0) -> str:
        """Why ``mfc`` does not run: which keys are missing on how many samples, and who produces them."""
        call = self.calls[mfc]
        open_ = [s for s in self.samples.values() if s.step_batch == step_batch]
        open_ = [s for s in open_ if s.state.get(mfc) not in ("leased", "done")]
        ready = sum(mfc in sample.state for sample in open_)
        text = f"{mfc} takes {call.n_seqs} samples of step {step_batch}: {ready} ready, {len(open_)} not yet taken"
        for key in call.inputs:
            missing = sum(key not in sample.keys for sample in open_)
            if missing:
                text += f"; {missing} lack {key!r} (from {' or '.join(self.graph.producers(key))})"
        if len(open_) < call.n_seqs:
            text += f"; the source owes {call.n_seqs - len(open_)}"
        return text
