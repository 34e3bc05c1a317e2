"""Admits samples, takes them when they are finished and hands them to training steps, and answers the rollout
workers' requests.

Lives in the master's event loop. Every change of state is synchronous and goes into the journal in the same moment;
only waiting, for capacity, for samples and for the disk, is asynchronous.
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
from realhf.dataflow.journal.journal import DIED, FLAT, Accept, Admit, Commit, Consume, Draw, Drop, Record, Reject
from realhf.dataflow.journal.ledger import RolloutLedger
from realhf.dataflow.rollouts.held_out import EvaluationBoard
from realhf.dataflow.rollouts.sample_queue import PendingRequests, SampleQueue, Task, with_metadata
from realhf.dataflow.rollouts.staleness import StalenessManager, StragglerGate
from realhf.dataflow.rollouts.stream_loader import Holders
from realhf.transport.codec import decode_sample
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.service import LoopServiceServer, Request

_log = logging.getLogger(__name__)
LATE_S = 30.0
"""A worker that does not answer so long after a sample's deadline has lost it."""
MAX_IN_VAIN = 8
"""So many samples given up, none finished in between: nothing works, and another sample will not change that."""


class RolloutsFailed(RuntimeError):
    """A rollout failed where the configuration says that none may, or all do."""


@dataclass(frozen=True)
class RolloutRules:
    """``total``: samples that the run trains in all; ``max_attempts``: failures, and ``max_deaths``: deaths of the
    process that plays it, after which a sample is given up; ``fail_fast``: the first failure ends the run; ``drop``:
    stale samples are dropped, not waited for. For every batch of samples that is accepted, ``max_flat`` without
    ``signal`` are dropped: others are played in their place."""

    total: int
    deadline_s: float
    max_attempts: int
    fail_fast: bool = False
    drop: bool = False
    max_deaths: int = 3
    max_flat: int = 0
    signal: GroupSignal = field(default_factory=GroupSignal)

    def judged(self, task: Task) -> Task:
        """Return a task that comes back, marked as a suspect where the next death would be its last."""
        return replace(task, suspect=task.deaths >= max(1, self.max_deaths - 1))


@dataclass
class _Open:
    """A sample in play."""

    task: Task
    worker: str
    expires: float


class RolloutControl:
    """``discard(ids)`` is told of accepted samples that will never be trained, ``warn(text)`` of samples that are given
    up. A worker is known by a name of its incarnation, so that a successor is not taken for it.

    It stands in for the source of the executor: ``record`` and ``stats``.
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
        board: EvaluationBoard | None = None,
    ) -> None:
        self.board = board or EvaluationBoard(1)
        self.holders = Holders()
        self._queue, self._ledger, self._rules, self._discard = supply, ledger, rules, discard
        self._warn = warn
        self.staleness, self.gate = staleness, gate
        self.workers: set[str] = set()
        """Those that play or could."""
        self._open: dict[str, _Open] = {}
        self._open_of: dict[str, dict[str, _Open]] = {}
        self._requests = PendingRequests()
        self._staged: dict[str, SequenceSample] = {}
        self._replay: dict[int, list[str]] = {}
        self._step_of: dict[str, int] = {}
        self._next_order = 0
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self.paused = False
        self._in_vain = 0
        self._flat_for = self._n_flat = 0
        self._flat: list[SampleResult] = []
        self.flat_of_step: list[SampleResult] = []
        """Of the samples that were dropped before the last step, and after the one before it, because their rewards are
        all equal; ``flat_trained`` such were trained by it."""
        self.flat_trained = 0
        self.lost_attempts = 0
        self.given_up = 0
        self.refused = 0

    # ---- rollout workers

    def worker_joined(self, worker: str) -> None:
        """Let a process of a rollout worker take samples from now on."""
        self.workers.add(worker)

    def worker_left(self, worker: str, reason: str) -> None:
        """Its samples are played again by others. This is no failure of theirs, but one of them may be the cause: those
        that the next death would end are not played together, so that one which kills again does so by itself."""
        self.workers.discard(worker)
        self.board.worker_left(worker, reason)
        for sample_id in list(self._open_of.get(worker, ())):
            self.lost_attempts += 1
            self._return(sample_id, DIED, f"{worker}: {reason}")
        self._open_of.pop(worker, None)
        self._requests.wake_worker(worker)
        self.wake()

    @property
    def in_play(self) -> int:
        """Samples that a worker has; each has a deadline."""
        return len(self._open)

    async def unless_failed(self, work: asyncio.Future[Any]) -> None:
        """Wait for ``work``. Raises what ``fail`` was given before it is done."""
        work.add_done_callback(lambda _: self.wake())
        while not work.done():
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()
        work.result()

    async def stopped(self) -> None:
        """Until no worker plays. Raises what ``fail`` was given."""
        while self.workers:
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    async def allocate(
        self, worker: str, count: int, hold_s: float
    ) -> tuple[list[RolloutLease] | None, list[EvaluationPart]]:
        """Between one and ``count`` samples and shares of an evaluation to play. Samples are in the journal before they
        are given: on the disk no later than what comes of them, and lost only together with this process and all who
        heard of them. Waits for capacity up to ``hold_s`` seconds, then (None, []): ask again. ([], []) when the worker
        is to stop: the run comes to its end, or has seen the worker leave."""
        until = process_clock.now() + hold_s
        while worker in self.workers and self._failure is None and not self.paused:
            parts = self.board.take(worker, count, alone=False)
            leases = self._admit(worker, count - len(parts))
            if len(parts) + len(leases) < count:  # there are no more samples to play at the moment
                parts += self.board.take(worker, count - len(parts) - len(leases), alone=True)
            if leases or parts:
                return leases or None, parts
            if not await self._requests.turn(worker, until - process_clock.now()):
                return None, []
        self._requests.wake(1)
        return [], []

    def pause(self) -> None:
        """Give no more samples; what is in play is played to its end."""
        self.paused = True
        self.wake()

    def evaluated(self, worker: str, request: EvaluatedRequest) -> None:
        """A worker has played a share of an evaluation, or failed to."""
        self.board.evaluated(worker, request)
        if self.board.waiting:
            self.wake()

    @property
    def complete(self) -> bool:
        """Whether every sample that the run trains has arrived (was trained, where one may still be dropped)."""
        done = self.staleness.consumed if self._rules.drop else self.staleness.accepted
        return done >= self._rules.total

    @property
    def capacity(self) -> int:
        """Samples that may be admitted now."""
        still = self._rules.total - self.staleness.accepted - self.staleness.running
        return max(0, min(self.staleness.capacity, still))

    def _admit(self, worker: str, count: int) -> list[RolloutLease]:
        leases: list[RolloutLease] = []
        records: list[Record] = []
        exhausted_before = self._queue.exhausted
        suspected = any(entry.task.suspect for entry in self._open_of.get(worker, {}).values())
        while len(leases) < count and self.capacity > 0:
            draws_before = self._queue.draws
            task = self._queue.take(suspects=not suspected)
            if task is None:
                break
            if self._queue.draws > draws_before:
                records.append(self._draw_with(task))
            suspected = suspected or task.suspect
            leases.append(lease := self._lease(task, worker))
            fields = lease.id, lease.attempt, lease.version, lease.order, worker, task.item.to_map()
            records.append(Admit(*fields, task.failures, task.deaths))
        if records:
            self._ledger.append(*records)
        if self._queue.exhausted and not exhausted_before:
            self.wake()
        return leases

    def _draw_with(self, first: Task) -> Draw:
        """The state after a draw, of which ``first`` has been taken already."""
        state = self._queue.state()
        return Draw({**state, "drawn": [first.item.to_map(), *state["drawn"]]})

    def _lease(self, task: Task, worker: str) -> RolloutLease:
        if task.order is None:
            task = replace(task, order=self._next_order)
            self._next_order += 1
        assert task.order is not None
        self.staleness.admit()
        self.gate.admit(task.item.id, self.staleness.version, task.order)
        expires = process_clock.now() + self._rules.deadline_s + LATE_S
        entry = self._open[task.item.id] = _Open(task, worker, expires)
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

    def rejected(self, worker: str, sample_id: str, attempt: int, outcome: str, message: str) -> None:
        """An attempt failed: the sample is tried again, or given up after too many failures."""
        entry = self._open.get(sample_id)
        if entry is None or entry.task.attempt != attempt or entry.worker != worker:
            return
        if self._rules.fail_fast:
            text = f"sample {sample_id}: {outcome}: {message} (rollout.on_failure=fail_fast)"
            self.fail(RolloutsFailed(text))
        self._return(sample_id, outcome, message)
        self.wake()

    def expire(self) -> None:
        """Take back what was not answered long after its deadline."""
        self.board.expire()
        now = process_clock.now()
        for sample_id in [i for i, entry in self._open.items() if entry.expires < now]:
            self._return(sample_id, "timeout", f"no answer from {self._open[sample_id].worker}")
        self.wake()

    def _return(self, sample_id: str, outcome: str, message: str) -> None:
        played, died = self._close(sample_id).task, outcome == DIED
        failures, deaths = played.failures + (not died), played.deaths + died
        task = self._rules.judged(replace(played, attempt=played.attempt + 1, failures=failures, deaths=deaths))
        final = task.failures >= self._rules.max_attempts or task.deaths >= self._rules.max_deaths
        self.staleness.reject()
        self.gate.forget(sample_id)
        reject = Reject(sample_id, played.attempt, outcome, message[:1000], final)
        if not final:
            self._ledger.append(reject)
            self._queue.give_back(task)
            return
        self._ledger.append(reject, Draw(self._queue.state()))
        self.given_up += 1
        self._in_vain += 1
        tally = f"{task.failures} failed attempts and {task.deaths} deaths of the process that played it"
        self._warn(f"sample {sample_id} is given up after {tally}, at last {outcome}: {message[:300]}")
        if self._in_vain >= MAX_IN_VAIN:
            self.fail(
                RolloutsFailed(
                    f"the last {self._in_vain} samples were all given up, {sample_id} after {tally}, "
                    f"at last by {outcome}: {message[:300]}"
                )
            )

    def _close(self, sample_id: str) -> _Open:
        """Take an attempt out of the hand of its worker."""
        entry = self._open.pop(sample_id)
        del self._open_of[entry.worker][sample_id]
        return entry

    # ---- the stream

    async def arrived(self, arrivals: Sequence[Arrival], holder: str) -> list[str]:
        """An answer for each of ``holder``'s, when it is on the disk. Raises CodecError on malformed metadata."""
        answers = [self._take(arrival, holder) for arrival in arrivals]
        number = self._ledger.last
        self.wake()
        await self._ledger.durable(number)
        return answers

    def _take(self, arrival: Arrival, holder: str) -> str:
        entry = self._open.get(arrival.id)
        if entry is None or entry.task.attempt != arrival.attempt:
            duplicate = self._ledger.state.accepted_attempt(arrival.id) == arrival.attempt
            duplicate = duplicate and not self.holders.elsewhere(arrival.id, holder)
            self.refused += not duplicate
            return DUPLICATE if duplicate else REFUSED
        if arrival.error:
            self._return(arrival.id, "malformed", arrival.error)
            return REFUSED
        meta = with_metadata(decode_sample(arrival.meta), entry.task.item.metadata)
        self._close(arrival.id)
        self._in_vain = 0
        batch = self.staleness.accepted // self._queue.batch_size
        if batch != self._flat_for:
            self._flat_for, self._n_flat = batch, 0
        self.staleness.accept()
        accept = Accept(arrival.id, arrival.attempt, arrival.ref, arrival.meta)
        if self._n_flat < self._rules.max_flat:
            result = SampleResult.of(arrival.id, {name: row[0] for name, row in meta.metadata.items()})
            if not self._rules.signal.of(result):
                self._drop_flat(accept, result)
                return REFUSED  # Its holder forgets it: there is nothing to clear.
        self.gate.stage(arrival.id)
        self._ledger.append(accept)
        self._staged[arrival.id] = meta
        self.holders.record(arrival.id, holder)
        return ACCEPTED

    def _drop_flat(self, accept: Accept, result: SampleResult) -> None:
        """Drop a sample that teaches nothing, and tell the source what became of it, in one append: the dynamic
        sampling of DAPO (Yu et al. 2025)."""
        self.staleness.drop()
        self.gate.forget(result.id)
        self._flat.append(result)
        self._n_flat += 1
        self._queue.record([result])
        self._ledger.append(accept, Drop(result.id, FLAT), Draw(self._queue.state()))

    # ---- training steps

    async def step_batch(self, step: int) -> list[SequenceSample]:
        """Metadata of the samples of a step in the order of their admission; waits for them. [] when there will be no
        more. Raises what ``fail`` was given."""
        while True:
            if self._failure is not None:
                raise self._failure
            ids = self._released(step)
            if ids is not None:
                break
            await self._changed.wait()
        for sample_id in ids:
            self._step_of[sample_id] = step
        return [self._staged.pop(sample_id) for sample_id in ids]

    def _released(self, step: int) -> list[str] | None:
        planned = self._replay.pop(step, None)
        if planned is not None:
            for sample_id in planned:
                self.gate.forget(sample_id)
            return planned
        if self._rules.drop:
            self._drop(self.gate.drop_stale(step))
        final = self.complete or (self._queue.empty and not self._open)
        return self.gate.release(step, final=final)

    def _drop(self, ids: Sequence[str]) -> None:
        if not ids:
            return
        for sample_id in ids:
            self.staleness.drop()
            del self._staged[sample_id]
        self._ledger.append(*(Drop(sample_id, "stale") for sample_id in ids), Draw(self._queue.state()))
        self._discard(ids)
        self.wake()

    def waiting_for(self, step: int) -> str:
        """In words, for reports about a stall."""
        slow = self.gate.stragglers(step)
        shown = ", ".join(slow[:4]) + (", ..." if len(slow) > 4 else "")
        return f"{self.gate.staged} samples have arrived" + (f"; waits for {shown}" if slow else "; waits for more")

    def record(self, results: Sequence[SampleResult]) -> None:
        """A step has been trained on these samples, in this order."""
        step = self._step_of[results[0].id]
        for result in results:
            del self._step_of[result.id]
        self.flat_of_step, self._flat = self._flat, []
        self.flat_trained = sum(not self._rules.signal.of(result) for result in results)
        self.staleness.consume(len(results))
        self._queue.record(results)
        self._ledger.append(
            Consume([result.id for result in results], step), Commit(step, step + 1), Draw(self._queue.state())
        )

    def set_version(self, version: int) -> None:
        """Every living generation worker has these weights."""
        if version > self.staleness.version:
            self.staleness.set_version(version)
            self.wake()

    def stats(self) -> dict[str, float]:
        """The source's own figures."""
        return self._queue.source.stats()

    def counters(self) -> dict[str, int]:
        """Every counter of admission."""
        return {
            **self.staleness.counters(),
            "capacity": self.capacity,
            "staged": self.gate.staged,
            "waiting": self._queue.returned,
            "lost_attempts": self.lost_attempts,
            "given_up": self.given_up,
            "refused": self.refused,
        }

    # ---- life

    def restore(
        self,
        open_tasks: Sequence[Task],
        staged: Mapping[str, tuple[Admit, SequenceSample]],
        replay: Mapping[int, Sequence[str]],
        next_order: int,
    ) -> None:
        """Continue from a journal: samples that were in play are played again, what had arrived is there."""
        self._next_order = next_order
        for task in open_tasks:
            self._queue.give_back(self._rules.judged(task))
        for sample_id, (admit, meta) in staged.items():
            self.gate.admit(sample_id, admit.version, admit.order)
            self.gate.stage(sample_id)
            self._staged[sample_id] = with_metadata(meta, admit.item["metadata"])
        self._replay = {step: list(ids) for step, ids in replay.items()}
        size = self._queue.batch_size
        self._flat_for = self.staleness.accepted // size
        self._n_flat = sum(number // size == self._flat_for for number in self._ledger.state.flat)

    def fail(self, error: BaseException) -> None:
        """Every waiter raises ``error``, or gets nothing more."""
        self._failure = self._failure or error
        self.wake()

    def wake(self) -> None:
        """Let every waiter look again; of those who ask for samples, no more than there may be some for."""
        self._changed.set()
        self._changed = asyncio.Event()
        everybody = self.paused or self._failure is not None or self.board.waiting or self._queue.suspects
        self._requests.wake(None if everybody else self.capacity)


CALLS: dict[str, Call[Any, Any]] = {call.name: call for call in (ALLOCATE, ARRIVED, REJECTED, EVALUATED, STOPPED)}
MAX_LEASES = 4096
MAX_HOLD_S = 60.0


class RolloutService:
    """Listens for requests and answers them on the running loop, each in a task of its own. A request that makes no
    sense is told so; what goes wrong with any other ends the run."""

    def __init__(self, control: RolloutControl, run_id: str, network: Network = LOOPBACK) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = LoopServiceServer("the master's rollout control", run_id, self._begin, network=network)
        self.endpoint = self._server.endpoint

    async def close(self) -> None:
        """Requests that wait are not answered any more."""
        for task in self._tasks:
            task.cancel()
        await self._server.close()

    def _begin(self, request: Request) -> None:
        task = self._loop.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Request) -> None:
        try:
            if request.method not in CALLS:
                raise ValueError(f"there is no request {request.method!r}")
            call = CALLS[request.method]
            asked = call.unpack(request.payload)
        except ValueError as error:
            request.fail(error)
            return
        try:
            request.reply(call.pack_answer(await self._served(request.client, asked)))
        except Exception as error:
            request.fail(error)
            self._control.fail(error)

    async def _served(self, client: str, asked: Message) -> Message:
        match asked:
            case AllocateRequest():
                count = max(1, min(asked.count, MAX_LEASES))
                return AllocateAnswer(*await self._control.allocate(client, count, min(asked.hold_s, MAX_HOLD_S)))
            case ArrivedRequest():
                return ArrivedAnswer(await self._control.arrived(asked.arrivals, client))
            case RejectedRequest():
                self._control.rejected(client, asked.id, asked.attempt, asked.outcome, asked.message)
            case EvaluatedRequest():
                self._control.evaluated(client, asked)
            case _:  # it takes no more samples, has sent what it finished, and has given up its sessions
                self._control.worker_left(client, "it stopped")
        return Nothing()
