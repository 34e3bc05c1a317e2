"""Master process of a run: waits for the workers, then runs the step loop.

    python -m workers.master_worker --run-dir DIR --run-id ID

Its standard output is the event stream of ``realhf.monitor.events``; the first event is its
endpoint.

The step loop: train step, publish, report, checkpoint, evaluate.
  produces: a new policy version, metrics and checkpoints;
  waits for: the samples of the step and its calls, the loads of the previous version, and before a
    checkpoint that coincides with the next evaluation for the evaluation that is still running;
  unblocked by: the workers; a stop request ends all of these waits, except that a step whose
    training has begun is finished.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import re
import signal
import sys
import time
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import realhf
from realhf.api.calls import (
    COMMITTED,
    EVALUATE,
    EXPORT,
    KEEP_EXPORT,
    PROGRESS,
    EvaluateRequest,
    ExportRequest,
    KeepExportRequest,
    Nothing,
)
from realhf.api.config import RecoverMode
from realhf.api.evaluation import Report
from realhf.api.experiment import EvaluationSpec, InterfaceType, RolloutSpec, RunPlan
from realhf.api.graph import build_graph
from realhf.api.source import DataSource
from realhf.base.event_loops import new_event_loop
from realhf.base.files import convert_run_folder_errors
from realhf.base.host_resources import HostLoadMetrics
from realhf.base.messages import Call
from realhf.base.plugin import load_plugin
from realhf.base.process import collect_garbage_normally
from realhf.dataflow.best_policy import BestPolicy, best_policy_metrics
from realhf.dataflow.buffer import EndOfData
from realhf.dataflow.checkpoint import Checkpoint, CheckpointStore
from realhf.dataflow.function_executor import FunctionExecutor
from realhf.dataflow.model_function_call import StepReport
from realhf.dataflow.rollouts.async_rollouts import AsyncRollouts, RolloutPlan
from realhf.dataflow.step_source import StepSource, SynchronousSteps
from realhf.dataflow.worker_group import A, Q, Roles, ask
from realhf.monitor.events import EventStream
from realhf.monitor.metrics import choose_calls, public_names
from realhf.monitor.provenance import describe_changes, record_launch
from realhf.monitor.run_files import write_graph_files
from realhf.monitor.run_log import RunLog, flatten_step
from realhf.monitor.trace import open_trace
from realhf.registry import sources
from realhf.scheduler.process import run_guarded
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.roster import WorkerInfo
from realhf.transport.rpc_master import RpcMaster
from realhf.transport.sockets import raise_descriptor_limit
from realhf.view.report import write_report
from workers.worker_main import add_key_file, read_keys

ACTIVITY_INTERVAL_S = 0.3
"""Interval in seconds at which events tell the display which calls run."""
PROGRESS_INTERVAL_S = 5.0
"""Interval in seconds at which events tell the display how many episodes of a call are finished."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


class RunStopped(Exception):
    """Raised when the run was stopped on request, after a checkpoint of its last finished step."""


class StepAbandoned(Exception):
    """Raised when a step was abandoned before its training began. The weights are unchanged."""


class MasterWorker:
    """Master of one run. It registers the workers, runs all steps and reports the summary."""

    def __init__(
        self, plan: RunPlan, run_id: str, events: EventStream, network: Network = LOOPBACK
    ) -> None:
        self._network = network
        self._plan = plan
        self._spec = plan.spec
        self._run_id = run_id
        self._events = events
        self._graph = build_graph(
            plan.spec.mfcs, plan.spec.source.keys, plan.spec.log_keys, roles=plan.spec.models.keys()
        )
        self._rpc = RpcMaster(
            run_id,
            network=network,
            heartbeat_s=plan.rpc.heartbeat_s,
            dead_after_s=plan.rpc.dead_after_s,
            on_death=lambda name, reason: self._on_worker_gone(name, reason, left=False),
            on_join=self._on_worker_joined,
            on_left=lambda name, reason: self._on_worker_gone(name, reason, left=True),
        )
        self._checkpoints = CheckpointStore.for_run(self._spec.run_dir, keep=plan.exp_ctrl.keep)
        # Workers that the launcher restarts when they die. The master keeps waiting for these.
        self._replaceable = (
            {"env/0", *plan.spec.rollout.workers} if plan.spec.rollout else set[str]()
        )
        self._train_calls = [
            mfc.name for mfc in self._spec.mfcs if mfc.interface_type is InterfaceType.TRAIN_STEP
        ]
        generate_calls = [
            mfc.name for mfc in self._spec.mfcs if mfc.interface_type is InterfaceType.GENERATE
        ]
        self._named_calls = choose_calls(self._train_calls, generate_calls)
        self._roles = Roles(
            plan.spec, self._rpc, timeout_s=plan.rpc.call_timeout_s, trusted=plan.network.trusted
        )
        self._host_load = HostLoadMetrics()
        self._earlier_wall_s = 0.0
        """Wall-clock seconds that the run took before this process was started."""
        self._saved_step = 0
        """Number of completed steps in the last checkpoint."""
        self._step_source: StepSource | None = None
        """The step source, or None before it is opened. When it is opened, it is notified of the
        workers that have joined before."""
        self._processes: dict[str, tuple[int, int]] = {}
        """(pid, start time) of each worker's process, by name."""
        self._best = (
            BestPolicy(self._spec.run_dir)
            if plan.exp_ctrl.keep_best and self._spec.evaluation
            else None
        )
        self._recording: asyncio.Task[None] | None = None
        """Task that records the last evaluation played in parallel with training."""
        self._stop = asyncio.Event()
        self._training = False

    def request_stop(self) -> None:
        """Request the end of the run: it saves a checkpoint of the last finished step and ends as
        soon as the running calls allow it.

        Must be called in the event loop. If there is nothing to save, ``stopped`` is reported
        immediately.
        """
        self._stop.set()
        if not self._training or self._executor.next_step <= self._saved_step:
            self._report_stopped()

    async def run(self) -> None:
        """Run the experiment to its end. Raises any error that ends it early; a requested stop is
        not an error."""
        await self._rpc.start()
        self._events.emit("endpoint", address=self._rpc.endpoint, run_id=self._run_id)
        try:
            await self._run()
        except RunStopped:
            _log.info("the run was stopped")
        finally:
            await self._rpc.close()

    async def _run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            tracer = stack.enter_context(open_trace(self._spec.run_dir, "master"))
            stack.enter_context(convert_run_folder_errors(self._spec.run_dir))
            # This comes first, so that a run that cannot resume changes nothing.
            checkpoint = await self._find_checkpoint()
            await self._wait_for_workers()
            self._steps = await self._open_steps(checkpoint)
            stack.push_async_callback(self._steps.close)
            self._executor = self._make_executor()
            if checkpoint is not None:
                await self._restore(checkpoint)
            completed = checkpoint.step if checkpoint else 0
            await self._record_launch(completed)
            self._log = RunLog(
                self._spec.run_dir,
                self._plan.monitor,
                self._events,
                tracer=tracer,
                completed_steps=completed,
                total_steps=self._spec.total_train_steps,
                evaluation=self._spec.evaluation,
            )
            stack.push_async_exit(self._log.close_async)
            await self._train(stack)
            await self._finish()

    # ---- start

    async def _record_launch(self, completed: int) -> None:
        """Record the launch in the run folder, and report the step from which changed options
        apply.

        The master does this because the launcher cannot know the step: the newest checkpoint may
        prove to be damaged.
        """
        launch = self._plan.launch
        is_new = await asyncio.to_thread(
            record_launch, self._spec.run_dir, launch, completed, self._warn
        )
        if is_new and launch.changed:
            self._warn(
                f"from step {completed + 1} on the run has other options: "
                f"{describe_changes(launch.changed)}"
            )

    def _warn(self, text: str) -> None:
        self._events.emit("warning", text=text)

    async def _wait_for_workers(self) -> None:
        services = [service.name for service in self._spec.services]
        names = [*self._roles.workers, *(["env/0"] if self._spec.needs_env else []), *services]
        if self._spec.rollout is not None:
            names += self._spec.rollout.workers
        self._events.emit("phase", text=f"waiting for {', '.join(names)}")
        await asyncio.to_thread(write_graph_files, self._graph, self._spec.run_dir)
        for warning in self._graph.warnings:
            self._events.emit("warning", text=warning)
        timeout = self._plan.rpc.connect_timeout_s
        await self._rpc.wait_for(self._roles.workers, timeout)
        self._events.emit("phase", text="loading models")
        await self._roles.load()
        await self._rpc.wait_for(names, timeout)

    def _make_executor(self) -> FunctionExecutor:
        return FunctionExecutor(
            self._graph,
            self._rpc,
            self._steps.results,
            make_loader=self._steps.loader,
            workers=self._roles.by_role(),
            parallel=self._roles.parallel,
            numbers=self._roles.numbers,
            seed=self._spec.seed,
            endpoints=self._endpoints(),
            control_timeout_s=self._plan.rpc.control_timeout_s,
        )

    def _endpoints(self) -> dict[str, list[str]]:
        """Return the addresses of the registered services by kind."""
        addresses: dict[str, list[str]] = {}
        for _, info in sorted(self._rpc.roster.items()):
            for kind, address in info.endpoints.items():
                addresses.setdefault(kind, []).append(address)
        return addresses

    async def _find_checkpoint(self) -> Checkpoint | None:
        """Return the last valid checkpoint, or None if there is none or recovery is disabled. Emit
        a warning event for each problem found.

        Raises CheckpointError if a checkpoint cannot be used, and RuntimeError if
        ``recover_mode=resume`` finds none.
        """
        checkpoint = None
        if self._plan.recover_mode is not RecoverMode.disabled:
            checkpoint = await asyncio.to_thread(self._checkpoints.latest)
        if checkpoint is None and self._plan.recover_mode is RecoverMode.resume:
            raise RuntimeError(
                f"recover_mode=resume: no valid checkpoint in {self._checkpoints.folder}"
            )
        for warning in checkpoint.warnings if checkpoint else ():
            self._warn(warning)
        self._saved_step = checkpoint.step if checkpoint else 0
        return checkpoint

    async def _open_steps(self, checkpoint: Checkpoint | None) -> StepSource:
        """Open and return the step source, and notify it of the workers that have already
        joined."""
        source = sources.get(self._spec.source.name)(seed=self._spec.seed, **self._spec.source.args)
        if self._spec.rollout is not None:
            steps: StepSource = await self._open_rollouts(self._spec.rollout, source, checkpoint)
        else:
            steps = SynchronousSteps(
                source,
                self._rpc,
                worker=f"model_worker/{self._spec.source.worker}",
                keys=self._graph.required_dataset_keys(),
                n_seqs=self._graph.n_seqs,
                timeout_s=self._plan.rpc.control_timeout_s,
            )
        self._step_source = steps
        for info in list(self._rpc.roster.values()):
            steps.worker_joined(info)
        return steps

    async def _open_rollouts(
        self, rollout: RolloutSpec, source: DataSource, checkpoint: Checkpoint | None
    ) -> AsyncRollouts:
        plan = RolloutPlan(
            spec=rollout,
            trainers=self._roles.workers_of(rollout.role),
            batch_size=self._graph.n_seqs,
            total_steps=self._spec.total_train_steps,
            completed_steps=checkpoint.step if checkpoint else 0,
            folder=self._spec.run_dir / "journal",
            run_id=self._run_id,
            timeout_s=self._plan.rpc.control_timeout_s,
            load_timeout_s=self._plan.rpc.call_timeout_s,
            archive=rollout.options.keep_journal,
            needs_env=self._spec.needs_env,
            network=self._network,
            checkpoint=checkpoint.folder if checkpoint else None,
        )
        return await AsyncRollouts.open(plan, self._rpc, source, self._warn)

    def _on_worker_joined(self, info: WorkerInfo) -> None:
        self._processes[info.name] = info.pid, info.started
        self._events.emit("joined", name=info.name)
        if self._step_source is not None:
            self._step_source.worker_joined(info)

    def _on_worker_gone(self, name: str, reason: str, *, left: bool) -> None:
        """Handle a worker that is silent, was dismissed or has left (``left``). The launcher ends
        its process and starts another one."""
        pid, started = self._processes[name]
        self._events.emit("lost", name=name, pid=pid, started=started, reason=reason, left=left)
        if name in self._replaceable:
            self._rpc.expect(name)
        if self._step_source is not None:
            self._step_source.worker_left(name, reason)

    # ---- steps

    async def _train(self, stack: contextlib.AsyncExitStack) -> None:
        done = self._executor.next_step
        total = self._spec.total_train_steps
        if done > 0:
            text = (
                f"resumed after step {done}"
                if done < total
                else f"nothing to train: {done} of {total} steps are done"
            )
            self._log.announce(text)
        if done >= total and not self._evaluation_is_due(done, last=True):
            return
        if self._spec.rollout is not None:
            await self._roles.gather_weights(self._spec.rollout.role)
        await self._steps.start()
        await self._evaluate(done)
        if done < total:
            self._log.announce("training")
            await stack.enter_async_context(self._executor)
            watcher = asyncio.create_task(self._show_activity())
            stack.callback(watcher.cancel)
            self._training = True
            await self._train_steps(done, total)
            self._training = False
            if self._stop.is_set():  # requested while the last checkpoint was written
                await self._save_and_stop(self._executor.next_step)
        await self._wait_for_evaluation()
        await self._evaluate(self._executor.next_step, last=True)
        await self._wait_for_evaluation()
        await self._steps.drain()

    async def _train_steps(self, done: int, total: int) -> None:
        checkpoint_due = False
        # Start the measurement here, so that load before the first step is not counted.
        self._host_load.measure(self._rpc.loads())
        for step in range(done, total):
            try:
                report = await self._execute(step)
            except EndOfData as end:
                await self._finish_early(step, end)
                break
            except StepAbandoned:
                await self._save_and_stop(step)
            if self._spec.rollout is not None:
                await self._roles.gather_weights(self._spec.rollout.role)
            await self._wait_unless_stopped(self._steps.publish(step + 1))
            await self._report(report)
            checkpoint_due = checkpoint_due or (step + 1) % self._plan.exp_ctrl.ckpt_freq_steps == 0
            # A checkpoint waits for the running evaluation, because a resumed run does not repeat
            # evaluations of earlier steps. If evaluations last so long that one always runs, a
            # checkpoint is only possible between the end of one and the start of the next.
            if step + 1 == total or (checkpoint_due and self._evaluation_is_due(step + 1)):
                await self._wait_unless_stopped(self._wait_for_evaluation())
            if self._stop.is_set():
                await self._save_and_stop(step + 1)
            if step + 1 == total or (checkpoint_due and not self._is_evaluating()):
                await self._save_checkpoint(step + 1)
                checkpoint_due = False
            if step + 1 < total:
                await self._wait_unless_stopped(self._evaluate(step + 1))

    async def _execute(self, step: int) -> StepReport:
        """Run one train step and return its report.

        After a stop request, a step whose training has begun is still finished. Otherwise the step
        is abandoned and StepAbandoned raised.
        """
        if self._stop.is_set():
            raise StepAbandoned
        running = asyncio.create_task(self._executor.execute_step(step))
        try:
            await self._wait_unless_stopped(running)
            if running.done():
                return running.result()
            if self._executor.has_begun_training(step):
                self._log.announce(
                    f"stopping: step {step + 1} is being trained; its checkpoint follows"
                )
                return await running
            calls = [
                f"{name} {state}"
                for name, state in self._executor.activity().items()
                if state.startswith("runs")
            ]
            if calls:
                self._log.announce(
                    f"stopping as soon as the running calls have ended: {', '.join(calls)}"
                )
            await self._executor.settle()
        finally:
            running.cancel()
        await asyncio.wait([running])
        if running.cancelled():
            raise StepAbandoned
        return running.result()

    async def _wait_unless_stopped(self, work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> None:
        """Wait until ``work`` has finished or a stop is requested. On a request, ``work`` is
        cancelled if it is a coroutine; a task keeps running.

        Raises the error of ``work``.
        """
        task = work if isinstance(work, asyncio.Task) else asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            stop.cancel()
            if task is not work:
                task.cancel()

    async def _save_and_stop(self, completed: int) -> NoReturn:
        """Save a checkpoint of ``completed`` steps unless it already exists, then raise
        RunStopped."""
        if completed > self._saved_step:
            if self._is_evaluating():
                self._events.emit(
                    "warning", text="the running held-out evaluation is cancelled and not repeated"
                )
            self._log.announce(f"stopping: saving a checkpoint of step {completed}")
            await self._save_checkpoint(completed)
        self._report_stopped()
        raise RunStopped

    def _report_stopped(self) -> None:
        step = self._saved_step
        saved = (
            f"a checkpoint of step {step} is saved"
            if step
            else "no step was finished, so nothing new is saved"
        )
        self._events.emit("stopped", text=saved)

    async def _finish_early(self, completed: int, end: EndOfData) -> None:
        """Complete the run after ``completed`` steps because the data is exhausted. Raises
        RuntimeError if there was no data for any step."""
        if completed == 0:
            raise RuntimeError(f"there is nothing to train on: {end}")
        total = self._spec.total_train_steps
        self._events.emit(
            "warning",
            text=f"the data ended after step {completed}, before total_train_steps={total}",
        )
        # As before every checkpoint, wait for the evaluation, which a resumed run would not repeat.
        await self._wait_unless_stopped(self._wait_for_evaluation())
        if self._saved_step < completed:
            await self._save_checkpoint(completed)

    async def _report(self, report: StepReport) -> None:
        step = report.step + 1
        tokens: dict[str, int] = {}
        for call in report.calls:
            tokens[call.mfc] = tokens.get(call.mfc, 0) + call.n_tokens
        metrics = flatten_step(
            wall_s=report.wall_s,
            stats=report.stats,
            times=report.times,
            tokens=tokens,
            buffer=report.buffer,
            source=report.source,
            train_calls=self._train_calls,
        )
        episodes = [text for stats in report.stats.values() for text in stats.get("episodes", [])]
        metrics |= await self._steps.step_metrics(report)
        episodes += self._steps.list_transcripts(report)
        on_gpu = any("device_reserved_bytes" in stats for stats in report.stats.values())
        if gpu_count := count_gpus(self._plan, on_gpu=on_gpu):
            metrics["tokens_per_second_per_gpu"] = metrics["tokens_per_second"] / gpu_count
        metrics |= self._host_load.measure(self._rpc.loads())
        self._log.record_step(step, public_names(metrics, **self._named_calls), episodes)
        for call in report.calls:
            if call.stats.get("skipped"):
                self._log.record_skipped(step, call.mfc, call.ids, call.stats)
            if "stop" in call.stats:
                raise RuntimeError(f"{call.mfc} ended the run at step {step}: {call.stats['stop']}")

    async def _show_activity(self) -> None:
        """Emit an event for the display whenever the running calls change. Runs until it is
        cancelled."""
        last_shown: dict[str, Any] = {}
        while True:
            if sections := await self._steps.collect_live_metrics():
                self._events.emit("rollouts", **sections)
            running = [
                name
                for name, state in self._executor.activity().items()
                if state.startswith("runs")
            ]
            resident = len(self._executor.buffer)
            capacity = self._executor.buffer.max_size
            now = {"calls": running, "resident": resident, "capacity": capacity}
            if now != last_shown:
                self._events.emit("activity", **now)
                last_shown = now
            await asyncio.sleep(ACTIVITY_INTERVAL_S)

    async def _show_progress(self, call: str, worker: str) -> None:
        """Emit the number of finished episodes of a call at intervals. Runs until it is
        cancelled."""
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            progress = await self._ask(worker, PROGRESS, Nothing())
            if progress.wanted:
                self._events.emit("progress", call=call, over=progress.over, wanted=progress.wanted)

    def _evaluation_is_due(self, step: int, *, last: bool = False) -> bool:
        """Return whether an evaluation is due after ``step`` steps. ``last``: whether the run ends
        with this step."""
        evaluation = self._spec.evaluation
        if evaluation is None or self._log.evaluations.report_at(step) is not None:
            return False
        return (
            last or step == 0 or (evaluation.every_steps > 0 and step % evaluation.every_steps == 0)
        )

    async def _evaluate(self, step: int, *, last: bool = False) -> None:
        evaluation = self._spec.evaluation
        if evaluation is None or not self._evaluation_is_due(step, last=last):
            return
        if not last and evaluation.interim_args is not None:
            evaluation = replace(evaluation, args=evaluation.interim_args)
        when = "before training" if step == 0 else f"after step {step}"
        if self._best is not None and self._spec.rollout is not None:
            # Export the policy first: training changes the weights while the evaluation is played.
            await self._wait_for_evaluation()
            await self._export_to(evaluation.role, self._best.candidate)
        if await self._steps.evaluate(
            step, evaluation, lambda report: self._start_recording(step, evaluation, report)
        ):
            self._log.announce(
                f"held-out evaluation {when}" + ("" if last else ", in parallel with training")
            )
            return
        self._log.announce(f"held-out evaluation {when}")
        await self._record_evaluation(
            step, evaluation, await self._run_evaluation(evaluation, step)
        )

    def _start_recording(self, step: int, evaluation: EvaluationSpec, report: Report) -> None:
        """Start a task that records the report of an evaluation played in parallel with training.

        Raises the error of the previous recording.
        """
        if self._recording is not None and self._recording.done():
            self._recording.result()
        self._recording = asyncio.create_task(self._record_evaluation(step, evaluation, report))

    async def _record_evaluation(
        self, step: int, evaluation: EvaluationSpec, report: Report
    ) -> None:
        """Keep the evaluated policy if it is the best so far, then record the evaluation.

        The order matters: a resumed run does not repeat a recorded evaluation, so the policy must
        have been kept before.
        """
        if not report:
            return
        if self._best is not None:
            await self._keep_if_best(self._best, step, evaluation, report)
            await asyncio.to_thread(self._best.discard_candidate)
        self._log.record_evaluation(step, report)

    async def _keep_if_best(
        self, best: BestPolicy, step: int, evaluation: EvaluationSpec, report: Report
    ) -> None:
        metrics = best_policy_metrics(step, report)
        if metrics is None or not best.is_beaten_by(metrics):
            return
        if self._spec.rollout is None:
            await self._export_to(evaluation.role, best.candidate)
        elif metrics["version"] != step:
            version = metrics["version"]
            text = (
                f"the policy of step {step} is not kept as the best: weights of version {version} "
                f"were evaluated"
            )
            self._events.emit("warning", text=text)
            return
        worker = self._roles.workers_of(evaluation.role)[0]
        request = KeepExportRequest(
            str(best.candidate), str(best.folder), json.dumps(metrics, indent=1)
        )
        await self._ask(worker, KEEP_EXPORT, request)
        await asyncio.to_thread(best.record, metrics)
        self._log.announce(
            f"best held-out success so far: {metrics['success']:.1%}; the policy is kept in "
            f"{best.folder.name}"
        )

    async def _wait_for_evaluation(self) -> None:
        """Wait until the evaluation in parallel with training has finished and is recorded."""
        await self._steps.wait_for_evaluation()
        if self._recording is not None:
            # If this coroutine is cancelled, ``wait`` does not cancel the task, as awaiting it
            # would.
            await asyncio.wait([self._recording])
            self._recording.result()
            self._recording = None

    def _is_evaluating(self) -> bool:
        """Return whether an evaluation in parallel with training is being played or recorded."""
        return self._steps.is_evaluating or (
            self._recording is not None and not self._recording.done()
        )

    async def _run_evaluation(self, evaluation: EvaluationSpec, step: int) -> dict[str, Any]:
        """Run an evaluation on the trainer and return its report, with those of further evaluations
        (``EvaluationSpec.also``).

        Every evaluation uses the run's seed, so that policies are compared on the same instances.
        """
        report: dict[str, Any] = {}
        for part in (evaluation, *evaluation.also):
            report |= await self._run_one_evaluation(part, step)
        return report

    async def _run_one_evaluation(self, evaluation: EvaluationSpec, step: int) -> dict[str, Any]:
        if self._spec.needs_env and self._replaceable:
            await self._rpc.wait_for(["env/0"], self._plan.rpc.connect_timeout_s)
        worker = self._roles.workers_of(evaluation.role)[0]
        await self._roles.gather_weights(evaluation.role)
        request = EvaluateRequest(
            role=evaluation.role,
            interface=evaluation.interface,
            interface_args=dict(evaluation.interface_args),
            args=dict(evaluation.args),
            step=step,
            seed=self._spec.seed,
            endpoints=self._endpoints(),
        )
        watcher = asyncio.create_task(self._show_progress("held-out evaluation", worker))
        try:
            return (await self._ask(worker, EVALUATE, request, step=step)).stats
        finally:
            watcher.cancel()
            # The progress is only for the display, so its errors are ignored.
            await asyncio.gather(watcher, return_exceptions=True)

    # ---- saving

    async def _ask(self, worker: str, call: Call[Q, A], request: Q, *, step: int = -1) -> A:
        return await ask(
            self._rpc, worker, call, request, timeout_s=self._plan.rpc.call_timeout_s, step=step
        )

    async def _save_checkpoint(self, step: int) -> None:
        await self._steps.prepare_checkpoint()
        state = {
            "executor": self._executor.state_dict(),
            "wall_seconds": self._wall_seconds(),
            "model_paths": self._model_paths(),
            "options": dict(self._plan.launch.options),
        }
        draft = await asyncio.to_thread(self._checkpoints.begin, step)
        try:
            files = await self._roles.save(draft)
            await self._steps.save(step, draft)
        except Exception as error:
            raise self._checkpoints.abandon(step, draft, error) from error
        folder = await asyncio.to_thread(self._checkpoints.commit, step, draft, state, files)
        self._saved_step = step
        await asyncio.gather(
            *(self._ask(worker, COMMITTED, Nothing()) for worker in self._roles.workers)
        )
        await self._steps.checkpoint_committed(step, folder.name)

    async def _restore(self, checkpoint: Checkpoint) -> None:
        self._events.emit("phase", text=f"restoring the checkpoint of step {checkpoint.step}")
        trained = {
            mfc.model_role
            for mfc in self._spec.mfcs
            if mfc.interface_type is InterfaceType.TRAIN_STEP
        }
        fully_trained = {
            role
            for role in trained
            if (model := self._spec.models.get(role)) and model.lora is None
        }
        check_same_models(
            checkpoint.state["model_paths"], self._model_paths(), restored=fully_trained
        )
        await self._roles.restore(checkpoint.folder)
        self._executor.load_state_dict(checkpoint.state["executor"])
        self._earlier_wall_s = float(checkpoint.state["wall_seconds"])

    def _model_paths(self) -> dict[str, str]:
        return {role: model.path for role, model in self._spec.models.items()}

    async def _export(self) -> None:
        """Export the policy in Hugging Face format: to ``policy`` in the run folder, or to the
        run's artifact."""
        role = self._spec.export_role
        if role is None:
            return
        await self._export_to(role, self._spec.artifact or self._spec.run_dir / "policy")

    async def _export_to(self, role: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        await self._roles.gather_weights(role)
        await self._ask(self._roles.workers_of(role)[0], EXPORT, ExportRequest(role, str(target)))

    async def _finish(self) -> None:
        self._log.announce("exporting the policy")
        await self._export()
        self._steps.record_end()
        summary = await asyncio.to_thread(
            self._log.finish,
            wall_seconds=self._wall_seconds(),
            train_calls=self._train_calls,
            best=self._best and self._best.metrics,
        )
        try:
            await asyncio.to_thread(write_report, self._spec.run_dir)
        except OSError as error:  # the run is saved, so a full disk must not make it fail
            self._events.emit("warning", text=f"no report: {error}")
        self._events.emit("done", summary=summary)

    def _wall_seconds(self) -> float:
        return self._earlier_wall_s + time.time() - self._plan.started_at


def count_gpus(plan: RunPlan, *, on_gpu: bool) -> int:
    """Return the number of GPUs on which the workers of a run compute; 0 if there are none, or if
    other hosts assign them. ``on_gpu``: whether its trainers compute on GPUs."""
    spec = plan.spec
    assigned = {gpu for gpus in plan.gpus.values() for gpu in gpus}
    if not assigned:
        # All workers share the first GPU, and a tensor-parallel server has the next ones, too.
        largest = max(
            (model.engine.tensor_parallel_size for model in spec.models.values()), default=1
        )
        return largest if on_gpu and not plan.network.bind else 0
    workers = [f"model_worker/{index}" for index in range(spec.n_model_workers)]
    workers += spec.rollout.workers if spec.rollout is not None else []
    computing = [name for name in workers if not name.startswith("rollout_worker/")]
    return len(assigned) if all(name in plan.gpus for name in computing) else 0


def check_same_models(
    saved: Mapping[str, str], current: Mapping[str, str], restored: Collection[str] = frozenset()
) -> None:
    """Raise RuntimeError if a role's initial weights come from a different folder than they did
    when the checkpoint was saved.

    A checkpoint does not contain frozen weights, which must therefore be the same as before.
    ``saved`` and ``current`` map roles to paths; different paths may name the same folder. Roles in
    ``restored`` are not checked, because the checkpoint contains all their weights.
    """
    for role in sorted(
        {*saved, *current} - {role for role in restored if role in saved and role in current}
    ):
        if not _same_weights(saved.get(role), current.get(role)):
            raise RuntimeError(
                f"the checkpoint was made with {role} from {saved.get(role)}, this run has it from "
                f"{current.get(role)}; restore that folder, or start over with "
                f"recover_mode=disabled"
            )


def _same_weights(saved: str | None, current: str | None) -> bool:
    if saved is None or current is None:
        return saved == current
    # The folder name of a warm-started policy contains a digest of its inputs, so its location does
    # not matter.
    if (
        re.fullmatch(r"policy-[0-9a-f]{16}", name := Path(saved).name)
        and name == Path(current).name
    ):
        return True
    with contextlib.suppress(OSError):
        return Path(saved).samefile(current)
    return saved == current


def main() -> int:
    """Run the master of a plan to its end. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with plan.json")
    parser.add_argument("--run-id", required=True)
    add_key_file(parser)
    args = parser.parse_args()
    events = EventStream.on_stdout()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )

    def work() -> None:
        plan = RunPlan.read(args.run_dir)
        for plugin in plan.plugins:
            load_plugin(plugin)
        collect_garbage_normally()
        raise_descriptor_limit()
        network = Network.for_master(plan.network, read_keys(args.key_file))
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            master = MasterWorker(plan, args.run_id, events, network)
            runner.get_loop().add_signal_handler(signal.SIGINT, master.request_stop)
            runner.run(master.run())

    return run_guarded(work, args.run_dir)


if __name__ == "__main__":
    sys.exit(main())
