"""Does everything that the master of a run has to do about asynchronous rollouts, from their plan to their end."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from realhf.api.calls import PLAY, OpenStreamRequest, PlayRequest
from realhf.api.experiment import EvaluationSpec, HeldOutOptions, RolloutSpec
from realhf.api.sample import SequenceSample
from realhf.api.source import DataSource, ResultSink, SourceItem
from realhf.dataflow.buffer import AsyncIOSequenceBuffer
from realhf.dataflow.journal.journal import Admit, Draw, Drop, End, write_snapshot
from realhf.dataflow.journal.ledger import Recovery, RolloutLedger
from realhf.dataflow.model_function_call import StepReport
from realhf.dataflow.rollouts.control import RolloutControl, RolloutRules, RolloutService, RolloutsFailed
from realhf.dataflow.rollouts.held_out import Deliver, HeldOutEvaluations
from realhf.dataflow.rollouts.metrics import GenerationFigures, episode_texts, rollout_figures
from realhf.dataflow.rollouts.sample_queue import SampleQueue, Task
from realhf.dataflow.rollouts.staleness import StalenessManager, StragglerGate
from realhf.dataflow.rollouts.stream_loader import Receivers, StreamLoader
from realhf.dataflow.rollouts.weight_updates import SelfTest, WeightUpdates
from realhf.dataflow.step_source import StepSource
from realhf.dataflow.storage_map import StorageMap
from realhf.dataflow.weight_proof import WeightRecord
from realhf.dataflow.worker_group import ask
from realhf.transport.codec import decode_sample
from realhf.transport.errors import WorkerDied
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.roster import WorkerInfo
from realhf.transport.rpc_master import RpcMaster

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutPlan:
    """``trainers``: the model workers that train the role and hold its samples, in the order of ranks; ``batch_size``
    samples per step; ``seconds``: deadline of a control call; ``load_s``: of loading weights; ``needs_env``: episodes
    are played on a service; ``network``: where the master listens."""

    spec: RolloutSpec
    trainers: Sequence[str]
    batch_size: int
    total_steps: int
    completed_steps: int
    folder: Path
    run_id: str
    seconds: float
    load_s: float
    archive: bool = False
    needs_env: bool = True
    network: Network = LOOPBACK
    checkpoint: Path | None = None
    """The folder of the checkpoint that the run goes on from."""

    @property
    def trainer(self) -> str:
        """The first of the trainers, which does what one does for all."""
        return self.trainers[0]

    @property
    def group_size(self) -> int:
        """Episodes that are played for one sample."""
        return self.spec.episodes.group_size

    @property
    def max_concurrent(self) -> int:
        """Samples admitted and not yet accepted: in play, or on their way to the trainer."""
        return self.spec.options.max_concurrent_rollouts or self.players + self.credits

    @property
    def players(self) -> int:
        """Samples that all rollout workers play at once."""
        return self.spec.options.n_rollout_workers * max(1, self.spec.sessions // self.group_size)

    @property
    def credits(self) -> int:
        """Samples of one rollout worker that may be on their way."""
        return max(8, 2 * self.batch_size)

    @property
    def drops_stale(self) -> bool:
        """Whether stale samples are dropped, not waited for."""
        return self.spec.options.staleness_policy == "drop"

    def rules(self) -> RolloutRules:
        """Return what ends a sample, or the run."""
        options = self.spec.options
        return RolloutRules(
            self.total_steps * self.batch_size,
            options.rollout_deadline_s,
            options.max_attempts,
            self.spec.episodes.on_failure == "fail_fast",
            self.drops_stale,
            options.max_deaths,
            max_flat=int(self.spec.calls[0].resample * self.batch_size),
            signal=self.spec.calls[0].signal,
        )

    def staleness(self) -> StalenessManager:
        """Return the counters of admission, after the steps that are complete."""
        consumed = self.completed_steps * self.batch_size
        return StalenessManager(
            batch_size=self.batch_size,
            max_head_offpolicyness=self.spec.options.max_head_offpolicyness,
            max_concurrent=self.max_concurrent,
            version=self.completed_steps,
            accepted=consumed,
            consumed=consumed,
        )


_log = logging.getLogger(__name__)
ROLLOUT, GENERATION, TRAINER = "rollout_worker", "generation", "model_worker"
JOURNAL_FILE = "journal.snapshot"
"""The file of a checkpoint that holds what its journal held."""
STOP_TIMEOUT_S = 120.0
WATCH_S = 2.0
ROUNDS = 4
"""A share of an evaluation may take as long as so many samples, one after the other."""


class AsyncRollouts(StepSource):
    """The samples of an asynchronous run. Make it with ``open``, before the executor."""

    def __init__(
        self,
        plan: RolloutPlan,
        caller: RpcMaster,
        source: DataSource,
        ledger: RolloutLedger,
        warn: Callable[[str], None] = _log.warning,
    ) -> None:
        options = plan.spec.options
        self._plan, self._caller, self._ledger, self._warn = plan, caller, ledger, warn
        self._queue, self._staleness = SampleQueue(source, plan.batch_size), plan.staleness()
        self._record = WeightRecord(plan.folder.parent, warn, completed_steps=plan.completed_steps)
        self._weights = WeightUpdates(
            caller,
            plan.trainer,
            plan.spec.role,
            on_version=lambda version: self.control.set_version(version),
            on_failed=self._not_loaded,
            on_wrong=lambda error: self.control.fail(error),
            record=self._record,
            timeout_s=plan.load_s,
        )
        self._held_out = HeldOutEvaluations(
            caller,
            self._weights,
            players=plan.players,
            deadline_s=ROUNDS * options.rollout_deadline_s,
            timeout_s=plan.load_s,
            wake=lambda: self.control.wake(),
            warn=warn,
            fail=lambda error: self.control.fail(error),
        )
        self.control = RolloutControl(
            self._queue,
            ledger,
            self._staleness,
            StragglerGate(plan.batch_size, options.max_head_offpolicyness, wait=not plan.drops_stale),
            plan.rules(),
            discard=self._discard,
            warn=warn,
            board=self._held_out.board,
        )
        self._service = RolloutService(self.control, plan.run_id, plan.network)
        self._rollout_workers: dict[str, str] = {}
        self._env: dict[str, str] = {}
        self._playing = False
        self._receivers = Receivers(caller, plan.trainers, plan.seconds)
        self._streams: list[str] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._step_figures, self._live_figures = (
            GenerationFigures(caller, self._weights, plan.seconds) for _ in ("each step", "each look")
        )
        self._totals: defaultdict[str, float] = defaultdict(float)

    @classmethod
    async def open(
        cls,
        plan: RolloutPlan,
        caller: RpcMaster,
        source: DataSource,
        warn: Callable[[str], None] = _log.warning,
    ) -> AsyncRollouts:
        """Go on from the journal in ``plan.folder``, if there is one. ``warn`` is told what a person has to know.
        Raises JournalError, also where the journal and the checkpoint are of different histories, and RpcError."""
        ledger, recovery = RolloutLedger.open(
            plan.folder,
            completed_steps=plan.completed_steps,
            archive=plan.archive,
            snapshot=plan.checkpoint and plan.checkpoint / JOURNAL_FILE,
            warn=warn,
            timeout_s=plan.spec.options.journal_timeout_s,
        )
        rollouts = cls(plan, caller, source, ledger, warn)
        try:
            await rollouts._open_stream()
            if recovery is not None:
                await rollouts._recover(recovery)
        except BaseException:
            await rollouts.close()  # a socket that is left open holds up the end of the process
            raise
        return rollouts

    async def _open_stream(self) -> None:
        request = OpenStreamRequest(
            control=self._service.endpoint,
            credits=self._plan.credits,
            keys=list(self._plan.spec.keys),
            group_size=self._plan.group_size,
            max_sequences=self._plan.group_size * self._plan.spec.rows_per_episode,
            max_tokens=self._plan.spec.episodes.max_total_tokens,
        )
        self._streams = await self._receivers.open(request)

    async def _recover(self, recovery: Recovery) -> None:
        items = [(admit.id, accept.attempt, accept.ref) for admit, accept in recovery.accepted]
        arrivals = await self._receivers.restore(items, self.control.holders, self._plan.load_s)
        staged: dict[str, tuple[Admit, SequenceSample]] = {}
        lost: list[Drop] = []
        for (admit, _), arrival in zip(recovery.accepted, arrivals, strict=True):
            if arrival.error:
                _log.warning("sample %s had arrived and is lost: %s", admit.id, arrival.error)
                lost.append(Drop(admit.id, "payload_lost"))
            else:
                staged[admit.id] = (admit, decode_sample(arrival.meta))
        if lost:
            self._warn(
                f"{len(lost)} of the {len(arrivals)} samples that had arrived are lost, because what was written of "
                f"them is damaged or gone (the log names each): {', '.join(drop.id for drop in lost[:4])}"
            )
        self._staleness.restore_accepted(len(staged))
        replay = {}
        for step, ids in recovery.replay:
            if not staged.keys() >= set(ids):
                break
            replay[step] = ids
        admitted = [*(admit.id for admit, _ in recovery.accepted), *(admit.id for admit in recovery.requeue)]
        if recovery.draw is not None:
            self._queue.load_state(recovery.draw, admitted)
        self._queue.recorded |= {sample_id for _, ids in recovery.replay for sample_id in ids}
        if lost:
            self._ledger.append(*lost, Draw(self._queue.state()))
        tasks = [
            Task(SourceItem(**admit.item), admit.attempt + 1, admit.failures, admit.order, admit.deaths)
            for admit in recovery.requeue
        ]
        self.control.restore(tasks, staged, replay, recovery.order)
        if late := self.control.gate.overdue(self._plan.completed_steps):
            eta = self._plan.spec.options.max_head_offpolicyness
            fate = "dropped" if self._plan.drops_stale else "trained all the same"
            self._warn(
                f"{late} of the {len(staged)} samples that had arrived will be older than "
                f"async_rl.max_head_offpolicyness={eta} allows when their step comes; they are {fate}"
            )
        _log.info(
            "journal: %d samples had arrived, %d were in play and are played again, %d steps are repeated",
            len(staged),
            len(tasks),
            len(replay),
        )

    @property
    def results(self) -> ResultSink:
        """Return the control of the rollouts, which writes down what was trained and tells the data source."""
        return self.control

    def loader(self, buffer: AsyncIOSequenceBuffer, storage: StorageMap) -> StreamLoader:
        """Fills the executor's buffer."""
        keys = buffer.graph.required_dataset_keys()
        return StreamLoader(
            self.control,
            buffer,
            storage,
            held_by=self.control.holders.by_worker,
            keys=keys,
            busy=lambda: self.control.in_play > 0 or self._weights.busy,
        )

    # ---- workers

    def joined(self, info: WorkerInfo) -> None:
        """A worker has registered."""
        if info.kind == GENERATION:
            self._weights.joined(info.name)
        elif "env" in info.endpoints:
            self._env[info.name] = info.endpoints["env"]
            for name in self._rollout_workers if self._playing else ():
                self._spawn(self._play(name))
        elif info.kind == ROLLOUT:
            self._rollout_workers[info.name] = f"{info.name}:{info.pid}"
            if self._playing:
                self._spawn(self._play(info.name))

    def left(self, name: str, reason: str) -> None:
        """A worker has died. What it had in hand is played again; without the trainer nothing can go on."""
        if name.startswith(f"{GENERATION}/"):
            self._weights.left(name)
        elif name in self._rollout_workers:
            self.control.worker_left(self._rollout_workers.pop(name), reason)
        elif name.startswith(f"{TRAINER}/"):
            self.control.fail(WorkerDied(name, reason))

    async def start(self) -> None:
        """Give the generation workers their weights, prove that these arrive, and let the rollout workers play."""
        await self.publish(self._plan.completed_steps)
        await self._prove()
        self._spawn(self._watch())
        self._playing = True
        await asyncio.gather(*(self._play(name) for name in list(self._rollout_workers)))

    async def _prove(self) -> None:
        """Run the self-test of weight updates. Raises WrongWeights, or what went wrong with the rollouts meanwhile."""
        test = SelfTest(self._caller, self._weights, timeout_s=self._plan.load_s, warn=self._warn)
        self._record.proven(self._weights.published, await self._unless_failed(test.run()))

    async def _play(self, name: str) -> None:
        """Once for every process, as long as it plays: two at once would share sessions and cache rows. Without the
        service that its episodes are played on nobody plays until there is one."""
        incarnation = self._rollout_workers.get(name)
        ready = self._playing and (self._env or not self._plan.needs_env)
        if incarnation is None or incarnation in self.control.workers or not ready:
            return
        self.control.worker_joined(incarnation)
        env = [url for _, url in sorted(self._env.items())]
        try:
            request = PlayRequest(self._service.endpoint, self._streams, env)
            await ask(self._caller, name, PLAY, request, timeout_s=self._plan.seconds)
        except WorkerDied as error:
            _log.warning("%s", error)

    async def pause(self) -> None:
        """Let what is in play come to its end and the sessions be closed. Raises RolloutsFailed when it does not."""
        self._playing = False
        self.control.pause()
        try:
            async with asyncio.timeout(self._plan.spec.options.rollout_deadline_s + STOP_TIMEOUT_S):
                await self.control.stopped()
        except TimeoutError:
            raise RolloutsFailed(f"{', '.join(sorted(self.control.workers))} did not stop") from None

    def _not_loaded(self, worker: str, error: Exception) -> None:
        """Others go on without it until its successor has joined; without any other the run cannot."""
        if self._weights.versions.keys() == {worker}:
            self.control.fail(RolloutsFailed(f"{worker} did not load the weights: {error}"))
        else:
            self._warn(f"{worker} did not load the weights and is sent away: {error}")
            self._caller.dismiss(worker, f"it did not load the weights: {error}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self.control.expire()
            await self._receivers.check()

    # ---- steps

    async def publish(self, completed_steps: int) -> None:
        """New weights for the generation workers. Raises what went wrong with the rollouts meanwhile."""
        await self._unless_failed(self._held_out.publish(completed_steps))

    async def evaluate(self, step: int, evaluation: EvaluationSpec, deliver: Deliver) -> bool:
        """Play it on the rollout workers while training goes on, with the weights of now; returns once they are kept
        for it. An evaluation by another interface than the one that plays the samples is the trainer's. Raises what
        went wrong with the rollouts meanwhile."""
        if evaluation.interface != self._plan.spec.calls[0].interface:
            return False
        when = "before training" if step == 0 else f"after step {step}"
        await self._unless_failed(self._held_out.begin(when, HeldOutOptions.from_args(evaluation.args), deliver))
        return True

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation is in play."""
        return self._held_out.running

    async def evaluated(self) -> None:
        """Wait for the evaluation in play. Raises what went wrong with the rollouts meanwhile."""
        await self._unless_failed(self._held_out.over())

    async def _unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` does, which may wait for an evaluation: after a failure nobody plays its shares any
        more. Raises what went wrong with the rollouts before it is done."""
        running = asyncio.ensure_future(work)
        try:
            await self.control.unless_failed(running)
        finally:
            running.cancel()
        return running.result()

    async def before_checkpoint(self) -> None:
        """What the checkpoint will cover has to be in the journal first."""
        await self._ledger.durable()

    async def save(self, completed_steps: int, folder: Path) -> None:
        """Keep in a checkpoint which samples are open and how far the source has got, lest a damaged journal be the
        only one that knows. Raises OSError."""
        if self._weights.published != completed_steps:
            self._record.unpublished(completed_steps)
        records = self._ledger.snapshot_after(completed_steps)
        await asyncio.to_thread(write_snapshot, folder / JOURNAL_FILE, records)

    async def checkpointed(self, completed_steps: int, folder: str) -> None:
        """A checkpoint is valid: payloads that it makes unnecessary are deleted."""
        self._ledger.checkpointed(completed_steps, folder)
        await self._ledger.durable()
        self.control.holders.keep(lambda sample_id: self._ledger.state.accepted_attempt(sample_id) is not None)
        await self._receivers.prune(self._ledger)

    async def step_metrics(self, report: StepReport) -> dict[str, float]:
        """``rollout/...``, ``failures/<kind>`` and ``retries/<kind>`` of the step's samples and of those that gave way
        to them, beside ``live`` without its totals."""
        figures = rollout_figures([*report.results, *self.control.flat_of_step])
        if self._plan.spec.calls[0].resample:
            figures["n_dropped_groups"] = float(len(self.control.flat_of_step))
            figures["n_groups_without_signal"] = float(self.control.flat_trained)
        trouble = {name: figures.pop(name) for name in list(figures) if name.startswith(("failures/", "retries/"))}
        for name, value in trouble.items():
            self._totals[name] += value
        trained = sum(times["compute_s"] for times in report.times.values())
        tokens = figures["tokens"]
        return {
            **{f"rollout/{name}": value for name, value in figures.items()},
            **trouble,
            **self._admission(),
            **await self._step_figures.read(),
            "training/occupancy": trained / report.wall_s,
            "tokens": tokens,
            "tokens_per_second": tokens / report.wall_s,
        }

    def episodes(self, report: StepReport) -> list[str]:
        """Return the transcripts that travelled with the samples."""
        return episode_texts(report.results)

    async def live(self) -> dict[str, dict[str, float]]:
        """What the display shows between steps: {section: {figure: value}}, with ``failures_total`` and
        ``retries_total`` since the start of this process."""
        sections: dict[str, dict[str, float]] = {}
        for name, value in self._totals.items():
            section, _, kind = name.partition("/")
            sections.setdefault(f"{section}_total", {})[kind] = value
        for name, value in (self._admission() | await self._live_figures.read()).items():
            section, _, figure = name.partition("/")
            sections.setdefault(section, {})[figure] = value
        return sections

    def _admission(self) -> dict[str, float]:
        return {f"admission/{name}": float(value) for name, value in self.control.counters().items()}

    # ---- end

    async def close(self) -> None:
        """Whatever state it is in."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._held_out.close()
        await self._weights.close()
        await self._service.close()
        await asyncio.to_thread(self._ledger.close)

    def end(self) -> None:
        """The run has come to its end."""
        self._ledger.append(End())

    def _discard(self, ids: Sequence[str]) -> None:
        self._spawn(self._receivers.clear(self.control.holders.by_worker(ids)))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.control.fail(error)
