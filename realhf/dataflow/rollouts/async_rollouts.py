"""Asynchronous rollouts as seen by the master: start-up, recovery, weight versions, evaluation,
metrics and shutdown."""

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
from realhf.dataflow.rollouts.control import (
    RolloutControl,
    RolloutRules,
    RolloutService,
    RolloutsFailed,
)
from realhf.dataflow.rollouts.group_loads import GROUP_MEDIUM, GroupLoads
from realhf.dataflow.rollouts.held_out import Deliver, HeldOutEvaluations
from realhf.dataflow.rollouts.metrics import GenerationMetrics, episode_texts, rollout_metrics
from realhf.dataflow.rollouts.rollout_state import EvaluationQueue, SampleLocations
from realhf.dataflow.rollouts.sample_queue import QueuedTask, SampleQueue
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
    """Settings of a run's asynchronous rollouts, including the state that they start from."""

    spec: RolloutSpec
    """The experiment's rollout specification."""
    trainers: Sequence[str]
    """Names of the model workers that train the role and store its samples, in the order of
    ranks."""
    batch_size: int
    """Number of samples per training step."""
    total_steps: int
    """Total number of training steps of the run."""
    completed_steps: int
    """Number of training steps after which the run resumes; 0 for a new run."""
    folder: Path
    """Folder of the journal."""
    run_id: str
    """Id of the run, which every peer must present."""
    timeout_s: float
    """Timeout of a control call, in seconds."""
    load_timeout_s: float
    """Timeout of a call that loads weights or samples, in seconds."""
    archive: bool = False
    """Whether old segments of the journal are kept."""
    needs_env: bool = True
    """Whether episodes are played on an environment service."""
    network: Network = LOOPBACK
    """Network that the master listens on."""
    checkpoint: Path | None = None
    """Folder of the checkpoint that the run resumes from."""

    @property
    def trainer(self) -> str:
        """The first trainer, which publishes the weights."""
        return self.trainers[0]

    @property
    def group_size(self) -> int:
        """Number of episodes per sample."""
        return self.spec.episodes.group_size

    @property
    def max_concurrent(self) -> int:
        """Maximum number of samples that are admitted and not yet accepted: being played, or in
        transfer to the trainer."""
        return self.spec.options.max_concurrent_rollouts or self.players + self.credits

    @property
    def players(self) -> int:
        """Number of samples that all rollout workers together can play at once."""
        return self.spec.options.n_rollout_workers * max(1, self.spec.sessions // self.group_size)

    @property
    def credits(self) -> int:
        """Maximum number of one rollout worker's finished samples that may be in transfer to the
        trainer."""
        return max(8, 2 * self.batch_size)

    @property
    def drops_stale(self) -> bool:
        """Whether stale samples are dropped. Otherwise a step waits for stragglers before they
        become stale."""
        return self.spec.options.staleness_policy == "drop"

    def build_rules(self) -> RolloutRules:
        """Return the limits for samples and for the run."""
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

    def build_staleness(self) -> StalenessManager:
        """Return the admission counters as they are after ``completed_steps``."""
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
# Kinds of workers, as in the names "rollout_worker/0", "generation/0" and "model_worker/0".
ROLLOUT = "rollout_worker"
GENERATION = "generation"
TRAINER = "model_worker"
JOURNAL_FILE = "journal.snapshot"
"""File, within a checkpoint, with the journal's state at the checkpoint's step."""
STOP_TIMEOUT_S = 120.0
"""Seconds beyond the rollout deadline that workers get to stop at the end of the run."""
WATCH_S = 2.0
"""Seconds between checks for expired leases and failed receivers."""
SHARE_DEADLINE_FACTOR = 4
"""Deadline of an evaluation share as a multiple of the rollout deadline, because a player plays
several of its episodes in sequence."""


class AsyncRollouts(StepSource):
    """Step source of an asynchronous run. Create it with ``open``, before the executor.

    The components are created in the order of their dependencies: the shared state (sample
    locations, evaluation queue) first, then the control, then weight updates and held-out
    evaluations, which call the control.
    """

    def __init__(
        self,
        plan: RolloutPlan,
        caller: RpcMaster,
        source: DataSource,
        ledger: RolloutLedger,
        warn: Callable[[str], None] = _log.warning,
    ) -> None:
        options = plan.spec.options
        self._plan = plan
        self._caller = caller
        self._ledger = ledger
        self._warn = warn
        self._rollout_workers: dict[str, str] = {}
        """Incarnation (name and pid) of each registered rollout worker, by worker name."""
        self._env: dict[str, str] = {}
        """URL of each environment service, by name of the worker that runs it."""
        self._playing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._queue = SampleQueue(source, plan.batch_size)
        self._staleness = plan.build_staleness()
        self._record = WeightRecord(plan.folder.parent, warn, completed_steps=plan.completed_steps)
        self._receivers = Receivers(caller, plan.trainers, plan.timeout_s)
        self._streams: list[str] = []
        """Endpoints of the receivers."""
        self._locations = SampleLocations()
        evaluations = EvaluationQueue(plan.players // 2)
        self.control = RolloutControl(
            self._queue,
            ledger,
            self._staleness,
            StragglerGate(
                plan.batch_size, options.max_head_offpolicyness, wait=not plan.drops_stale
            ),
            plan.build_rules(),
            discard=self._discard,
            warn=warn,
            locations=self._locations,
            evaluations=evaluations,
        )
        self._weights = WeightUpdates(
            caller,
            plan.trainer,
            plan.spec.role,
            on_version=self.control.set_version,
            on_failed=self._on_load_failed,
            on_wrong=self.control.fail,
            record=self._record,
            timeout_s=plan.load_timeout_s,
            groups=GroupLoads(caller, plan.trainer, timeout_s=plan.timeout_s)
            if options.weights == GROUP_MEDIUM
            else None,
        )
        self._held_out = HeldOutEvaluations(
            caller,
            self._weights,
            evaluations,
            players=plan.players,
            deadline_s=SHARE_DEADLINE_FACTOR * options.rollout_deadline_s,
            timeout_s=plan.load_timeout_s,
            wake=self.control.wake,
            warn=warn,
            fail=self.control.fail,
        )
        self._service = RolloutService(self.control, plan.run_id, plan.network)
        # Rates are measured since the previous read, so each reader with a pace of its own needs an
        # instance.
        self._step_metrics = GenerationMetrics(caller, self._weights, plan.timeout_s)
        self._live_metrics = GenerationMetrics(caller, self._weights, plan.timeout_s)
        self._totals: defaultdict[str, float] = defaultdict(float)
        """Number of failures and retries since this process started, keyed by ``failures/<kind>``
        and ``retries/<kind>``."""

    @classmethod
    async def open(
        cls,
        plan: RolloutPlan,
        caller: RpcMaster,
        source: DataSource,
        warn: Callable[[str], None] = _log.warning,
    ) -> AsyncRollouts:
        """Open the rollouts, and resume from the journal in ``plan.folder`` if there is one.

        ``warn(text)`` is called with warnings for the user. Raises RpcError, and JournalError, also
        if the journal and the checkpoint belong to different histories.
        """
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
            await rollouts.close()  # an open socket would delay the exit of the process
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
        """Restore the state of the journal: read arrived samples from the payload logs, requeue
        those that were being played, and repeat the steps after the checkpoint with the same
        samples. Samples whose payload cannot be read are dropped."""
        items = [(admit.id, accept.attempt, accept.ref) for admit, accept in recovery.accepted]
        arrivals = await self._receivers.restore(items, self._locations, self._plan.load_timeout_s)
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
                f"{len(lost)} of the {len(arrivals)} samples that had arrived are lost, because "
                f"what was written of "
                f"them is damaged or gone (the log names each): "
                f"{', '.join(drop.id for drop in lost[:4])}"
            )
        self._staleness.restore_accepted(len(staged))
        replay = {}
        for step, ids in recovery.replay:
            if not staged.keys() >= set(ids):
                # A step without one of its samples cannot be repeated, nor can those after it.
                break
            replay[step] = ids
        admitted = [
            *(admit.id for admit, _ in recovery.accepted),
            *(admit.id for admit in recovery.requeue),
        ]
        if recovery.draw is not None:
            self._queue.load_state(recovery.draw, admitted)
        self._queue.recorded |= {sample_id for _, ids in recovery.replay for sample_id in ids}
        if lost:
            self._ledger.append(*lost, Draw(self._queue.state()))
        tasks = [
            QueuedTask(
                SourceItem(**admit.item),
                admit.attempt + 1,
                admit.failures,
                admit.order,
                admit.deaths,
            )
            for admit in recovery.requeue
        ]
        self.control.restore(tasks, staged, replay, recovery.order)
        if late := self.control.gate.count_overdue(self._plan.completed_steps):
            eta = self._plan.spec.options.max_head_offpolicyness
            fate = "dropped" if self._plan.drops_stale else "trained all the same"
            self._warn(
                f"{late} of the {len(staged)} samples that had arrived will be older than "
                f"async_rl.max_head_offpolicyness={eta} allows when their step comes; they are "
                f"{fate}"
            )
        _log.info(
            "journal: %d samples had arrived, %d were in play and are played again, %d steps are "
            "repeated",
            len(staged),
            len(tasks),
            len(replay),
        )

    @property
    def results(self) -> ResultSink:
        """The rollouts' control, which journals the trained samples and passes their results to the
        data source."""
        return self.control

    def loader(self, buffer: AsyncIOSequenceBuffer, storage: StorageMap) -> StreamLoader:
        """Return the loader that fills the executor's buffer from the stream."""
        keys = buffer.graph.required_dataset_keys()
        return StreamLoader(
            self.control,
            buffer,
            storage,
            held_by=self._locations.group_by_worker,
            keys=keys,
            busy=lambda: self.control.in_play > 0 or self._weights.busy,
        )

    # ---- workers

    def worker_joined(self, info: WorkerInfo) -> None:
        """Start to use a newly registered worker."""
        if info.kind == GENERATION:
            self._weights.worker_joined(info.name)
        elif "env" in info.endpoints:
            self._env[info.name] = info.endpoints["env"]
            for name in self._rollout_workers if self._playing else ():
                self._spawn(self._play(name))
        elif info.kind == ROLLOUT:
            self._rollout_workers[info.name] = f"{info.name}:{info.pid}"
            if self._playing:
                self._spawn(self._play(info.name))

    def worker_left(self, name: str, reason: str) -> None:
        """Requeue the samples of a worker that has died. If it was a trainer, fail the run."""
        if name.startswith(f"{GENERATION}/"):
            self._weights.worker_left(name)
        elif name in self._rollout_workers:
            self.control.worker_left(self._rollout_workers.pop(name), reason)
        elif name.startswith(f"{TRAINER}/"):
            self.control.fail(WorkerDied(name, reason))

    async def start(self) -> None:
        """Publish the weights, run the self-test of weight updates and start the rollout
        workers."""
        await self.publish(self._plan.completed_steps)
        await self._run_self_test()
        self._spawn(self._watch())
        self._playing = True
        await asyncio.gather(*(self._play(name) for name in list(self._rollout_workers)))

    async def _run_self_test(self) -> None:
        """Run the self-test of weight updates. Raises WrongWeights, or the rollouts' failure if
        that happens first."""
        test = SelfTest(
            self._caller, self._weights, timeout_s=self._plan.load_timeout_s, warn=self._warn
        )
        self._record.record_self_test(
            self._weights.published_version, await self._run_unless_failed(test.run())
        )

    async def _play(self, name: str) -> None:
        """Tell a rollout worker to start playing. This is done once per incarnation, because two
        rollout loops in one process would share sessions and cache rows. If episodes need an
        environment service, nothing is done until there is one."""
        incarnation = self._rollout_workers.get(name)
        ready = self._playing and (self._env or not self._plan.needs_env)
        if incarnation is None or incarnation in self.control.workers or not ready:
            return
        self.control.worker_joined(incarnation)
        env = [url for _, url in sorted(self._env.items())]
        try:
            request = PlayRequest(self._service.endpoint, self._streams, env)
            await ask(self._caller, name, PLAY, request, timeout_s=self._plan.timeout_s)
        except WorkerDied as error:
            _log.warning("%s", error)

    async def drain(self) -> None:
        """Stop admission, and wait until all samples being played are finished and their sessions
        closed.

        Raises RolloutsFailed when the rollout deadline plus ``STOP_TIMEOUT_S`` seconds have passed.
        """
        self._playing = False
        self.control.pause()
        try:
            async with asyncio.timeout(self._plan.spec.options.rollout_deadline_s + STOP_TIMEOUT_S):
                await self.control.wait_until_stopped()
        except TimeoutError:
            raise RolloutsFailed(
                f"{', '.join(sorted(self.control.workers))} did not stop"
            ) from None

    def _on_load_failed(self, worker: str, error: Exception) -> None:
        """Dismiss a generation worker that did not load weights. If it is the only one, fail the
        run.

        The other workers continue without it until its successor has joined.
        """
        if self._weights.versions.keys() == {worker}:
            self.control.fail(RolloutsFailed(f"{worker} did not load the weights: {error}"))
        else:
            self._warn(f"{worker} did not load the weights and is dismissed: {error}")
            self._caller.dismiss(worker, f"it did not load the weights: {error}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self.control.expire()
            await self._receivers.check()

    # ---- steps

    async def publish(self, completed_steps: int) -> None:
        """Publish new weights to the generation workers. Raises the rollouts' failure if that
        happens first."""
        await self._run_unless_failed(self._held_out.publish(completed_steps))

    async def evaluate(self, step: int, evaluation: EvaluationSpec, deliver: Deliver) -> bool:
        """Start an evaluation of the current weights on the rollout workers, in parallel with
        training.

        Returns True once the weights are pinned for it. Returns False if the evaluation uses
        another interface than the rollouts do; the trainer then has to run it. Raises the rollouts'
        failure if that happens first.
        """
        if evaluation.interface != self._plan.spec.calls[0].interface:
            return False
        when = "before training" if step == 0 else f"after step {step}"
        await self._run_unless_failed(
            self._held_out.start(when, HeldOutOptions.from_args(evaluation.args), deliver)
        )
        return True

    @property
    def is_evaluating(self) -> bool:
        """Whether an evaluation is being played."""
        return self._held_out.is_running

    async def wait_for_evaluation(self) -> None:
        """Wait until no evaluation is being played. Raises the rollouts' failure if that happens
        first."""
        await self._run_unless_failed(self._held_out.wait())

    async def _run_unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` and return its result. If the rollouts fail first, cancel it and raise
        their failure.

        ``work`` may wait for an evaluation, which would never end after a failure because no worker
        takes its shares any more.
        """
        running = asyncio.ensure_future(work)
        try:
            await self.control.wait_unless_failed(running)
        finally:
            running.cancel()
        return running.result()

    async def prepare_checkpoint(self) -> None:
        """Wait until the journal records of the checkpoint's steps are on disk."""
        await self._ledger.wait_until_durable()

    async def save(self, completed_steps: int, folder: Path) -> None:
        """Write the open samples and the source's state into a checkpoint, as a copy in case the
        journal is damaged.

        Raises OSError.
        """
        if self._weights.published_version != completed_steps:
            self._record.record_unpublished(completed_steps)
        records = self._ledger.snapshot_after(completed_steps)
        await asyncio.to_thread(write_snapshot, folder / JOURNAL_FILE, records)

    async def checkpoint_committed(self, completed_steps: int, folder: str) -> None:
        """Record that a checkpoint is valid, and delete the payloads that only earlier checkpoints
        needed."""
        self._ledger.record_checkpoint(completed_steps, folder)
        await self._ledger.wait_until_durable()
        self._locations.keep(
            lambda sample_id: self._ledger.state.accepted_attempt(sample_id) is not None
        )
        await self._receivers.prune(self._ledger)

    async def step_metrics(self, report: StepReport) -> dict[str, float]:
        """Return the metrics of a step.

        These are ``rollout/...``, ``failures/<kind>`` and ``retries/<kind>`` of the step's samples
        and of the samples without signal that were dropped for it, and all live metrics except the
        totals.
        """
        metrics = rollout_metrics([*report.results, *self.control.flat_of_step])
        if self._plan.spec.calls[0].resample:
            metrics["n_dropped_groups"] = float(len(self.control.flat_of_step))
            metrics["n_groups_without_signal"] = float(self.control.flat_trained)
        failures = {
            name: metrics.pop(name)
            for name in list(metrics)
            if name.startswith(("failures/", "retries/"))
        }
        for name, value in failures.items():
            self._totals[name] += value
        compute_s = sum(times["compute_s"] for times in report.times.values())
        tokens = metrics["tokens"]
        update_ms = [
            value for name, value in self._weights.metrics.items() if name.startswith("weight_")
        ]
        if update_ms:
            metrics["weights_seconds"] = sum(update_ms) / 1000
        return {
            **{f"rollout/{name}": value for name, value in metrics.items()},
            **failures,
            **self._admission_metrics(),
            **await self._step_metrics.read(),
            "training/occupancy": compute_s / report.wall_s,
            "tokens": tokens,
            "tokens_per_second": tokens / report.wall_s,
        }

    def list_transcripts(self, report: StepReport) -> list[str]:
        """Return the transcripts in the samples' metadata."""
        return episode_texts(report.results)

    async def collect_live_metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics that the display shows between steps: {section: {name: value}}.

        The sections ``failures_total`` and ``retries_total`` count since this process started.
        """
        sections: dict[str, dict[str, float]] = {}
        for name, value in self._totals.items():
            section, _, kind = name.partition("/")
            sections.setdefault(f"{section}_total", {})[kind] = value
        for name, value in (self._admission_metrics() | await self._live_metrics.read()).items():
            section, _, metric = name.partition("/")
            sections.setdefault(section, {})[metric] = value
        return sections

    def _admission_metrics(self) -> dict[str, float]:
        return {
            f"admission/{name}": float(value) for name, value in self.control.counters().items()
        }

    # ---- end

    async def close(self) -> None:
        """Cancel all tasks and release all resources. May be called in any state."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._held_out.close()
        await self._weights.close()
        await self._service.close()
        await asyncio.to_thread(self._ledger.close)

    def record_end(self) -> None:
        """Write to the journal that the run has ended."""
        self._ledger.append(End())

    def _discard(self, ids: Sequence[str]) -> None:
        self._spawn(self._receivers.clear(self._locations.group_by_worker(ids)))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task whose error fails the rollouts."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.control.fail(error)
