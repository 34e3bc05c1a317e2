"""Admission of samples, their acceptance and release to training steps, and the service for the
rollout workers.

Runs in the master's event loop. Every change of state is synchronous and is journaled at the same
moment; only waiting for capacity, for samples and for the disk is asynchronous.

``RolloutControl.allocate``, called by a rollout worker
  produces: leases of samples and shares of an evaluation;
  waits for: capacity;
  unblocked by: a new version, the end of a sample being played, or ``hold_s`` seconds (the worker
      asks again).
``RolloutControl.record_arrivals``, called by a model worker
  produces: staged samples;
  waits for: the journal's records to be on disk;
  unblocked by: the journal's writer, or ``async_rl.journal_timeout_s``.
``RolloutControl.step_batch``, called by the stream loader
  produces: the samples of a step;
  waits for: enough staged samples that the gate releases;
  unblocked by: an arrival, a sample that is given up, or ``fail``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from realhf.api.calls import (
    ACCEPTED,
    ALLOCATE,
    ARRIVED,
    DUPLICATE,
    EVALUATED,
    REFUSED,
    REJECTED,
    STOPPED,
    AllocateAnswer,
    AllocateRequest,
    Arrival,
    ArrivedAnswer,
    ArrivedRequest,
    EvaluatedRequest,
    EvaluationPart,
    Nothing,
    RejectedRequest,
    RolloutLease,
)
from realhf.api.sample import SequenceSample
from realhf.api.source import GroupSignal, SampleResult
from realhf.base import process_clock
from realhf.base.messages import Call, Message
from realhf.dataflow.journal.journal import (
    DIED,
    FLAT,
    Accept,
    Admit,
    Commit,
    Consume,
    Draw,
    Drop,
    Record,
    Reject,
)
from realhf.dataflow.journal.ledger import RolloutLedger
from realhf.dataflow.rollouts.rollout_state import EvaluationQueue, SampleLocations
from realhf.dataflow.rollouts.sample_queue import (
    PendingRequests,
    QueuedTask,
    SampleQueue,
    add_metadata,
)
from realhf.dataflow.rollouts.staleness import StalenessManager, StragglerGate
from realhf.transport.codec import decode_sample
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.service import LoopServiceServer, ServiceRequest

_log = logging.getLogger(__name__)
LEASE_GRACE_S = 30.0
"""Seconds after a sample's deadline until it is taken back from a worker that did not answer."""
MAX_CONSECUTIVE_FAILURES = 8
"""The run fails when this many samples have been given up with none accepted in between."""


class RolloutsFailed(RuntimeError):
    """Error: the rollouts cannot continue. All of them fail, or one failed with
    ``rollout.on_failure=fail_fast``."""


@dataclass(frozen=True)
class RolloutRules:
    """Limits that decide when a sample is given up, replaced or dropped, and when the run fails."""

    total: int
    """Total number of samples that the run trains."""
    deadline_s: float
    """Time in seconds that a worker gets to play a sample."""
    max_attempts: int
    """Number of failed attempts after which a sample is given up."""
    fail_fast: bool = False
    """Whether the first failure ends the run."""
    drop: bool = False
    """Whether stale samples are dropped. Otherwise a step waits for stragglers before they become
    stale."""
    max_deaths: int = 3
    """Number of deaths of the process playing a sample after which the sample is given up."""
    max_flat: int = 0
    """Maximum number of samples without learning signal that are dropped and replaced per batch of
    accepted samples."""
    signal: GroupSignal = field(default_factory=GroupSignal)
    """Function that returns whether a group of episodes has a learning signal (its rewards are not
    all equal)."""

    def mark_suspect(self, task: QueuedTask) -> QueuedTask:
        """Return a requeued task, marked as a suspect if it would be given up after one more
        death."""
        return replace(task, suspect=task.deaths >= max(1, self.max_deaths - 1))


@dataclass
class _Lease:
    """A sample being played."""

    task: QueuedTask
    """The sample and its attempts so far."""
    worker: str
    """Incarnation of the worker that plays it."""
    expires: float
    """Time on ``process_clock``, in seconds, at which the sample is taken back."""


class RolloutControl:
    """State machine of all samples of the run, from admission to training.

    ``discard(ids)`` is called with accepted samples that will never be trained, ``warn(text)`` with
    a message about each sample that is given up. Workers are identified by incarnation (name and
    pid), so that a successor counts as another worker. ``locations`` and ``evaluations`` are shared
    with the stream and the held-out evaluations.

    It is the executor's result sink, with the methods ``record`` and ``stats``.
    """

    def __init__(
        self,
        supply: SampleQueue,
        ledger: RolloutLedger,
        staleness: StalenessManager,
        gate: StragglerGate,
        rules: RolloutRules,
        *,
        discard: Callable[[Sequence[str]], None],
        warn: Callable[[str], None] = _log.warning,
        locations: SampleLocations | None = None,
        evaluations: EvaluationQueue | None = None,
    ) -> None:
        self.locations = locations or SampleLocations()
        self._evaluations = evaluations or EvaluationQueue(1)
        self._queue = supply
        self._ledger = ledger
        self._rules = rules
        self._discard = discard
        self._warn = warn
        self.staleness = staleness
        self.gate = gate
        self.workers: set[str] = set()
        """Incarnations of rollout workers that may take samples."""
        self._open: dict[str, _Lease] = {}
        self._open_of: dict[str, dict[str, _Lease]] = {}
        """The samples in ``_open`` by worker."""
        self._requests = PendingRequests()
        self._staged: dict[str, SequenceSample] = {}
        """Metadata of accepted samples that no step has taken yet."""
        self._replay: dict[int, list[str]] = {}
        """Samples of the steps that a resumed run repeats, by step."""
        self._step_of: dict[str, int] = {}
        self._next_order = 0
        self._changed = asyncio.Event()
        """Event that is set at every change and then replaced by a new one, so that a waiter is
        woken by the first change after it has checked the state."""
        self._failure: BaseException | None = None
        self.paused = False
        self._consecutive_failures = 0
        self._flat_batch = 0
        """Number of the batch of accepted samples, from 0, to which ``_n_flat`` refers."""
        self._n_flat = 0
        self._flat: list[SampleResult] = []
        self.flat_of_step: list[SampleResult] = []
        """Results of samples without signal that were dropped between the recording of the last two
        steps."""
        self.flat_trained = 0
        """Number of samples without signal among those trained in the last step."""
        self.lost_attempts = 0
        self.given_up = 0
        self.refused = 0

    # ---- rollout workers

    def worker_joined(self, worker: str) -> None:
        """Allow an incarnation of a rollout worker to take samples from now on."""
        self.workers.add(worker)

    def worker_left(self, worker: str, reason: str) -> None:
        """Requeue the samples of a worker that died or stopped.

        One of these samples may be the cause of the crash. Suspects are never leased together, so
        the next crash identifies the culprit.
        """
        self.workers.discard(worker)
        self._evaluations.worker_left(worker, reason)
        for sample_id in list(self._open_of.get(worker, ())):
            self.lost_attempts += 1
            self._return(sample_id, DIED, f"{worker}: {reason}")
        self._open_of.pop(worker, None)
        self._requests.wake_worker(worker)
        self.wake()

    @property
    def in_play(self) -> int:
        """Number of samples being played by workers; each has a deadline."""
        return len(self._open)

    async def wait_unless_failed(self, work: asyncio.Future[Any]) -> None:
        """Wait for ``work``. Raises its error, or the error passed to ``fail`` if that happens
        first."""
        work.add_done_callback(lambda _: self.wake())
        while not work.done():
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()
        work.result()

    async def wait_until_stopped(self) -> None:
        """Wait until all workers have stopped. Raises the error passed to ``fail``."""
        while self.workers:
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    async def allocate(
        self, worker: str, count: int, hold_s: float
    ) -> tuple[list[RolloutLease] | None, list[EvaluationPart]]:
        """Return up to ``count`` samples and evaluation shares, at least one, for a worker to play.

        Samples are journaled before they are returned, so that their records reach the disk no
        later than their results do. Waits for capacity up to ``hold_s`` seconds, then returns
        (None, []): the worker should ask again. Returns ([], []) when the worker must stop, because
        the run is ending or the master considers the worker gone.
        """
        until = process_clock.now() + hold_s
        while worker in self.workers and self._failure is None and not self.paused:
            parts = self._evaluations.take(worker, count, alone=False)
            leases = self._admit(worker, count - len(parts))
            if len(parts) + len(leases) < count:  # there are no more samples to play at the moment
                parts += self._evaluations.take(
                    worker, count - len(parts) - len(leases), alone=True
                )
            if leases or parts:
                return leases or None, parts
            if not await self._requests.wait_turn(worker, until - process_clock.now()):
                return None, []
        self._requests.wake(1)
        return [], []

    def pause(self) -> None:
        """Stop leasing samples. Those already being played are finished."""
        self.paused = True
        self.wake()

    def record_evaluation(self, worker: str, request: EvaluatedRequest) -> None:
        """Record a worker's results for a share of an evaluation, or its failure."""
        self._evaluations.record(worker, request)
        if self._evaluations.has_waiting:
            self.wake()

    @property
    def complete(self) -> bool:
        """Whether the run has all the samples that it trains: accepted or, if stale ones may be
        dropped, trained."""
        done = self.staleness.consumed if self._rules.drop else self.staleness.accepted
        return done >= self._rules.total

    @property
    def capacity(self) -> int:
        """Number of samples that may be admitted now."""
        remaining = self._rules.total - self.staleness.accepted - self.staleness.running
        return max(0, min(self.staleness.capacity, remaining))

    def _admit(self, worker: str, count: int) -> list[RolloutLease]:
        leases: list[RolloutLease] = []
        records: list[Record] = []
        exhausted_before = self._queue.exhausted
        has_suspect = any(entry.task.suspect for entry in self._open_of.get(worker, {}).values())
        while len(leases) < count and self.capacity > 0:
            draws_before = self._queue.draws
            task = self._queue.take(suspects=not has_suspect)
            if task is None:
                break
            if self._queue.draws > draws_before:
                records.append(self._build_draw(task))
            has_suspect = has_suspect or task.suspect
            leases.append(lease := self._lease(task, worker))
            records.append(
                Admit(
                    lease.id,
                    lease.attempt,
                    lease.version,
                    lease.order,
                    worker,
                    task.item.to_map(),
                    task.failures,
                    task.deaths,
                )
            )
        if records:
            self._ledger.append(*records)
        if self._queue.exhausted and not exhausted_before:
            self.wake()
        return leases

    def _build_draw(self, first: QueuedTask) -> Draw:
        """Return the journal record of a draw from the source. ``first`` is the first item drawn,
        which has already left the queue."""
        state = self._queue.state()
        return Draw({**state, "drawn": [first.item.to_map(), *state["drawn"]]})

    def _lease(self, task: QueuedTask, worker: str) -> RolloutLease:
        if task.order is None:
            task = replace(task, order=self._next_order)
            self._next_order += 1
        assert task.order is not None
        self.staleness.admit()
        self.gate.admit(task.item.id, self.staleness.version, task.order)
        expires = process_clock.now() + self._rules.deadline_s + LEASE_GRACE_S
        entry = _Lease(task, worker, expires)
        self._open[task.item.id] = entry
        self._open_of.setdefault(worker, {})[task.item.id] = entry
        return RolloutLease(
            task.item.id,
            task.attempt,
            task.order,
            self.staleness.version,
            self._rules.deadline_s,
            dict(task.item.metadata),
            {key: list(value) for key, value in task.item.values.items()},
        )

    def record_failure(
        self, worker: str, sample_id: str, attempt: int, outcome: str, message: str
    ) -> None:
        """Record a failed attempt: requeue the sample, or give it up after too many failures.

        A report about an attempt that no longer belongs to the worker is ignored.
        """
        entry = self._open.get(sample_id)
        if entry is None or entry.task.attempt != attempt or entry.worker != worker:
            return
        if self._rules.fail_fast:
            text = f"sample {sample_id}: {outcome}: {message} (rollout.on_failure=fail_fast)"
            self.fail(RolloutsFailed(text))
        self._return(sample_id, outcome, message)
        self.wake()

    def expire(self) -> None:
        """Requeue samples and evaluation shares whose deadline passed more than a grace period
        ago."""
        self._evaluations.expire()
        now = process_clock.now()
        for sample_id in [i for i, entry in self._open.items() if entry.expires < now]:
            self._return(sample_id, "timeout", f"no answer from {self._open[sample_id].worker}")
        self.wake()

    def _return(self, sample_id: str, outcome: str, message: str) -> None:
        """Requeue a sample whose attempt failed or whose worker died, or give up on it."""
        failed = self._close(sample_id).task
        died = outcome == DIED
        task = self._rules.mark_suspect(
            replace(
                failed,
                attempt=failed.attempt + 1,
                failures=failed.failures + (not died),
                deaths=failed.deaths + died,
            )
        )
        final = task.failures >= self._rules.max_attempts or task.deaths >= self._rules.max_deaths
        self.staleness.reject()
        self.gate.forget(sample_id)
        reject = Reject(sample_id, failed.attempt, outcome, message[:1000], final)
        if not final:
            self._ledger.append(reject)
            self._queue.give_back(task)
            return
        self._ledger.append(reject, Draw(self._queue.state()))
        self.given_up += 1
        self._consecutive_failures += 1
        tally = (
            f"{task.failures} failed attempts and {task.deaths} deaths of the process that played "
            f"it"
        )
        self._warn(
            f"sample {sample_id} is given up after {tally}, at last {outcome}: {message[:300]}"
        )
        if self._consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            self.fail(
                RolloutsFailed(
                    f"the last {self._consecutive_failures} samples were all given up, {sample_id} "
                    f"after {tally}, "
                    f"at last by {outcome}: {message[:300]}"
                )
            )

    def _close(self, sample_id: str) -> _Lease:
        """Remove and return the lease of a sample."""
        entry = self._open.pop(sample_id)
        del self._open_of[entry.worker][sample_id]
        return entry

    # ---- the stream

    async def record_arrivals(self, arrivals: Sequence[Arrival], worker: str) -> list[str]:
        """Accept or refuse the samples that a model worker has received; return an answer for each
        of them.

        Returns when the journal's records are on disk. Raises CodecError on malformed metadata.
        """
        answers = [self._accept(arrival, worker) for arrival in arrivals]
        number = self._ledger.last
        self.wake()
        await self._ledger.wait_until_durable(number)
        return answers

    def _accept(self, arrival: Arrival, worker: str) -> str:
        entry = self._open.get(arrival.id)
        if entry is None or entry.task.attempt != arrival.attempt:
            is_accepted = self._ledger.state.accepted_attempt(arrival.id) == arrival.attempt
            # A second copy on another worker is refused, so that this worker frees it.
            is_duplicate = is_accepted and not self.locations.is_elsewhere(arrival.id, worker)
            self.refused += not is_duplicate
            return DUPLICATE if is_duplicate else REFUSED
        if arrival.error:
            self._return(arrival.id, "malformed", arrival.error)
            return REFUSED
        meta = add_metadata(decode_sample(arrival.meta), entry.task.item.metadata)
        self._close(arrival.id)
        self._consecutive_failures = 0
        batch = self.staleness.accepted // self._queue.batch_size
        if batch != self._flat_batch:
            self._flat_batch = batch
            self._n_flat = 0
        self.staleness.accept()
        accept = Accept(arrival.id, arrival.attempt, arrival.ref, arrival.meta)
        if self._n_flat < self._rules.max_flat:
            result = SampleResult.from_metadata(
                arrival.id, {name: row[0] for name, row in meta.metadata.items()}
            )
            if not self._rules.signal.has_signal(result):
                self._drop_flat(accept, result)
                return REFUSED  # the worker then frees it, so there is nothing to discard
        self.gate.stage(arrival.id)
        self._ledger.append(accept)
        self._staged[arrival.id] = meta
        self.locations.record(arrival.id, worker)
        return ACCEPTED

    def _drop_flat(self, accept: Accept, result: SampleResult) -> None:
        """Drop a sample without learning signal and pass its result to the source, in one append to
        the journal.

        This is the dynamic sampling of DAPO (Yu et al. 2025).
        """
        self.staleness.drop()
        self.gate.forget(result.id)
        self._flat.append(result)
        self._n_flat += 1
        self._queue.record([result])
        self._ledger.append(accept, Drop(result.id, FLAT), Draw(self._queue.state()))

    # ---- training steps

    async def step_batch(self, step: int) -> list[SequenceSample]:
        """Wait for the samples of a step and return their metadata in the order of admission.

        Returns [] when there are no more samples. Raises the error passed to ``fail``.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            ids = self._release(step)
            if ids is not None:
                break
            await self._changed.wait()
        for sample_id in ids:
            self._step_of[sample_id] = step
        return [self._staged.pop(sample_id) for sample_id in ids]

    def _release(self, step: int) -> list[str] | None:
        """Return the sample ids of a step, or None if the step has to wait."""
        planned = self._replay.pop(step, None)
        if planned is not None:
            for sample_id in planned:
                self.gate.forget(sample_id)
            return planned
        if self._rules.drop:
            self._drop(self.gate.drop_stale(step))
        final = self.complete or (self._queue.is_empty and not self._open)
        return self.gate.release(step, final=final)

    def _drop(self, ids: Sequence[str]) -> None:
        if not ids:
            return
        for sample_id in ids:
            self.staleness.drop()
            del self._staged[sample_id]
        self._ledger.append(
            *(Drop(sample_id, "stale") for sample_id in ids), Draw(self._queue.state())
        )
        self._discard(ids)
        self.wake()

    def waiting_for(self, step: int) -> str:
        """Return a phrase that explains what a step waits for, for stall reports."""
        slow = self.gate.stragglers(step)
        shown = ", ".join(slow[:4]) + (", ..." if len(slow) > 4 else "")
        return f"{self.gate.n_staged} samples have arrived" + (
            f"; waits for {shown}" if slow else "; waits for more"
        )

    def record(self, results: Sequence[SampleResult]) -> None:
        """Record that a step was trained on the samples with these results, in this order."""
        step = self._step_of[results[0].id]
        for result in results:
            del self._step_of[result.id]
        self.flat_of_step = self._flat
        self._flat = []
        self.flat_trained = sum(not self._rules.signal.has_signal(result) for result in results)
        self.staleness.consume(len(results))
        self._queue.record(results)
        self._ledger.append(
            Consume([result.id for result in results], step),
            Commit(step, step + 1),
            Draw(self._queue.state()),
        )

    def set_version(self, version: int) -> None:
        """Record that every current generation worker has loaded ``version``, which increases the
        capacity."""
        if version > self.staleness.version:
            self.staleness.set_version(version)
            self.wake()

    def stats(self) -> dict[str, float]:
        """Return the data source's metrics."""
        return self._queue.source.stats()

    def counters(self) -> dict[str, int]:
        """Return all admission counters by name."""
        return {
            **self.staleness.counters(),
            "capacity": self.capacity,
            "staged": self.gate.n_staged,
            "waiting": self._queue.n_returned,
            "lost_attempts": self.lost_attempts,
            "given_up": self.given_up,
            "refused": self.refused,
        }

    # ---- life cycle

    def restore(
        self,
        open_tasks: Sequence[QueuedTask],
        staged: Mapping[str, tuple[Admit, SequenceSample]],
        replay: Mapping[int, Sequence[str]],
        next_order: int,
    ) -> None:
        """Restore the state recovered from a journal.

        Args:
            open_tasks: Samples that were being played; they are played again.
            staged: Samples that had arrived.
            replay: Samples of the steps to repeat, by step.
            next_order: Number of the next admission.
        """
        self._next_order = next_order
        for task in open_tasks:
            self._queue.give_back(self._rules.mark_suspect(task))
        for sample_id, (admit, meta) in staged.items():
            self.gate.admit(sample_id, admit.version, admit.order)
            self.gate.stage(sample_id)
            self._staged[sample_id] = add_metadata(meta, admit.item["metadata"])
        self._replay = {step: list(ids) for step, ids in replay.items()}
        size = self._queue.batch_size
        self._flat_batch = self.staleness.accepted // size
        self._n_flat = sum(number // size == self._flat_batch for number in self._ledger.state.flat)

    def fail(self, error: BaseException) -> None:
        """Fail the rollouts: every wait raises the first ``error`` passed here, and no more samples
        are leased."""
        self._failure = self._failure or error
        self.wake()

    def wake(self) -> None:
        """Wake every waiter. Of the workers that wait for samples, wake only as many as there is
        capacity for."""
        self._changed.set()
        self._changed = asyncio.Event()
        # A worker with a suspect cannot take another one, so the first in the queue may not be the
        # one that can.
        wake_all = (
            self.paused
            or self._failure is not None
            or self._evaluations.has_waiting
            or self._queue.n_suspects
        )
        self._requests.wake(None if wake_all else self.capacity)


CALLS: dict[str, Call[Any, Any]] = {
    call.name: call for call in (ALLOCATE, ARRIVED, REJECTED, EVALUATED, STOPPED)
}
MAX_LEASES = 4096
"""Maximum number of samples in one answer, which limits the size of the message."""
MAX_HOLD_S = 60.0
"""Maximum time in seconds that a request for samples may wait."""


class RolloutService:
    """Network service in front of ``RolloutControl``. It answers every request in a separate task
    on the running loop.

    A malformed request gets an error as its answer; any other error in a request ends the run.
    """

    def __init__(self, control: RolloutControl, run_id: str, network: Network = LOOPBACK) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = LoopServiceServer(
            "the master's rollout control", run_id, self._start_answer, network=network
        )
        self.endpoint = self._server.endpoint

    async def close(self) -> None:
        """Stop the service. Waiting requests get no answer."""
        for task in self._tasks:
            task.cancel()
        await self._server.close()

    def _start_answer(self, request: ServiceRequest) -> None:
        task = self._loop.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: ServiceRequest) -> None:
        try:
            if request.method not in CALLS:
                raise ValueError(f"there is no request {request.method!r}")
            call = CALLS[request.method]
            message = call.unpack(request.payload)
        except ValueError as error:
            request.fail(error)
            return
        try:
            request.reply(call.pack_answer(await self._serve(request.client, message)))
        except Exception as error:
            request.fail(error)
            self._control.fail(error)

    async def _serve(self, client: str, message: Message) -> Message:
        match message:
            case AllocateRequest():
                count = max(1, min(message.count, MAX_LEASES))
                return AllocateAnswer(
                    *await self._control.allocate(client, count, min(message.hold_s, MAX_HOLD_S))
                )
            case ArrivedRequest():
                return ArrivedAnswer(await self._control.record_arrivals(message.arrivals, client))
            case RejectedRequest():
                self._control.record_failure(
                    client, message.id, message.attempt, message.outcome, message.message
                )
            case EvaluatedRequest():
                self._control.record_evaluation(client, message)
            case _:  # STOPPED: the worker has sent all it finished and closed its sessions
                self._control.worker_left(client, "it stopped")
        return Nothing()
