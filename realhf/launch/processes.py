"""Starts the processes of a run, watches them, and decides which one is ended and which one gets a successor.

A worker is started again, the run begins again from the last checkpoint, or it gives up.

A worker is dead when its process has ended, or when the master, its host or its start says so: whoever finds out tells
the launcher, which kills what is left of the process, so that a death is always an exit in the end. Then the worker is
started again, left out, or the run ends.
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
from realhf.api.experiment import ExperimentSpec, JobSpec, RunPlan
from realhf.base import process_clock
from realhf.base.loopback import free_port, is_loopback_host
from realhf.launch.allocation import WAYS
from realhf.launch.interrupts import Interrupted, StopSignals, undisturbed
from realhf.monitor.display import Display
from realhf.monitor.events import parse_event
from realhf.monitor.run_files import note_death
from realhf.scheduler.base import (
    BeginAgain,
    Notice,
    Scheduler,
    WorkerExit,
    WorkerLine,
    WorkerSpec,
    WorkerStarts,
    WorkersWanted,
)
from realhf.scheduler.local import WANT_OF_MEMORY
from realhf.scheduler.process import failure_cause, log_tail
from realhf.transport.errors import LOST_MASTER
from realhf.transport.network import RunKeys, forget

STOP_GRACE_S = 4.0
LEAVE_TIMEOUT_S = 15.0
STOPS = "the run saves a checkpoint of its last finished step and ends; a second signal ends it without"
BEGINS_AGAIN = "the run begins again from its last checkpoint"
PUNCTUAL_S = 5.0
"""A launcher that was away for longer than this reads what the master has said before it judges who is late."""
MASTER_GRACE_S = 5.0
"""A worker that leaves in peace was sent away by its master, who ends after it and can say why; one that has lost the
master may be the first of all."""
TAIL_LINES = 8
LESS_MEMORY = {
    "model_worker": WAYS,
    "generation": "lower rollout.sessions or rollout.max_total_tokens, or take a smaller model",
    "rollout_worker": "lower rollout.sessions or rollout.max_total_tokens",
    "env": "lower env.pool_size",
}
"""What helps a worker of a kind that had too little memory."""
SECTIONS = {"env": "env", "trajectory": "stream"}
"""Kinds of servers, and the section of the configuration that holds their flags."""


class LaunchError(RuntimeError):
    """A process failed. The message names it, the cause and its log."""


class RunsAgain(Exception):
    """Is raised inside when a run is to begin again though nothing has failed; the message says why."""


class WorkerFailed(LaunchError):
    """A worker of a run ended; what the run had saved is whole."""


def run_job(job: JobSpec, scheduler: Scheduler, log: Path, display: Display) -> None:
    """Run a job to its end; its artifact appears whole or not at all. Raises LaunchError."""
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
                raise LaunchError(f"{worker.name} did not finish within {job.timeout_s:g} s (log: {log})")
            exits = [event for event in scheduler.wait(1.0) if isinstance(event, WorkerExit)]
        if exits[0].exit_code != 0:
            raise LaunchError(failure_message(exits[0]))
        if not partial.exists():
            raise LaunchError(f"{worker.name} ended without its result (log: {log})")
        try:
            os.replace(partial, job.artifact)
        except OSError:
            if not job.artifact.exists():  # else a concurrent run has made the same folder first, and that one stays
                raise
    finally:
        with undisturbed():
            scheduler.stop(STOP_GRACE_S)
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def run_workers(
    plan: RunPlan, scheduler: Scheduler, display: Display, signals: StopSignals | None = None
) -> dict[str, Any]:
    """Start master and workers, watch them, stop them all; the summary of the run. An asynchronous run goes on without
    a person when a worker dies. Raises LaunchError that names the worker that failed for good, and Interrupted once the
    run has saved what ``signals`` asked it to save."""
    signals = signals or StopSignals()
    rollout = plan.spec.rollout
    failures: deque[float] = deque()
    if rollout is not None and (environment := plan.spec.environment) is not None and environment.port == 0:
        # A server that is started again must be found where the one before it was.
        plan = replace(plan, spec=replace(plan.spec, environment=replace(environment, port=free_port())))
    while True:
        plan.write()
        try:
            # The master gives its workers once this time, to come up one after the other; who is brought files before
            # has it twice.
            watch = Supervisor(replaces=rollout is not None, join_s=2 * plan.rpc.connect_timeout_s)
            return _run_once(plan, scheduler, display, watch, signals)
        except (LaunchError, RunsAgain) as error:
            if signals.requested is not None:
                raise Interrupted(signals.requested, "the run failed before it could save a checkpoint") from error
            if isinstance(error, LaunchError) and not isinstance(error, WorkerFailed):
                raise
            failed = isinstance(error, WorkerFailed)
            if failed and (rollout is None or not _may_begin_again(failures, rollout.options)):
                raise
            display.show({"kind": "warning", "text": f"{error}\n{BEGINS_AGAIN}"})
            plan = replace(plan, recover_mode=RecoverMode.auto, started_at=time.time())


def _may_begin_again(failures: deque[float], options: AsyncConfig) -> bool:
    """Note a failure, and say whether those of the last ``recover_window_s`` are few enough to go on."""
    failures.append(process_clock.now())
    while failures[0] < failures[-1] - options.recover_window_s:
        failures.popleft()
    return len(failures) <= options.recover_retries


def _run_once(
    plan: RunPlan, scheduler: Scheduler, display: Display, supervisor: Supervisor, signals: StopSignals
) -> dict[str, Any]:
    summary: dict[str, Any] | None = None
    leave_by = judge_at = float("inf")
    ended: list[WorkerExit] = []
    stopping = False
    run_id, key_file = secrets.token_hex(6), make_keys(plan)
    try:
        more = Reinforcements(plan, run_id, key_file)
        master = _master(plan, run_id, key_file)
        scheduler.start(master)
        supervisor.started(master)
        while process_clock.now() < leave_by:
            if signals.requested is not None and not stopping:
                stopping = True
                name = signal.Signals(signals.requested).name
                display.show({"kind": "warning", "text": f"{name}: {STOPS}"})
                scheduler.interrupt(MASTER)
            asked = process_clock.now()
            events = scheduler.wait(1.0)
            exits = [event for event in events if isinstance(event, WorkerExit)]
            for event in events:
                if isinstance(event, WorkerExit):
                    supervisor.ended(event)
                elif isinstance(event, WorkerStarts):
                    supervisor.begins(event.name)
                elif isinstance(event, Notice):
                    display.show({"kind": "warning", "text": event.text})
                elif isinstance(event, WorkersWanted):
                    more.wanted.append(event)
                elif isinstance(event, BeginAgain) and summary is None:
                    raise RunsAgain(event.why)
                message = parse_event(event.text) if isinstance(event, WorkerLine) and event.name == MASTER else None
                if message is None or supervisor.told(message):
                    continue
                display.show(message)
                if message["kind"] == "endpoint":
                    more.master = message["address"]
                    for worker in worker_specs(plan, run_id, message["address"], key_file):
                        scheduler.start(worker)
                        supervisor.started(worker)
                elif message["kind"] == "step":
                    signals.deferred = True  # from now on there is something to save
                elif message["kind"] == "stopped" and signals.requested is not None:
                    raise Interrupted(signals.requested, message["text"])
                elif message["kind"] == "done":
                    signals.deferred = False
                    summary, leave_by = message["summary"], process_clock.now() + LEAVE_TIMEOUT_S
            # It may have been stopped itself, or busy with files of a host, while its workers went on.
            punctual = process_clock.now() - asked < PUNCTUAL_S
            for sentence in supervisor.condemned() if punctual else ():
                scheduler.kill(sentence.name, sentence.cause, pid=sentence.pid, started=sentence.started)
            if exits:
                ended += exits
                judge_at = process_clock.now() + (MASTER_GRACE_S if all(map(_may_be_the_master, ended)) else 0.0)
            if ended and summary is None and process_clock.now() >= judge_at:
                _replace(sorted(ended, key=_blame), scheduler, display, supervisor, plan.spec.run_dir)
                ended.clear()
            if plan.spec.rollout is not None and summary is None:
                more.send(scheduler, supervisor, display)
            if any(event.name == MASTER for event in exits):
                break
    finally:
        signals.deferred = False
        with undisturbed():
            scheduler.stop(STOP_GRACE_S)
            if key_file is not None:
                forget(key_file)
    if summary is None:
        raise LaunchError("the master ended without a summary")
    return summary


def _replace(
    exits: Sequence[WorkerExit], scheduler: Scheduler, display: Display, supervisor: Supervisor, run_dir: Path
) -> None:
    """Start successors of the workers that ended, and say so, also in the run folder. Raises WorkerFailed for the first
    that cannot have one and that the run cannot do without; nobody who ended together with that one is started."""
    successors = {exit_.name: supervisor.successor(exit_) for exit_ in exits}
    vital = [name for name, spec in successors.items() if spec is None and not supervisor.dispensable(name)]
    for exit_ in exits:
        spec, message, refused = successors[exit_.name], failure_message(exit_), ""
        if vital and exit_.name not in vital:
            then = f"the run cannot go on without {vital[0]}"
            note_death(run_dir, exit_.name, message.splitlines()[0], then)
            display.show({"kind": "warning", "text": f"{message}; {then}"})
            continue
        if spec is not None:
            try:
                scheduler.start(spec)
            except OSError as error:
                spec, refused = None, f"it cannot be started again: {error}"
            else:
                supervisor.started(spec)
        if spec is not None:
            message, then = message.splitlines()[0], "it is started again"
        elif supervisor.dispensable(exit_.name):
            then = f"{refused or 'it failed too often'}; the run goes on without it"
        else:
            then = refused
        note_death(run_dir, exit_.name, message.splitlines()[0], then or "the run cannot go on without it")
        if spec is None and not supervisor.dispensable(exit_.name):
            raise WorkerFailed(f"{message}; {refused}" if refused else message)
        display.show({"kind": "warning", "text": f"{message}{'; ' if spec else chr(10)}{then}"})


def failure_message(exit_: WorkerExit) -> str:
    """One line about the cause, and for a process that could not speak the last lines of its log."""
    where = f"(log: {exit_.log})"
    cause = failure_cause(exit_.log, exit_.log_from, exit_.words) if exit_.exit_code > 0 else None
    kind = exit_.name.partition("/")[0]
    section = SECTIONS.get(kind)
    if cause and section:  # flags of a server (--pool-size) by the names they have here (env.pool_size)
        cause = re.sub(r"--([a-z][a-z-]*)", lambda flag: f"{section}." + flag[1].replace("-", "_"), cause)
    if cause:
        return f"{exit_.name} failed: {cause} {where}"
    if exit_.cause.startswith(WANT_OF_MEMORY):
        return f"{exit_.name} was {exit_.cause}; {LESS_MEMORY.get(kind, 'give it more')} {where}"
    tail = "\n".join(f"  | {line}" for line in log_tail(exit_.log, TAIL_LINES, exit_.log_from))
    told = f"; its log ends:\n{tail}" if tail else ""
    return f"{exit_.name} ended before the run did: {exit_.reason} {where}{told}"


def _peaceful(exit_: WorkerExit) -> bool:
    return exit_.exit_code == 0 and exit_.name != MASTER


def _may_be_the_master(exit_: WorkerExit) -> bool:
    """Return whether a worker ended because of its master, as far as itself can tell."""
    cause = (
        failure_cause(exit_.log, exit_.log_from, exit_.words) if exit_.exit_code > 0 and exit_.name != MASTER else None
    )
    return _peaceful(exit_) or (cause is not None and LOST_MASTER in cause)


def _blame(exit_: WorkerExit) -> tuple[bool, bool, bool]:
    """Of several that ended together the killed one comes first, then what failed, the master, who reports others,
    after it, and last what left in peace."""
    return _peaceful(exit_), exit_.exit_code >= 0, exit_.name == MASTER


def _log(spec: ExperimentSpec, name: str) -> Path:
    return spec.run_dir / "logs" / f"{name.replace('/', '-')}.log"


def make_keys(plan: RunPlan) -> Path | None:
    """Draw the keys of a run that listens on more than the loopback, and return where its processes read them as long
    as this one lives; None for any other run. Raises OSError."""
    bind = plan.network.bind
    return RunKeys.make().in_memory() if bind and not is_loopback_host(bind) else None


def _keys_option(key_file: Path | None) -> tuple[str, ...]:
    return ("--key-file", str(key_file)) if key_file else ()


def _master(plan: RunPlan, run_id: str, key_file: Path | None = None) -> WorkerSpec:
    argv = ("--run-dir", str(plan.spec.run_dir), "--run-id", run_id, *_keys_option(key_file))
    return WorkerSpec(MASTER, "workers.master_worker", argv, _log(plan.spec, MASTER), events=True)


def worker_specs(plan: RunPlan, run_id: str, master: str, key_file: Path | None = None) -> list[WorkerSpec]:
    """All processes of a run but its master, who is at the address ``master``, in the order in which they are started:
    who trains comes before who generates, which can do with the GPUs that are left. ``key_file`` holds the keys of the
    run, where there are any."""
    spec, join = plan.spec, ("--run-id", run_id, "--master", master, *_keys_option(key_file))
    niceness = spec.rollout.options.niceness if spec.rollout else 0
    workers = []
    if (server := spec.environment) is not None:
        argv = ("--name", "env/0", "--host", server.host, "--port", str(server.port), *server.argv, *join)
        workers.append(WorkerSpec("env/0", server.module, argv, _log(spec, "env/0"), niceness=niceness))
    for service in spec.services:
        argv = ("--name", service.name, *service.argv, *join)
        workers.append(WorkerSpec(service.name, service.module, argv, _log(spec, service.name)))
    for index in range(spec.n_model_workers):
        argv = ("--run-dir", str(spec.run_dir), "--index", str(index), *join)
        name = f"model_worker/{index}"
        workers.append(WorkerSpec(name, "workers.model_worker", argv, _log(spec, name), gpu=plan.gpus.get(name)))
    return workers + [_player(plan, name, join) for name in (spec.rollout.workers if spec.rollout else ())]


def _player(plan: RunPlan, name: str, join: tuple[str, ...]) -> WorkerSpec:
    """Return a rollout or a generation worker of an asynchronous run."""
    spec, (kind, _, number) = plan.spec, name.partition("/")
    module = "workers.generation_worker" if kind == "generation" else "workers.rollout_worker"
    argv = ("--run-dir", str(spec.run_dir), "--index", number, *join)
    niceness = spec.rollout.options.niceness if spec.rollout else 0
    return WorkerSpec(name, module, argv, _log(spec, name), niceness=niceness, gpu=plan.gpus.get(name))


class Reinforcements:
    """Starts more workers in a running asynchronous run, on hosts that have room for them: ``wanted`` says where, and
    ``master`` whom they join, once it listens."""

    def __init__(self, plan: RunPlan, run_id: str, key_file: Path | None) -> None:
        self._plan, self._run_id, self._key_file = plan, run_id, key_file
        names = plan.spec.rollout.workers if plan.spec.rollout else []
        self._next = Counter(name.partition("/")[0] for name in names)
        self.wanted: list[WorkersWanted] = []
        self.master = ""

    def send(self, scheduler: Scheduler, supervisor: Supervisor, display: Display) -> None:
        """Start what is wanted. A host that is gone meanwhile gets none."""
        if not self.master:
            return
        join = ("--run-id", self._run_id, "--master", self.master, *_keys_option(self._key_file))
        for kind, host, count in [(every.kind, every.host, every.count) for every in self.wanted]:
            names = [f"{kind}/{self._next[kind] + number}" for number in range(count)]
            try:
                for name in names:
                    worker = replace(_player(self._plan, name, join), host=host)
                    scheduler.start(worker)
                    supervisor.started(worker)
            except OSError as error:
                display.show({"kind": "warning", "text": str(error)})
            else:
                display.show({"kind": "warning", "text": f"{', '.join(names)} are started on {host}"})
            self._next[kind] += count
        self.wanted.clear()


RESTARTABLE = ("rollout_worker", "generation", "env")
"""Kinds of workers that hold nothing which the run cannot do without."""
ONE_OF_SEVERAL = ("rollout_worker", "generation")
"""Kinds of which one can be missing while others run: they take its work."""
MAX_ERRORS = 3
MAX_QUICK_DEATHS = 3
QUICK_S = 10.0
LEAVE_S = 30.0
"""How long the process of a worker that has said good-bye to the master may take to end: one that stops a server of
vLLM takes up to 20 s, and says only then why it left."""
MASTER = "master"


@dataclass(frozen=True)
class Sentence:
    """Says that a worker is to be killed, and why; ``pid`` and ``started`` say which process of this name (0: the one
    that has it now)."""

    name: str
    cause: str
    pid: int = 0
    started: int = 0


class Supervisor:
    """Knows the workers of one run. With ``replaces``, as in an asynchronous run, a worker that fails by itself may do
    so ``MAX_ERRORS`` times; one that is killed, as often as it lived ``QUICK_S`` seconds before. ``join_s`` is how long
    a worker may take until the master has heard of it."""

    def __init__(self, *, replaces: bool = True, join_s: float = 240.0) -> None:
        self._replaces, self._join_s = replaces, join_s
        self._specs: dict[str, tuple[WorkerSpec, float]] = {}
        self._errors: Counter[str] = Counter()
        self._quick: Counter[str] = Counter()
        self._running: set[str] = set()
        self._left: set[str] = set()
        """Workers that have said good-bye to the master, whose end is no error."""
        self._joining: dict[str, float] = {}
        self._doomed: dict[str, tuple[float, Sentence]] = {}
        self.restarts: Counter[str] = Counter()

    def started(self, spec: WorkerSpec) -> None:
        """A worker is running."""
        self._specs[spec.name] = (spec, process_clock.now())
        self._running.add(spec.name)
        self._left.discard(spec.name)
        self._joining[spec.name] = process_clock.now() + self._join_s

    def begins(self, name: str) -> None:
        """A worker whose start was put off is being started now, and has its time to join from now on."""
        if name in self._running:
            self.started(self._specs[name][0])

    def told(self, message: Mapping[str, Any]) -> bool:
        """Take what the master says about the life of a worker; False for a message about something else."""
        if message["kind"] == "joined":
            self._joining.pop(message["name"], None)
        elif message["kind"] == "endpoint":
            self._joining.pop(MASTER, None)
            return False
        elif message["kind"] == "lost":
            wait_s, cause = 0.0, f"killed: {message['reason']}"
            if message["left"]:
                self._left.add(message["name"])
                wait_s, cause = LEAVE_S, f"killed: it had left the run {LEAVE_S:g} s before and did not end"
            sentence = Sentence(message["name"], cause, message["pid"], message["started"])
            self._doomed[sentence.name] = process_clock.now() + wait_s, sentence
        else:
            return False
        return True

    def condemned(self) -> list[Sentence]:
        """Return whom to kill now, each once."""
        now = process_clock.now()
        late = [name for name, until in self._joining.items() if until <= now]
        due = [name for name, (at, _) in self._doomed.items() if at <= now]
        for name in late:
            del self._joining[name]
        unheard = f"killed: it did not register with the master within {self._join_s:g} s"
        silent = f"killed: it did not begin to listen within {self._join_s:g} s"
        found = [Sentence(name, silent if name == MASTER else unheard) for name in late]
        return found + [self._doomed.pop(name)[1] for name in due]

    def ended(self, exit_: WorkerExit) -> None:
        """A worker has ended, whoever did it."""
        self._running.discard(exit_.name)
        self._joining.pop(exit_.name, None)
        self._doomed.pop(exit_.name, None)

    def successor(self, exit_: WorkerExit) -> WorkerSpec | None:
        """The worker to start in place of one that ended; None when there is none, see ``dispensable``."""
        kind = exit_.name.partition("/")[0]
        self._running.discard(exit_.name)
        if not self._replaces or kind not in RESTARTABLE or exit_.name not in self._specs:
            return None
        spec, since = self._specs[exit_.name]
        # An early exit with code 0 is an error, too: code of an environment may end its process so.
        self._errors[exit_.name] += exit_.exit_code > 0 or (exit_.exit_code == 0 and exit_.name not in self._left)
        quick = process_clock.now() - since < QUICK_S
        self._quick[exit_.name] = self._quick[exit_.name] + 1 if quick else 0
        if self._errors[exit_.name] > MAX_ERRORS or self._quick[exit_.name] > MAX_QUICK_DEATHS:
            return None
        self.restarts[kind] += 1
        return spec

    def dispensable(self, name: str) -> bool:
        """Whether the run can go on without a worker that is not started again, because others of its kind run."""
        kind = name.partition("/")[0]
        others = any(other.startswith(f"{kind}/") for other in self._running)
        return self._replaces and kind in ONE_OF_SEVERAL and others
