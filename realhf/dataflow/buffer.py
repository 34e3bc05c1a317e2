"""AsyncIOSequenceBuffer, which tracks which samples are ready for which model function call.

The buffer holds metadata only and runs in one event loop. Every change of state is synchronous;
only waiting is asynchronous, so there are no locks on the state and a cancelled waiter leaves
nothing half done.

Vocabulary: a *lease* is one call's claim on a batch; a *step batch* is the set of samples of one
step; a sample's *birth* is its number in the order of admission. Samples pass through in three
operations: ``put_batch`` admits them, ``get_batch_for_rpc`` leases them to a call, and
``amend_batch`` adds the outputs of the call. Handling k samples costs O(k), plus sorting the queue
of a call if samples become ready out of order.

``put_batch``
  produces: resident samples;
  waits for: free capacity, in the order of the puts;
  unblocked by: samples that every call has completed, or ``abort``.
``get_batch_for_rpc``
  produces: a lease;
  waits for: enough samples with all input keys of the call;
  unblocked by: ``put_batch``, ``amend_batch`` and ``release``; ``close_input`` (returns the
      remaining samples, or raises EndOfData) and ``abort``.
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
"""Number of most recently departed samples whose ids are remembered, to refuse duplicates.

A sample that is sent again after an interruption is at most a few steps old, and the journal
refuses it before. This number also covers a source that repeats itself, up to the usual size of a
dataset.
"""


class BatchTooLarge(ValueError):
    """Error: a batch is larger than the buffer."""


class DuplicateSampleError(ValueError):
    """Error: a sample was put twice."""


class BufferClosed(RuntimeError):
    """Error: a batch was put after ``close_input``."""


class EndOfData(Exception):
    """Error: the input is closed and no samples are left for this call."""


@dataclass(eq=False, slots=True)
class BufferedSample:
    """One sample in the buffer."""

    id: str
    """Id of the sample."""
    birth: int
    """Number of the sample in the order of admission, from 0."""
    step_batch: int
    """Step that the sample belongs to."""
    put_at: float
    """Time of its admission on ``time.monotonic``."""
    calls_left: int
    """Number of calls that have not completed the sample yet."""
    bits: int = 0
    """Set of the keys that the sample has, as a bit mask."""
    keys: dict[str, tuple[SequenceSample, int]] = field(default_factory=dict)
    """For each key, the batch in which its value arrived and the sample's row there, so that
    lengths need no copy."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata fields of the sample."""
    state: dict[str, Literal["ready", "leased", "done"]] = field(default_factory=dict)
    """State of the sample for each call whose input keys are all present."""


@dataclass(eq=False)
class BatchLease:
    """One call's claim on a batch. Samples are in the order of admission, with the metadata they
    had when the lease was made."""

    mfc: str
    """Name of the call."""
    inputs: tuple[str, ...]
    """Input keys of the call."""
    samples: list[BufferedSample] = field(repr=False)
    """The leased samples."""
    metadata: dict[str, list[Any]] = field(init=False, repr=False)
    """Metadata columns that all the samples have."""

    def __post_init__(self) -> None:
        self.replace_samples(self.samples)

    def replace_samples(self, samples: list[BufferedSample]) -> None:
        """Replace the leased samples and refresh the metadata."""
        self.samples = samples
        self.metadata = {}
        for name in samples[0].metadata:
            with suppress(KeyError):  # a field that some of the samples lack
                self.metadata[name] = [sample.metadata[name] for sample in samples]
        for cached in ("ids", "meta"):
            vars(self).pop(cached, None)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """Ids of the samples."""
        return tuple(sample.id for sample in self.samples)

    @cached_property
    def meta(self) -> SequenceSample:
        """Metadata-only sample batch of the leased samples with the call's input keys.

        Raises ValueError when a key has several dtypes or trailing shapes among these samples.
        """
        lengths: dict[str, Lengths] = {}
        dtypes: dict[str, str] = {}
        trailing: dict[str, tuple[int, ...]] = {}
        for key in self.inputs:
            parts, rows = zip(*[sample.keys[key] for sample in self.samples], strict=True)
            batches = list(dict(zip(map(id, parts), parts, strict=True)).values())
            kinds = {(batch.dtypes[key], batch.trailing_shapes[key]) for batch in batches}
            if len(kinds) != 1:
                raise ValueError(
                    f"key {key!r} has several dtypes or shapes in one batch: {sorted(kinds)}"
                )
            ((dtypes[key], trailing[key]),) = kinds
            if len(batches) == 1:  # the common case, without a Python loop over the samples
                lengths[key] = batches[0].lengths(key).take(np.array(rows))
            else:
                nested = {id(batch): batch.lengths(key).nested() for batch in batches}
                lengths[key] = Lengths.of(
                    [nested[id(batch)][row] for batch, row in zip(parts, rows, strict=True)]
                )
        return SequenceSample.from_lengths(self.ids, lengths, dtypes, trailing, None, self.metadata)


@dataclass(eq=False)
class CallState:
    """Buffer state of one model function call."""

    name: str
    """Name of the call."""
    n_seqs: int
    """Number of samples in a batch of the call."""
    inputs: tuple[str, ...]
    """Input keys of the call."""
    bits: int
    """Set of the input keys, as a bit mask like ``BufferedSample.bits``."""
    queues: defaultdict[int, deque[BufferedSample]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    """Samples that are ready for the call, in the order of admission, by step batch."""
    not_issued: Counter[int] = field(default_factory=Counter)
    """Number of samples per step batch that the call has neither leased nor completed, whether
    ready or not."""
    waiters: deque[tuple[int, asyncio.Future[BatchLease]]] = field(default_factory=deque)
    """Futures of the callers that wait for a lease, with the step batch that each wants."""
    leased: int = 0
    """Number of leased samples."""


class AsyncIOSequenceBuffer:
    """Buffer of sample metadata between the calls of the graph.

    ``max_size`` limits the number of samples in the buffer. ``on_retire`` is called with each set
    of samples that every call has completed. The attributes are for reports; change the state only
    through the methods. The default step batch is 0.
    """

    def __init__(
        self,
        graph: DataFlowGraph,
        *,
        max_size: int,
        on_retire: Callable[[Sequence[BufferedSample]], None] = lambda samples: None,
    ) -> None:
        if max_size < graph.n_seqs:
            raise ValueError(f"max_size={max_size} cannot hold a step: needs {graph.n_seqs}")
        self.graph = graph
        self.max_size = max_size
        self._on_retire = on_retire
        self.samples: dict[str, BufferedSample] = {}
        self._bits: dict[str, int] = {}
        """Bit of each key in the bit masks, assigned when the key is first seen."""
        inputs = {mfc.name: tuple(graph.inputs(mfc.name)) for mfc in graph.mfcs}
        self.calls = {
            mfc.name: CallState(
                mfc.name, mfc.n_seqs, inputs[mfc.name], self._key_bits(inputs[mfc.name])
            )
            for mfc in graph.mfcs
        }
        self.leases: set[BatchLease] = set()
        self.closed: str | None = None
        self.failure: BaseException | None = None
        self.put_total = 0
        self.evicted_total = 0
        self.released: Counter[str] = Counter()
        """Number of samples in released leases, by reason."""
        self._put_lock = asyncio.Lock()
        """Makes puts wait in order."""
        self._putters = 0
        self._space_freed = asyncio.Event()
        self._departed: OrderedDict[str, None] = OrderedDict()
        """Ids of the samples that left last, oldest first."""

    def __len__(self) -> int:
        return len(self.samples)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self.samples

    # ---- putting

    async def put_batch(self, meta: SequenceSample, *, step_batch: int = 0) -> None:
        """Admit all samples of a batch together; waits for capacity, in the order of the puts.

        Raises BatchTooLarge at once for a batch that can never fit, DuplicateSampleError,
        BufferClosed after ``close_input``, and ValueError if the batch contains data or lacks keys.
        A put that is cancelled while it waits changes nothing.
        """
        self._check_put(meta)
        self._putters += 1
        try:
            async with self._put_lock:
                while len(self) + len(meta) > self.max_size and self.failure is None:
                    self._space_freed.clear()
                    await self._space_freed.wait()
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
            raise ValueError(f"samples lack dataset keys {missing}, so no call can ever use them")
        known = [i for i in meta.ids if i in self.samples or i in self._departed]
        if known:
            raise DuplicateSampleError(f"{len(known)} samples were put before: {known[:5]}")

    def _insert(self, meta: SequenceSample, step_batch: int) -> None:
        now = time.monotonic()
        first = self.put_total
        samples = [
            BufferedSample(sample_id, first + i, step_batch, now, len(self.calls))
            for i, sample_id in enumerate(meta.ids)
        ]
        self.put_total += len(samples)
        self.samples.update((sample.id, sample) for sample in samples)
        for call in self.calls.values():
            call.not_issued[step_batch] += len(samples)
        self._add_keys(samples, meta, self.calls)

    def _add_keys(
        self, samples: Sequence[BufferedSample], meta: SequenceSample, readers: Iterable[str]
    ) -> None:
        """Add the keys and metadata of ``meta`` to the samples, row by row. For the calls
        ``readers``, queue the samples that have become ready and serve waiting callers."""
        keys = meta.keys
        bits = self._key_bits(keys)
        columns = meta.metadata.items()
        for row, sample in enumerate(samples):
            origin = meta, row
            for key in keys:
                sample.keys[key] = origin
            sample.bits |= bits
            for name, column in columns:
                sample.metadata[name] = column[row]
        for name in readers:
            call = self.calls[name]
            needs = call.bits
            self._make_ready(
                call, [s for s in samples if s.bits & needs == needs and name not in s.state]
            )
            self._serve(call)

    def _key_bits(self, keys: Iterable[str]) -> int:
        """Return the bit mask of a set of keys."""
        return sum(self._bits.setdefault(key, 1 << len(self._bits)) for key in keys)

    @staticmethod
    def _make_ready(call: CallState, samples: Sequence[BufferedSample]) -> None:
        """Queue samples of one step batch for a call, keeping the order of admission. Sorts the
        queue only if needed."""
        if not samples:
            return
        for sample in samples:
            sample.state[call.name] = "ready"
        queue = call.queues[samples[0].step_batch]
        in_order = not queue or queue[-1].birth < samples[0].birth
        queue.extend(samples)
        if not in_order:
            call.queues[samples[0].step_batch] = deque(
                sorted(queue, key=lambda sample: sample.birth)
            )

    # ---- getting

    async def get_batch_for_rpc(self, mfc: str, step_batch: int = 0) -> BatchLease:
        """Wait for ``n_seqs`` samples of the step batch that are ready for ``mfc``, and lease them.

        The oldest ready samples are taken, and callers for one call are served in order. Raises
        EndOfData when the input is closed and no samples are left, or the exception passed to
        ``abort``.
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
                self._serve(call)  # removes the cancelled waiter
            elif future.exception() is None:
                self.release(future.result(), "cancelled")
            raise

    @asynccontextmanager
    async def lease(self, mfc: str, step_batch: int = 0) -> AsyncIterator[BatchLease]:
        """Async context manager that leases a batch. The batch is released if the block does not
        call ``amend_batch``."""
        lease = await self.get_batch_for_rpc(mfc, step_batch)
        try:
            yield lease
        finally:
            if lease in self.leases:
                self.release(lease, "not completed")

    def _serve(self, call: CallState) -> None:
        """Lease full batches to the callers that wait for one call, in order.

        Once the input is closed, also lease a last smaller batch when all its samples are ready,
        and raise EndOfData in the waiters of a step batch without samples.
        """
        waiting = [waiter for waiter in call.waiters if not waiter[1].done()]
        call.waiters.clear()
        for step_batch, future in waiting:
            n_ready = len(call.queues[step_batch])
            n_left = call.not_issued[step_batch]
            if n_ready >= call.n_seqs or (self.closed is not None and 0 < n_left == n_ready):
                future.set_result(self._issue(call, step_batch, min(n_ready, call.n_seqs)))
            elif self.closed is not None and not n_left:
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

    def exchange(
        self, lease: BatchLease, replaced: Sequence[str], meta: SequenceSample
    ) -> list[BufferedSample]:
        """Replace samples of a lease. The samples named ``replaced`` leave the buffer and are
        returned; those of ``meta`` are admitted and leased after the remaining ones.

        Raises DuplicateSampleError, and ValueError if another call may have started on a replaced
        sample, the new samples lack an input of the call, or the numbers differ; then nothing has
        changed.
        """
        call = self._find_call(lease)
        replaced_ids = set(replaced)
        self._check_put(meta)
        leaving = [sample for sample in lease.samples if sample.id in replaced_ids]
        if not len(leaving) == len(replaced) == len(meta):
            raise ValueError(
                f"{len(meta)} samples cannot take the place of {len(leaving)} of {len(replaced)}"
            )
        if busy := [sample.id for sample in leaving if sample.state.keys() != {call.name}]:
            raise ValueError(f"other calls than {call.name} may run on {busy[:5]} already")
        if not meta.keys.issuperset(call.inputs):
            raise ValueError(f"samples that take the place of others lack inputs of {call.name}")
        step_batch = leaving[0].step_batch
        for sample in leaving:
            del self.samples[sample.id]
            self._departed[sample.id] = None
        self.evicted_total += len(leaving)
        for other in self.calls.values():  # for ``call`` itself they count as issued already
            other.not_issued[step_batch] -= len(leaving) * (other is not call)
        self._insert(meta, step_batch)
        new_samples = [self.samples[sample_id] for sample_id in meta.ids]
        for sample in new_samples:
            call.queues[step_batch].remove(sample)
            sample.state[call.name] = "leased"
        call.not_issued[step_batch] -= len(new_samples)
        lease.replace_samples(
            [sample for sample in lease.samples if sample.id not in replaced_ids] + new_samples
        )
        return leaving

    # ---- answering

    def amend_batch(self, lease: BatchLease, outputs: SequenceSample | None = None) -> None:
        """Complete a lease: add the outputs of its call to the samples, which makes them ready for
        the calls that can now run.

        Samples that every call has completed leave the buffer. Raises DuplicateKeyError, or
        ValueError if the outputs belong to other samples or the lease is not active; then nothing
        has changed.
        """
        call = self._find_call(lease)
        if outputs is not None:
            self._check_outputs(lease, outputs)
        self.leases.remove(lease)
        call.leased -= len(lease.samples)
        for sample in lease.samples:
            sample.state[call.name] = "done"
            sample.calls_left -= 1
        if outputs is not None:
            readers = dict.fromkeys(
                name for key in sorted(outputs.keys) for name in self.graph.consumers(key)
            )
            self._add_keys(lease.samples, outputs, readers)
        finished = [sample for sample in lease.samples if not sample.calls_left]
        if finished:
            self._retire(finished)
            self._on_retire(finished)

    def _check_outputs(self, lease: BatchLease, outputs: SequenceSample) -> None:
        if outputs.data is not None:
            raise ValueError("the buffer holds metadata only; amend with sample.meta()")
        if outputs.ids != lease.ids:
            raise ValueError("the outputs are about other samples, or in another order")
        bits = self._key_bits(outputs.keys)
        if any(sample.bits & bits for sample in lease.samples):
            present = {key for sample in lease.samples for key in sample.keys.keys() & outputs.keys}
            raise DuplicateKeyError(f"samples already have keys {sorted(present)}")

    def release(self, lease: BatchLease, reason: str) -> None:
        """Make the samples of a lease ready again, at their previous place in the queue, after the
        call failed or was cancelled."""
        call = self._find_call(lease)
        self.leases.remove(lease)
        call.leased -= len(lease.samples)
        self.released[reason] += len(lease.samples)
        call.not_issued[lease.samples[0].step_batch] += len(lease.samples)
        self._make_ready(call, lease.samples)
        self._serve(call)

    def _find_call(self, lease: BatchLease) -> CallState:
        """Return the state of a lease's call. Raises ValueError if the lease is not active."""
        if lease not in self.leases:
            raise ValueError(f"the lease of {lease.mfc} is not active (completed or released)")
        return self.calls[lease.mfc]

    def _retire(self, samples: Sequence[BufferedSample]) -> None:
        """Remove samples of one step batch that every call has completed."""
        for sample in samples:
            del self.samples[sample.id]
            self._departed[sample.id] = None
        while len(self._departed) > max(REMEMBERED, 4 * self.max_size):
            self._departed.popitem(last=False)
        step_batch = samples[0].step_batch
        for call in self.calls.values():
            if not call.not_issued[step_batch]:
                call.queues.pop(step_batch, None)
                del call.not_issued[step_batch]
        self.evicted_total += len(samples)
        self._space_freed.set()

    # ---- ending

    def close_input(self, reason: str) -> None:
        """Declare that no more samples will be put. Callers get the remaining samples, then
        EndOfData with this reason.

        Raises ValueError while a put waits for capacity.
        """
        if self._putters:
            raise ValueError("close_input while a put waits for space")
        self.closed = reason
        for call in self.calls.values():
            self._serve(call)

    def abort(self, error: BaseException) -> None:
        """Make every present and future waiter raise ``error``."""
        self.failure = error
        self._space_freed.set()
        for call in self.calls.values():
            for _, future in call.waiters:
                if not future.done():
                    future.set_exception(error)
            call.waiters.clear()

    # ---- reports

    def stats(self) -> dict[str, Any]:
        """Return the number of samples in the buffer; for each call, the numbers of ready, leased
        and waiting ones; the age of the oldest sample in seconds; and totals."""
        now = time.monotonic()
        return {
            "resident": len(self),
            "max_size": self.max_size,
            "putters_waiting": self._putters,
            "oldest_age_s": max(
                (now - sample.put_at for sample in self.samples.values()), default=0.0
            ),
            "put": self.put_total,
            "evicted": self.evicted_total,
            "released": dict(self.released),
            "calls": {
                name: {
                    "ready": sum(map(len, c.queues.values())),
                    "leased": c.leased,
                    "waiting": len(c.waiters),
                }
                for name, c in self.calls.items()
            },
        }

    def explain_wait(self, mfc: str, step_batch: int = 0) -> str:
        """Return why ``mfc`` does not run: the keys that samples lack, and the calls that produce
        these keys."""
        call = self.calls[mfc]
        of_step = [s for s in self.samples.values() if s.step_batch == step_batch]
        not_taken = [s for s in of_step if s.state.get(mfc) not in ("leased", "done")]
        n_ready = sum(mfc in sample.state for sample in not_taken)
        text = (
            f"{mfc} takes {call.n_seqs} samples of step {step_batch}: {n_ready} ready, "
            f"{len(not_taken)} not yet taken"
        )
        for key in call.inputs:
            n_missing = sum(key not in sample.keys for sample in not_taken)
            if n_missing:
                text += (
                    f"; {n_missing} lack {key!r} (from {' or '.join(self.graph.producers(key))})"
                )
        if len(not_taken) < call.n_seqs:
            text += f"; the source owes {call.n_seqs - len(not_taken)}"
        return text
