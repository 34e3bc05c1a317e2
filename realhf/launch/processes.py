"""Supervision of a run's processes: starting the workers, detecting failures, and restarting
workers or the whole run.

A worker counts as dead when its process has exited, when the master reports it lost, or when it
does not register in time. In the last two cases the launcher kills the process, so that there is
always an exit event. The worker is then restarted or dropped. If the run cannot continue without
it, the run restarts from its last checkpoint or fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from realhf.api.config import AsyncConfig, RecoverMode
from realhf.api.environment import EnvironmentService
from realhf.api.experiment import ExperimentSpec, JobSpec, RunPlan
from realhf.base import process_clock
from realhf.base.loopback import free_port, is_loopback_host
from realhf.launch.allocation import MEMORY_ADVICE
from realhf.launch.interrupts import LaunchInterrupted, StopSignals, defer_signals
from realhf.monitor.display import Display
from realhf.monitor.events import parse_event
from realhf.monitor.run_files import record_death
from realhf.scheduler.base import (
    DeferredStart,
    Notice,
    RestartRequest,
    Scheduler,
    WorkerExit,
    WorkerLine,
    WorkerSpec,
    WorkersWanted,
)
from realhf.scheduler.local import OOM_KILLED
from realhf.scheduler.process import find_failure_cause, read_log_lines
from realhf.transport.errors import LOST_MASTER
from realhf.transport.network import RunKeys, forget

STOP_GRACE_S = 4.0
"""Time in seconds between SIGTERM and SIGKILL when the run's processes are stopped."""
LEAVE_TIMEOUT_S = 15.0
"""Seconds within which the processes must exit after the master has reported the summary."""
STOPS = (
    "the run saves a checkpoint of its last finished step and ends; a second signal ends it without"
)
BEGINS_AGAIN = "the run begins again from its last checkpoint"
ON_TIME_S = 5.0
"""If a single wait took longer than this many seconds, the launcher was suspended or busy. It then
reads the master's queued messages before it enforces deadlines."""
MASTER_GRACE_S = 5.0
"""Seconds to wait for the master's exit before another process's exit is taken as the cause of a
failure. A worker that exits cleanly was dismissed by the master, which ends later and knows the
reason. A worker that lost its connection may have noticed the master's death before the launcher
did."""
TAIL_LINES = 8
"""Number of log lines to quote for a process that failed without a message."""
MEMORY_ADVICE_BY_KIND = {
    "model_worker": MEMORY_ADVICE,
    "generation": "lower rollout.sessions or rollout.max_total_tokens, or take a smaller model",
    "rollout_worker": "lower rollout.sessions or rollout.max_total_tokens",
    "env": "lower {section}.pool_size",
}
"""Advice about a worker that was killed for lack of memory, by kind of worker."""
_SECTIONS = {"env": "env", "trajectory": "stream"}
"""Configuration section from which each kind of server gets its command-line flags, unless its
``EnvironmentService`` names another one."""


class LaunchError(RuntimeError):
    """Raised when a process failed. The message names the process, the cause and its log."""


class RunRestart(Exception):
    """Raised to restart the run although nothing failed. The message gives the reason."""


class WorkerFailed(LaunchError):
    """Raised when a worker failed without which the run cannot continue. The run's saved state is
    intact."""


def run_job(job: JobSpec, scheduler: Scheduler, log: Path, display: Display) -> None:
    """Run a job until it ends. Its artifact is created atomically. Raises LaunchError if the job
    fails."""
    partial = job.artifact.with_name(f".{job.artifact.name}.{os.getpid()}.tmp")
    job.artifact.parent.mkdir(parents=True, exist_ok=True)
    argv = tuple(str(partial) if text == "{artifact}" else text for text in job.argv)
    worker = WorkerSpec(f"job/{job.name}", job.module, argv, log)
    deadline = process_clock.now() + job.timeout_s
    display.show({"kind": "phase", "text": f"{job.name}: {job.artifact.name}"})
    try:
        scheduler.start(worker)
        exits: list[WorkerExit] = []
        while not exits:
            if process_clock.now() > deadline:
                raise LaunchError(
                    f"{worker.name} did not finish within {job.timeout_s:g} s (log: {log})"
                )
            exits = [event for event in scheduler.wait(1.0) if isinstance(event, WorkerExit)]
        if exits[0].exit_code != 0:
            raise LaunchError(failure_message(exits[0]))
        if not partial.exists():
            raise LaunchError(f"{worker.name} ended without its result (log: {log})")
        try:
            os.replace(partial, job.artifact)
        except OSError:
            # If a concurrent run has created the same artifact first, that one is kept.
            if not job.artifact.exists():
                raise
    finally:
        with defer_signals():
            scheduler.stop(STOP_GRACE_S)
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def run_workers(
    plan: RunPlan, scheduler: Scheduler, display: Display, signals: StopSignals | None = None
) -> dict[str, Any]:
    """Start the master and the workers, supervise them, stop them all, and return the run's
    summary.

    An asynchronous run recovers from worker deaths by itself. Raises LaunchError, which names the
    worker whose failure ended the run, and LaunchInterrupted after a signal (``signals``) once the
    run has saved a checkpoint.
    """
    signals = signals or StopSignals()
    rollout = plan.spec.rollout
    failures: deque[float] = deque()
    if (
        rollout is not None
        and (environment := plan.spec.environment) is not None
        and environment.port == 0
    ):
        # A restarted server must have the same address as before.
        plan = replace(
            plan, spec=replace(plan.spec, environment=replace(environment, port=free_port()))
        )
    while True:
        plan.write()
        try:
            # The master waits connect_timeout_s for each worker. Twice that time is allowed here,
            # because some hosts must receive files before they can start a worker.
            supervisor = WorkerSupervisor(
                replaces=rollout is not None, join_s=2 * plan.rpc.connect_timeout_s
            )
            return _run_once(plan, scheduler, display, supervisor, signals)
        except (LaunchError, RunRestart) as error:
            if signals.requested is not None:
                raise LaunchInterrupted(
                    signals.requested, "the run failed before it could save a checkpoint"
                ) from error
            if isinstance(error, LaunchError) and not isinstance(error, WorkerFailed):
                raise
            failed = isinstance(error, WorkerFailed)
            if failed and (rollout is None or not _may_restart(failures, rollout.options)):
                raise
            display.show({"kind": "warning", "text": f"{error}\n{BEGINS_AGAIN}"})
            plan = replace(plan, recover_mode=RecoverMode.auto, started_at=time.time())


def _may_restart(failures: deque[float], options: AsyncConfig) -> bool:
    """Record a failure. Return whether the run may restart, that is, whether at most
    ``recover_retries`` failures have occurred within ``recover_window_s``.

    ``failures`` contains the times of earlier failures (process_clock.now).
    """
    failures.append(process_clock.now())
    while failures[0] < failures[-1] - options.recover_window_s:
        failures.popleft()
    return len(failures) <= options.recover_retries


def _run_once(
    plan: RunPlan,
    scheduler: Scheduler,
    display: Display,
    supervisor: WorkerSupervisor,
    signals: StopSignals,
) -> dict[str, Any]:
    """Run all processes until the master has ended, and return the summary that the master has
    reported."""
    summary: dict[str, Any] | None = None
    leave_by = float("inf")
    handle_exits_at = float("inf")  # When to handle ``pending_exits``; see MASTER_GRACE_S.
    pending_exits: list[WorkerExit] = []
    stopping = False
    run_id = secrets.token_hex(6)
    key_file = make_keys(plan)
    try:
        elastic = ElasticWorkers(plan, run_id, key_file)
        master = _master_spec(plan, run_id, key_file)
        scheduler.start(master)
        supervisor.on_start(master)
        while process_clock.now() < leave_by:
            if signals.requested is not None and not stopping:
                stopping = True
                name = signal.Signals(signals.requested).name
                display.show({"kind": "warning", "text": f"{name}: {STOPS}"})
                scheduler.interrupt(MASTER)
            waiting_since = process_clock.now()
            events = scheduler.wait(1.0)
            exits = [event for event in events if isinstance(event, WorkerExit)]
            for event in events:
                if isinstance(event, WorkerExit):
                    supervisor.on_exit(event)
                elif isinstance(event, DeferredStart):
                    supervisor.on_deferred_start(event.name)
                elif isinstance(event, Notice):
                    display.show({"kind": "warning", "text": event.text})
                elif isinstance(event, WorkersWanted):
                    elastic.requests.append(event)
                elif isinstance(event, RestartRequest) and summary is None:
                    raise RunRestart(event.why)
                message = (
                    parse_event(event.text)
                    if isinstance(event, WorkerLine) and event.name == MASTER
                    else None
                )
                if message is None or supervisor.on_message(message):
                    continue
                display.show(message)
                if message["kind"] == "endpoint":
                    elastic.master = message["address"]
                    for worker in worker_specs(plan, run_id, message["address"], key_file):
                        scheduler.start(worker)
                        supervisor.on_start(worker)
                elif message["kind"] == "step":
                    signals.deferred = True  # From now on there is progress to save.
                elif message["kind"] == "stopped" and signals.requested is not None:
                    raise LaunchInterrupted(signals.requested, message["text"])
                elif message["kind"] == "done":
                    signals.deferred = False
                    summary = message["summary"]
                    leave_by = process_clock.now() + LEAVE_TIMEOUT_S
            # If this process was suspended, or busy sending files to a host, messages from workers
            # that are on time may not have been read yet.
            on_time = process_clock.now() - waiting_since < ON_TIME_S
            for order in supervisor.pop_kill_orders() if on_time else ():
                scheduler.kill(order.name, order.cause, pid=order.pid, started=order.started)
            if exits:
                pending_exits += exits
                handle_exits_at = process_clock.now() + (
                    MASTER_GRACE_S if all(map(_may_follow_master, pending_exits)) else 0.0
                )
            if pending_exits and summary is None and process_clock.now() >= handle_exits_at:
                _replace_workers(
                    sorted(pending_exits, key=_root_cause_rank),
                    scheduler,
                    display,
                    supervisor,
                    plan.spec.run_dir,
                    plan.spec.environment,
                )
                pending_exits.clear()
            if plan.spec.rollout is not None and summary is None:
                elastic.start_requested(scheduler, supervisor, display)
            if any(event.name == MASTER for event in exits):
                break
    finally:
        signals.deferred = False
        with defer_signals():
            scheduler.stop(STOP_GRACE_S)
            if key_file is not None:
                forget(key_file)
    if summary is None:
        raise LaunchError("the master ended without a summary")
    return summary


def _replace_workers(
    exits: Sequence[WorkerExit],
    scheduler: Scheduler,
    display: Display,
    supervisor: WorkerSupervisor,
    run_dir: Path,
    environment: EnvironmentService | None = None,
) -> None:
    """Restart the workers that have ended, and report each death on the display and in the run
    folder.

    Raises WorkerFailed for the first worker that can neither be restarted nor dropped. In that case
    no worker is restarted.
    """
    successors = {exit_.name: supervisor.successor(exit_) for exit_ in exits}
    vital_names = [
        name
        for name, spec in successors.items()
        if spec is None and not supervisor.is_dispensable(name)
    ]
    for exit_ in exits:
        spec = successors[exit_.name]
        message = failure_message(exit_, environment)
        start_error = ""
        if vital_names and exit_.name not in vital_names:
            consequence = f"the run cannot continue without {vital_names[0]}"
            record_death(run_dir, exit_.name, message.splitlines()[0], consequence)
            display.show({"kind": "warning", "text": f"{message}; {consequence}"})
            continue
        if spec is not None:
            try:
                scheduler.start(spec)
            except OSError as error:
                spec = None
                start_error = f"it cannot be started again: {error}"
            else:
                supervisor.on_start(spec)
        if spec is not None:
            message = message.splitlines()[0]
            consequence = "it is started again"
        elif supervisor.is_dispensable(exit_.name):
            consequence = f"{start_error or 'it failed too often'}; the run continues without it"
        else:
            consequence = start_error
        record_death(
            run_dir,
            exit_.name,
            message.splitlines()[0],
            consequence or "the run cannot continue without it",
        )
        if spec is None and not supervisor.is_dispensable(exit_.name):
            raise WorkerFailed(f"{message}; {start_error}" if start_error else message)
        display.show(
            {"kind": "warning", "text": f"{message}{'; ' if spec else chr(10)}{consequence}"}
        )


def failure_message(exit_: WorkerExit, environment: EnvironmentService | None = None) -> str:
    """Return a line that explains an exit, followed by the last lines of the log if the cause is
    not known. ``environment``: the run's environment server, if it has one."""
    where = f"(log: {exit_.log})"
    cause = (
        find_failure_cause(exit_.log, exit_.log_from, exit_.last_words)
        if exit_.exit_code > 0
        else None
    )
    kind = exit_.name.partition("/")[0]
    section = _SECTIONS.get(kind)
    if kind == "env" and environment is not None:
        section = environment.section
    # Replace a server's flags (--pool-size) with the options that set them (env.pool_size).
    if cause and section:
        cause = re.sub(
            r"--([a-z][a-z-]*)", lambda flag: f"{section}." + flag[1].replace("-", "_"), cause
        )
    if cause:
        return f"{exit_.name} failed: {cause} {where}"
    if exit_.cause.startswith(OOM_KILLED):
        advice = MEMORY_ADVICE_BY_KIND.get(kind, "give it more").format(section=section)
        return f"{exit_.name} was {exit_.cause}; {advice} {where}"
    log_lines = "\n".join(
        f"  | {line}" for line in read_log_lines(exit_.log, TAIL_LINES, exit_.log_from)
    )
    log_end = f"; its log ends:\n{log_lines}" if log_lines else ""
    return f"{exit_.name} ended before the run did: {exit_.reason} {where}{log_end}"


def _is_clean(exit_: WorkerExit) -> bool:
    """Return whether a worker other than the master has exited with code 0."""
    return exit_.exit_code == 0 and exit_.name != MASTER


def _may_follow_master(exit_: WorkerExit) -> bool:
    """Return whether a worker may have ended because of the master: it exited cleanly, or because
    its connection to the master was lost."""
    cause = (
        find_failure_cause(exit_.log, exit_.log_from, exit_.last_words)
        if exit_.exit_code > 0 and exit_.name != MASTER
        else None
    )
    return _is_clean(exit_) or (cause is not None and LOST_MASTER in cause)


def _root_cause_rank(exit_: WorkerExit) -> tuple[bool, bool, bool]:
    """Return a sort key that puts the most likely root cause first: killed workers, failed workers,
    the master (which reports failures of other processes), then clean exits."""
    return _is_clean(exit_), exit_.exit_code >= 0, exit_.name == MASTER


def _log_path(spec: ExperimentSpec, name: str) -> Path:
    return spec.run_dir / "logs" / f"{name.replace('/', '-')}.log"


def make_keys(plan: RunPlan) -> Path | None:
    """Create keys for a run that listens on more than the loopback interface.

    Return the file from which the run's processes read the keys; it exists only while this process
    runs. Return None for a run that needs no keys. Raises OSError.
    """
    bind = plan.network.bind
    return RunKeys.make().move_to_memory() if bind and not is_loopback_host(bind) else None


def _keys_option(key_file: Path | None) -> tuple[str, ...]:
    return ("--key-file", str(key_file)) if key_file else ()


def _master_spec(plan: RunPlan, run_id: str, key_file: Path | None = None) -> WorkerSpec:
    argv = ("--run-dir", str(plan.spec.run_dir), "--run-id", run_id, *_keys_option(key_file))
    return WorkerSpec(
        MASTER, "workers.master_worker", argv, _log_path(plan.spec, MASTER), events=True
    )


def worker_specs(
    plan: RunPlan, run_id: str, master: str, key_file: Path | None = None
) -> list[WorkerSpec]:
    """Return the specifications of all processes of a run except the master, in the order in which
    they are started.

    Model workers come before generation workers, which can use the remaining GPUs. ``master`` is
    the master's address; ``key_file`` contains the run's keys and is None if it has none.
    """
    spec = plan.spec
    join = ("--run-id", run_id, "--master", master, *_keys_option(key_file))
    niceness = spec.rollout.options.niceness if spec.rollout else 0
    workers = []
    if (server := spec.environment) is not None:
        argv = (
            "--name",
            "env/0",
            "--host",
            server.host,
            "--port",
            str(server.port),
            *server.argv,
            *join,
        )
        workers.append(
            WorkerSpec("env/0", server.module, argv, _log_path(spec, "env/0"), niceness=niceness)
        )
    for service in spec.services:
        argv = ("--name", service.name, *service.argv, *join)
        workers.append(
            WorkerSpec(service.name, service.module, argv, _log_path(spec, service.name))
        )
    for index in range(spec.n_model_workers):
        argv = ("--run-dir", str(spec.run_dir), "--index", str(index), *join)
        name = f"model_worker/{index}"
        workers.append(
            _on_gpus(plan, WorkerSpec(name, "workers.model_worker", argv, _log_path(spec, name)))
        )
    names = spec.rollout.workers if spec.rollout else ()
    return workers + [_rollout_side_spec(plan, name, join) for name in names]


def _rollout_side_spec(plan: RunPlan, name: str, join: tuple[str, ...]) -> WorkerSpec:
    """Return the specification of a rollout worker or a generation worker of an asynchronous
    run."""
    spec = plan.spec
    kind, _, number = name.partition("/")
    module = "workers.generation_worker" if kind == "generation" else "workers.rollout_worker"
    argv = ("--run-dir", str(spec.run_dir), "--index", number, *join)
    niceness = spec.rollout.options.niceness if spec.rollout else 0
    worker = WorkerSpec(name, module, argv, _log_path(spec, name), niceness=niceness)
    return _on_gpus(plan, worker)


def _on_gpus(plan: RunPlan, worker: WorkerSpec) -> WorkerSpec:
    """Return the specification with the GPUs that the plan assigns to the worker, if any."""
    gpus = plan.gpus.get(worker.name, ())
    return replace(worker, gpu=gpus[0], further_gpus=gpus[1:]) if gpus else worker


class ElasticWorkers:
    """Additional workers for a running asynchronous run, on hosts with spare capacity that have
    joined it."""

    def __init__(self, plan: RunPlan, run_id: str, key_file: Path | None) -> None:
        self._plan = plan
        self._run_id = run_id
        self._key_file = key_file
        names = plan.spec.rollout.workers if plan.spec.rollout else []
        self._next_number = Counter(name.partition("/")[0] for name in names)
        """Number that the next worker of each kind gets."""
        self.requests: list[WorkersWanted] = []
        """Requests for workers that have not been started yet."""
        self.master = ""
        """Address of the master; "" until the master listens."""

    def start_requested(
        self, scheduler: Scheduler, supervisor: WorkerSupervisor, display: Display
    ) -> None:
        """Start the requested workers. A request for a host that has left in the meantime is
        dropped with a warning."""
        if not self.master:
            return
        join = ("--run-id", self._run_id, "--master", self.master, *_keys_option(self._key_file))
        for request in self.requests:
            first = self._next_number[request.kind]
            names = [f"{request.kind}/{first + number}" for number in range(request.count)]
            try:
                for name in names:
                    worker = replace(_rollout_side_spec(self._plan, name, join), host=request.host)
                    scheduler.start(worker)
                    supervisor.on_start(worker)
            except OSError as error:
                display.show({"kind": "warning", "text": str(error)})
            else:
                display.show(
                    {"kind": "warning", "text": f"{', '.join(names)} are started on {request.host}"}
                )
            self._next_number[request.kind] += request.count
        self.requests.clear()


RESTARTABLE = ("rollout_worker", "generation", "env")
"""Kinds of workers that have no state of the run and can therefore be restarted."""
ONE_OF_SEVERAL = ("rollout_worker", "generation")
"""Kinds of which the remaining workers take over the work of a missing one."""
MAX_ERRORS = 3
"""Maximum number of errors after which a worker is still restarted."""
MAX_QUICK_DEATHS = 3
"""Maximum number of successive deaths within ``QUICK_DEATH_S`` of the start after which a worker is
still restarted."""
QUICK_DEATH_S = 10.0
"""Lifetime in seconds below which a death counts as quick."""
EXIT_AFTER_LEAVING_S = 30.0
"""Seconds within which a worker's process must exit after the worker has left the master. A worker
that stops a vLLM server takes up to 20 s, and reports its reason only afterwards."""
MASTER = "master"
"""Name of the master process."""


@dataclass(frozen=True)
class KillOrder:
    """Order to kill a worker process."""

    name: str
    """Name of the worker."""
    cause: str
    """Reason, which appears in the message about the exit."""
    pid: int = 0
    """Process id; 0 for the worker's current process."""
    started: int = 0
    """Start time of the process in clock ticks, which distinguishes it from a later process with
    the same pid; 0 if unknown."""


class WorkerSupervisor:
    """State of a run's worker processes, and the policy for restarting them.

    If ``replaces``, as in asynchronous runs, workers are restarted. A worker is given up after more
    than ``MAX_ERRORS`` errors of its own, or after more than ``MAX_QUICK_DEATHS`` successive deaths
    within ``QUICK_DEATH_S`` seconds of its start. Other kills are not counted. ``join_s`` is the
    time in seconds within which a worker must register with the master.
    """

    def __init__(self, *, replaces: bool = True, join_s: float = 240.0) -> None:
        self._replaces = replaces
        self._join_s = join_s
        self._specs: dict[str, tuple[WorkerSpec, float]] = {}
        """(specification, time of the last start) of each worker, by name."""
        self._errors: Counter[str] = Counter()
        self._quick_deaths: Counter[str] = Counter()
        self._running: set[str] = set()
        self._departed: set[str] = set()
        """Workers that have left the master in an orderly way, so that their exit is not an
        error."""
        self._join_deadlines: dict[str, float] = {}
        """Registration deadlines of started workers that have not registered yet."""
        self._kill_orders: dict[str, tuple[float, KillOrder]] = {}
        """(time at which it is due, order) of each pending kill."""
        self.restarts: Counter[str] = Counter()
        """Number of restarts by kind of worker."""

    def on_start(self, spec: WorkerSpec) -> None:
        """Record that a worker was started."""
        self._specs[spec.name] = (spec, process_clock.now())
        self._running.add(spec.name)
        self._departed.discard(spec.name)
        self._join_deadlines[spec.name] = process_clock.now() + self._join_s

    def on_deferred_start(self, name: str) -> None:
        """Record that a worker whose start was deferred has started. Its time to register begins
        now."""
        if name in self._running:
            self.on_start(self._specs[name][0])

    def on_message(self, message: Mapping[str, Any]) -> bool:
        """Process a message from the master if it says that a worker has joined, left or been lost.
        Return False for any other message."""
        if message["kind"] == "joined":
            self._join_deadlines.pop(message["name"], None)
        elif message["kind"] == "endpoint":
            self._join_deadlines.pop(MASTER, None)
            return False
        elif message["kind"] == "lost":
            wait_s = 0.0
            cause = f"killed: {message['reason']}"
            if message["left"]:
                self._departed.add(message["name"])
                wait_s = EXIT_AFTER_LEAVING_S
                cause = (
                    f"killed: it had left the run {EXIT_AFTER_LEAVING_S:g} s before and did not end"
                )
            order = KillOrder(message["name"], cause, message["pid"], message["started"])
            self._kill_orders[order.name] = (process_clock.now() + wait_s, order)
        else:
            return False
        return True

    def pop_kill_orders(self) -> list[KillOrder]:
        """Return the kill orders that are due, each only once: for workers that did not register in
        time, and for workers that the master has lost."""
        now = process_clock.now()
        late = [name for name, deadline in self._join_deadlines.items() if deadline <= now]
        due = [name for name, (due_at, _) in self._kill_orders.items() if due_at <= now]
        for name in late:
            del self._join_deadlines[name]
        unregistered = f"killed: it did not register with the master within {self._join_s:g} s"
        silent = f"killed: it did not begin to listen within {self._join_s:g} s"
        orders = [KillOrder(name, silent if name == MASTER else unregistered) for name in late]
        return orders + [self._kill_orders.pop(name)[1] for name in due]

    def on_exit(self, exit_: WorkerExit) -> None:
        """Record that a worker has ended for any reason."""
        self._running.discard(exit_.name)
        self._join_deadlines.pop(exit_.name, None)
        self._kill_orders.pop(exit_.name, None)

    def successor(self, exit_: WorkerExit) -> WorkerSpec | None:
        """Return the specification to start in place of a worker that has ended, or None if it must
        not be restarted.

        In the latter case the run continues only if the worker ``is_dispensable``.
        """
        kind = exit_.name.partition("/")[0]
        self._running.discard(exit_.name)
        if not self._replaces or kind not in RESTARTABLE or exit_.name not in self._specs:
            return None
        spec, since = self._specs[exit_.name]
        # An early exit with code 0 counts as an error: an environment's code may call sys.exit().
        self._errors[exit_.name] += exit_.exit_code > 0 or (
            exit_.exit_code == 0 and exit_.name not in self._departed
        )
        quick = process_clock.now() - since < QUICK_DEATH_S
        self._quick_deaths[exit_.name] = self._quick_deaths[exit_.name] + 1 if quick else 0
        if (
            self._errors[exit_.name] > MAX_ERRORS
            or self._quick_deaths[exit_.name] > MAX_QUICK_DEATHS
        ):
            return None
        self.restarts[kind] += 1
        return spec

    def is_dispensable(self, name: str) -> bool:
        """Return whether the run can continue without a worker because others of its kind are
        running."""
        kind = name.partition("/")[0]
        others = any(other.startswith(f"{kind}/") for other in self._running)
        return self._replaces and kind in ONE_OF_SEVERAL and others
