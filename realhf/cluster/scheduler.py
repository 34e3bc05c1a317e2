"""``Scheduler`` that runs workers on joined hosts and on the launcher's machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from realhf.base import process_clock
from realhf.cluster import placement
from realhf.cluster.cluster_keys import HostKeys, KnownHosts, make_keys
from realhf.cluster.control_endpoint import (
    ControlEndpoint,
    EndpointEvent,
    HostJoined,
    HostLost,
    HostMessage,
    HostRefused,
    InvalidMessage,
    OperatorRequest,
)
from realhf.cluster.file_transfer import (
    TransferQueue,
    find_key_file,
    find_needed_paths,
    find_weights_problem,
    plan_transfer,
    read_plan,
)
from realhf.cluster.host_table import (
    PROBE_S,
    FolderProbe,
    HostTable,
    JoinedHost,
    RunningWorker,
    list_warnings,
)
from realhf.cluster.messages import (
    Ended,
    EndWorker,
    Exited,
    FileReceipt,
    HostHello,
    KillWorker,
    Lines,
    NotStarted,
    ProbeAnswer,
    StartWorker,
)
from realhf.cluster.operator import serve_operator
from realhf.cluster.options import ELASTIC, ClusterOptions, elsewhere, placement_problems
from realhf.cluster.own_host import describe_differences, fingerprint
from realhf.cluster.placement import LAUNCHER, CandidateHost, ClusterError, kind_of
from realhf.monitor.run_files import record_placement
from realhf.scheduler.base import (
    DeferredStart,
    Notice,
    SchedulerDefinition,
    WorkerEvent,
    WorkerExit,
    WorkerLine,
    WorkerSpec,
    WorkersWanted,
)
from realhf.scheduler.local import LocalScheduler
from realhf.scheduler.process import find_failure_cause, find_fatal_line
from realhf.transport.sockets import raise_descriptor_limit

JOB = "job"
MASTER = "master"
REJOIN_S = 15.0
"""Seconds that a restarted run waits for its previous hosts before it starts without them."""
STOP_LATE_S = 6.0
"""Seconds that ``stop`` waits for hosts in addition to the grace period of their workers."""
LOST = -9
"""Exit code that is reported for a worker whose host was lost."""


class AgentStarter(Protocol):
    """Interface for starting host agents through an engine such as Ray or Slurm.

    On each host it runs ``python -m realhf.worker --join ENDPOINT --key-file FILE --host-agent
    --name NAME``.
    """

    @property
    def hosts(self) -> Sequence[str]:
        """Names of the hosts on which agents are started."""
        ...

    def check(self) -> None:
        """Raise OSError with a one-line message if agents can never be started.

        The launcher calls this when it starts, possibly long before ``start_agents``.
        """
        ...

    def start_agents(self, endpoint: str, keys: HostKeys) -> None:
        """Begin to start the agents, each of which joins ``endpoint`` with its key from ``keys``.

        The launcher calls this each time before it waits for hosts. A removed host has no key in
        ``keys``, and its agent need not be started. Raises OSError with a one-line message.
        """
        ...

    def problem(self) -> str:
        """Return why the expected agents will not join; "" as long as they may still join."""
        ...

    def stop_agents(self) -> None:
        """End the agents that ``start_agents`` has started. May be called repeatedly."""
        ...


def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class ClusterScheduler:
    """``Scheduler`` that runs workers on joined hosts and on the launcher's machine.

    Jobs and the master always run on the launcher's machine. The first ``start`` opens the control
    endpoint and ``stop`` closes it; agents then wait for the next run.

    starter: starts the agents; None if a person or a batch system starts them. say: prints a line
    for the user.
    """

    def __init__(
        self,
        options: ClusterOptions,
        starter: AgentStarter | None = None,
        say: Callable[[str], None] = _print_to_stderr,
    ) -> None:
        self._options = options
        self._starter = starter
        self._print_line = say
        self.key_file = Path(options.key_file).expanduser().absolute() if options.key_file else None
        self._local = LocalScheduler(adopts_orphans=True)
        self._table = HostTable()
        self._delayed: dict[str, WorkerSpec] = {}
        self._refusals: dict[str, str] = {}
        self._control: ControlEndpoint | None = None
        self._known: KnownHosts | None = None
        self._backlog: list[WorkerEvent] = []
        self._answers: dict[tuple[str, int], ProbeAnswer] = {}
        self._probes = 0
        self._ended_hosts: set[str] = set()
        self._previous_hosts: set[str] | None = None
        self._placed_once: set[str] = set()
        self._running = False
        self._elastic = True
        self._run_dir: Path | None = None

    # ---- Scheduler

    def start(self, spec: WorkerSpec) -> None:
        """Start a worker on a chosen host; see ``Scheduler``.

        If all suitable hosts are paused after failures (``HostTable.note_failure``), the worker
        starts when the first pause ends. Raises ClusterError if no host is suitable, or if expected
        hosts do not join.
        """
        control = self._open_endpoint()
        if spec.name in self._table.workers or spec.name in self._delayed:
            raise ValueError(f"worker {spec.name} was started already")
        if spec.name == MASTER:
            self._wait_for_hosts(control)
            self._running = True
            self._elastic = bool(read_plan(spec.log.parent.parent)["spec"].get("rollout"))
            self._run_dir = spec.log.parent.parent
            for hello in [host.hello for host in self._table.hosts.values()]:
                self._note_placement(hello.name, made_of=hello.made_of)
                if hello.wants and not self._elastic:
                    self._backlog.append(_build_unused_notice(hello))
        if kind_of(spec.name) != JOB:
            self._run_dir = spec.log.parent.parent
        if kind_of(spec.name) in (JOB, MASTER):
            self._start_locally(spec)
            return
        self._probe_folders(control, spec)
        places = self._table.candidates()
        placed_host = spec.host
        strict = bool(spec.host)
        if not placed_host:
            placed_host = self._placed_host(spec.name)
            strict = spec.name not in self._placed_once
        try:
            place = placement.choose_host(spec.name, places, placed_host, strict=strict)
            if place.paused:
                self._delayed[spec.name] = spec
                return
            self._placed_once.add(spec.name)
            gpu = self._gpu_for(spec, place)
        except ClusterError as error:
            raise ClusterError(
                f"{error}; there are {placement.describe_capacity(places)}"
            ) from None
        if kind_of(spec.name) == "generation":
            trainer = placement.choose_host(
                "model_worker/0", places, self._placed_host("model_worker/0"), strict=False
            ).name
            problem = find_weights_problem(
                spec.log.parent.parent, place.name, trainer, shared=place.shared
            )
            if problem:
                raise ClusterError(f"{spec.name}: {problem}")
        if text := placement.describe_shared_gpu(spec.name, gpu, place):
            self._backlog.append(Notice(text))
        is_assigned = gpu is not None and (place.name != LAUNCHER or spec.gpu is None)
        if is_assigned and kind_of(spec.name) == "generation":
            # The worker's memory limit depends on this, and it cannot learn it from the plan, which
            # does not contain the GPUs that are assigned here.
            spec = replace(spec, argv=(*spec.argv, "--beside-trainer", "yes" if text else "no"))
        if place.name == LAUNCHER:
            self._start_locally(replace(spec, gpu=gpu))
        else:
            self._start_on_host(spec, place.name, gpu)

    def _gpu_for(self, spec: WorkerSpec, place: CandidateHost) -> int | None:
        """Choose the GPU of a worker and return its index; return None if the worker may see all
        GPUs.

        On the launcher's machine ``allocation.gpus`` determines the GPU. If it names none and an
        agent on the same machine assigns these GPUs too, the worker gets a free one. Raises
        ClusterError.
        """
        if not self._options.one_gpu_each:
            return spec.gpu if place.name == LAUNCHER else None
        if place.name != LAUNCHER:
            return placement.choose_gpu(spec.name, place)
        shared = self._elastic and place.shared_gpus and place.free_gpus
        return placement.choose_gpu(spec.name, place) if spec.gpu is None and shared else spec.gpu

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """See ``Scheduler``."""
        deadline = process_clock.now() + timeout_s
        while True:
            self._process_events()
            self._start_delayed()
            if self._backlog or (left := deadline - process_clock.now()) <= 0:
                break
            self._wait_locally(left)
        events = self._backlog
        self._backlog = []
        return events

    def _start_delayed(self) -> None:
        """Try to start the workers that wait for a paused host. Report an exit for each worker that
        no host can run any more."""
        waiting = self._delayed
        self._delayed = {}
        for name, spec in waiting.items():
            try:
                self.start(spec)
            except OSError as error:
                self._backlog.append(
                    WorkerExit(name, 1, spec.log, _file_size(spec.log), str(error))
                )
            else:
                if name not in self._delayed:
                    self._backlog.append(DeferredStart(name))

    def _wait_locally(self, timeout_s: float) -> None:
        """Wait for events of local workers and queue them for ``wait``. Events of the endpoint end
        the waiting."""
        for event in self._local.wait(timeout_s):
            if isinstance(event, WorkerExit):
                self._table.workers.pop(event.name, None)
            self._backlog.append(event)

    def interrupt(self, name: str) -> None:
        """See ``Scheduler``. Only works for local processes, such as the master."""
        self._local.interrupt(name)

    def kill(self, name: str, cause: str, *, pid: int = 0, started: int = 0) -> None:
        """Kill a worker, through its host's agent if it is on another host; see ``Scheduler``.

        If the agent does not respond, its host and workers soon count as lost.
        """
        running = self._table.workers.get(name)
        if running is not None and running.host != LAUNCHER and self._control is not None:
            self._control.send(running.host, "kill", KillWorker(name, cause, pid, started))
        else:
            self._local.kill(name, cause, pid=pid, started=started)

    def stop(self, grace_s: float = 8.0) -> None:
        """Stop all workers; see ``Scheduler``. Workers on a host that does not answer end when its
        agent ends."""
        control = self._control
        try:
            if control is not None:
                self._ended_hosts.clear()
                for name, host in self._table.hosts.items():
                    host.transfers.withdraw()
                    control.send(name, "end", EndWorker("", grace_s))
            self._local.stop(grace_s)
            if control is not None:
                deadline = process_clock.now() + grace_s + STOP_LATE_S
                while set(self._table.hosts) - self._ended_hosts and process_clock.now() < deadline:
                    self._local.wait(0.1)
                    self._process_events()
        finally:
            if control is not None:
                stay = {name for name, host in self._table.hosts.items() if not host.leaving}
                self._previous_hosts = stay if self._running else self._previous_hosts
                self._local.unwatch(control.fileno())
                control.close()
                self._control = None
                if self._starter is not None:
                    self._starter.stop_agents()
            self._table = HostTable(self._table.backoffs)
            self._backlog = []
            self._delayed.clear()

    def _placed_host(self, name: str) -> str:
        return placement.find_placed_host(name, self._options.placement)

    # ---- hosts

    def _open_endpoint(self) -> ControlEndpoint:
        if self._control is None:
            if not self._options.address:
                raise ClusterError(
                    "scheduler.address: empty; give the address of this machine that other hosts "
                    "reach"
                )
            if self._starter is not None:
                self._starter.check()
            raise_descriptor_limit()  # one for each host
            options = self._options
            bind = f"tcp://{options.address}:{options.port}"
            try:
                if self._known is None:
                    if self.key_file is not None:
                        make_keys(self.key_file)
                    self._known = KnownHosts(self.key_file)
                self._control = ControlEndpoint(
                    self._known, bind, options.dead_after_s, self._refusal_reason
                )
            except Exception as error:
                raise ClusterError(
                    f"the endpoint for host agents (scheduler.address, scheduler.port, "
                    f"scheduler.key_file): {error}"
                ) from None
            self._local.watch(self._control.fileno())
        return self._control

    def _refusal_reason(self, hello: HostHello) -> str:
        different = (
            describe_differences(hello.made_of) if self._options.differing_hosts == "refuse" else ""
        )
        return different and f"it has {different} (scheduler.differing_hosts=warn takes it)"

    def _wait_for_hosts(self, control: ControlEndpoint) -> None:
        """Wait until the expected hosts have joined. Raises ClusterError if they do not.

        A restarted run waits for its previous hosts, and after ``REJOIN_S`` continues without those
        that are missing.
        """
        assert self._known is not None
        if self._starter is not None:
            with self._local.preserve_children():
                self._starter.start_agents(
                    control.endpoint, self._known.generate(self._starter.hosts)
                )
        options = self._options
        restarted = self._previous_hosts is not None
        expected = self._previous_hosts if self._previous_hosts is not None else set(options.hosts)
        limit_s = REJOIN_S if restarted else options.wait_s
        deadline = process_clock.now() + limit_s
        announced = restarted
        while True:
            self._process_events()
            missing = expected - set(self._table.hosts)
            missing_count = 0 if restarted else options.min_hosts - len(self._table.hosts)
            if not missing and missing_count <= 0:
                return
            if not announced:
                hosts_text = _describe_missing(missing, missing_count)
                self._print_line(
                    f"waiting {limit_s:g} s for {hosts_text}; {self._join_instructions(control, missing)}"
                )
                announced = True
            problem = self._starter.problem() if self._starter is not None else ""
            for name in sorted(missing & set(self._refusals)):
                problem = f"{name} is refused: {self._refusals[name]}"
            if problem or process_clock.now() > deadline:
                if restarted and not problem:
                    return
                joined = ", ".join(sorted(self._table.hosts)) or "none"
                raise ClusterError(
                    f"{_describe_missing(missing, missing_count)} did not join {control.endpoint}"
                    + (f": {problem}" if problem else f" within {limit_s:g} s")
                    + f"; joined so far: {joined} (scheduler.hosts, scheduler.min_hosts, "
                    f"scheduler.wait_s)"
                )
            self._wait_locally(min(0.5, max(0.01, deadline - process_clock.now())))

    def _join_instructions(self, control: ControlEndpoint, missing: set[str]) -> str:
        """Return a message with the commands that make the missing hosts join."""
        assert self._known is not None
        at = f"--join {control.endpoint} --key-file"
        file = self._known.file
        if self._starter is not None:
            return f"who is there: python -m realhf.cluster status {at} {file}"
        keyless = sorted(host for host in missing if not self._known.has_key(host))
        names = " ".join(keyless) if missing else "NAME"
        makes = (
            f"; a key for it: python -m realhf.cluster keys {file} --host {names}"
            if keyless or not missing
            else ""
        )
        return f"on each: python -m realhf.worker {at} ITS_KEY --host-agent{makes}"

    def _probe_folders(self, control: ControlEndpoint, spec: WorkerSpec) -> None:
        """Find out which files the new hosts share with the launcher's machine: the run folder, and
        the files that the worker ``spec`` needs. A host that does not answer counts as sharing
        nothing."""
        new = {name: host for name, host in self._table.hosts.items() if host.shared is None}
        if not new:
            return
        run_dir = spec.log.parent.parent
        paths = [*find_needed_paths(run_dir)][:256]
        fingerprints = {path: fingerprint(Path(path)) for path in paths}
        probes: dict[str, tuple[int, FolderProbe]] = {}
        try:
            for name in new:
                self._probes += 1
                probes[name] = self._probes, FolderProbe(run_dir, fingerprints)
                control.send(name, "probe", probes[name][1].build_probe(self._probes))
            deadline = process_clock.now() + PROBE_S
            while process_clock.now() < deadline and any(
                (name, number) not in self._answers
                for name, (number, _) in probes.items()
                if name in self._table.hosts
            ):
                self._process_events()
                self._wait_locally(0.05)
            for name, (number, probe) in probes.items():
                if (answer := self._answers.pop((name, number), None)) is not None:
                    probe.apply_answer(new[name], answer)
                elif name in self._table.hosts:
                    # otherwise every worker start would wait for its answer again
                    new[name].shared = False
                    text = (
                        f"host {name} did not report within {PROBE_S:g} s what it shares; files are "
                        "sent to it"
                    )
                    self._backlog.append(Notice(text))
            self._answers.clear()
        finally:
            for _, probe in probes.values():
                probe.close()

    # ---- starting

    def _start_locally(self, spec: WorkerSpec) -> None:
        self._local.start(spec)
        self._table.workers[spec.name] = RunningWorker(
            spec, LAUNCHER, process_clock.now(), spec.gpu
        )
        self._note_placement(LAUNCHER, spec.name)

    def _start_on_host(self, spec: WorkerSpec, name: str, gpu: int | None) -> None:
        host = self._table.hosts[name]
        shared = bool(host.shared)
        transfer = plan_transfer(
            spec.log.parent.parent,
            host.hello.folder,
            find_key_file(spec.argv),
            shared=shared,
            same_paths=[*host.same_paths],
            limit_mb=self._options.carry_mb,
            host=name,
        )
        transfer.files = {
            source: target
            for source, target in transfer.files.items()
            if target not in host.transfers.sent_paths
        }
        transfer.texts = {
            target: text
            for target, text in transfer.texts.items()
            if target not in host.transfers.sent_paths
        }
        host.transfers.sent_paths |= {*transfer.files.values(), *transfer.texts}
        argv = [transfer.map_path(text) for text in spec.argv]
        log = str(spec.log) if shared else transfer.map_path(str(spec.log))
        request = StartWorker(spec.name, spec.module, argv, log, spec.events, spec.niceness, gpu)
        host.transfers.add(transfer.pieces(), request)
        self._table.workers[spec.name] = RunningWorker(spec, name, process_clock.now(), gpu)
        self._advance_transfers(name, host)
        self._note_placement(name, spec.name)

    def _note_placement(
        self, host: str, process: str = "", *, lost: str = "", made_of: Mapping[str, str] = {}
    ) -> None:
        """Record an event of a host in the run folder: a worker's placement, the host's loss
        (``lost``: the reason), or its versions (``made_of``).

        Errors are ignored, because a full disk must not end the run.
        """
        if self._run_dir is not None and kind_of(process) != JOB:
            with contextlib.suppress(OSError):
                record_placement(self._run_dir, host, process, lost=lost, made_of=made_of)

    # ---- what happens

    def _process_events(self) -> None:
        """Process the messages of hosts and operators, and continue file transfers and host
        removals."""
        for event in self._control.events() if self._control is not None else ():
            self._process_event(event)
        for name, host in [*self._table.hosts.items()]:
            self._advance_transfers(name, host)
            if host.leave_by < process_clock.now() and self._control is not None:
                self._control.dismiss(name)
                self._on_host_gone(
                    name, f"its host {name} was removed, and did not say how its workers ended"
                )

    def _advance_transfers(self, name: str, host: JoinedHost) -> None:
        """Continue the file transfer to a host; report an exit for each worker whose files the host
        cannot store."""
        for worker, why in host.transfers.advance():
            if (running := self._table.workers.pop(worker, None)) is not None:
                log = running.spec.log
                self._note_failure(running, why, is_host_fault=True)
                self._backlog.append(
                    WorkerExit(worker, 1, log, _file_size(log), f"host {name} {why}")
                )

    def _process_event(self, event: EndpointEvent) -> None:
        if isinstance(event, HostJoined):
            self._on_host_joined(event)
        elif isinstance(event, HostRefused):
            self._refusals[event.name] = event.reason
            self._backlog.append(Notice(f"host {event.name} is refused: {event.reason}"))
        elif isinstance(event, HostLost):
            self._on_host_gone(event.name, f"its host {event.name} was lost: {event.reason}")
        elif isinstance(event, OperatorRequest) and self._control is not None:
            assert self._known is not None
            self._backlog += serve_operator(
                event,
                self._control,
                self._table,
                self._known,
                running=self._running,
                elastic=self._elastic,
            )
        elif isinstance(event, InvalidMessage):
            self._on_invalid_message(event)
        elif isinstance(event, HostMessage):
            self._on_host_message(event)

    def _on_host_joined(self, event: HostJoined) -> None:
        hello = event.hello
        control = self._control
        assert control is not None
        transfers = TransferQueue(
            lambda kind, message: control.send(hello.name, kind, message, session=event.session)
        )
        self._table.hosts[hello.name] = JoinedHost(hello, transfers)
        self._refusals.pop(hello.name, None)
        if self._running:
            self._note_placement(hello.name, made_of=hello.made_of)
        self._ended_hosts.add(hello.name)  # it has no workers yet, so ``stop`` need not wait for it
        self._backlog += [Notice(text) for text in list_warnings(hello)]
        if different := describe_differences(hello.made_of):
            self._backlog.append(Notice(f"host {hello.name} has {different}"))
        late = self._running and bool(self._table.workers)
        if late and not self._elastic:
            self._backlog.append(_build_unused_notice(hello))
            return
        wants = hello.wants or (self._options.joining if late else {})
        if late:
            self._backlog.append(Notice(f"host {hello.name} ({hello.address}) joins the run"))
        self._backlog += [
            WorkersWanted(hello.name, kind, count)
            for kind, count in wants.items()
            if count and kind in ELASTIC
        ]

    def _on_host_gone(self, name: str, cause: str) -> None:
        assert self._known is not None
        if (host := self._table.hosts.get(name)) is not None and host.leaving:
            self._known.revoke(name)
        lost_workers = self._table.remove_host(name)
        self._note_placement(name, lost=cause.partition(": ")[2])
        self._backlog.append(
            Notice(f"{cause.removeprefix('its ')}; {len(lost_workers)} workers were there")
        )
        for worker, running in lost_workers.items():
            self._backlog.append(
                WorkerExit(worker, LOST, running.spec.log, _file_size(running.spec.log), cause)
            )

    def _note_failure(self, worker: RunningWorker, reason: str, *, is_host_fault: bool) -> None:
        if text := self._table.note_failure(worker, reason, is_host_fault=is_host_fault):
            self._backlog.append(Notice(text))

    def _on_invalid_message(self, event: InvalidMessage) -> None:
        """Notify the user that a host sends invalid messages, once for each host."""
        host = self._table.hosts.get(event.name)
        if host is not None and not host.sends_invalid:
            host.sends_invalid = True
            self._backlog.append(
                Notice(f"host {event.name}: its agent sent an invalid message: {event.reason}")
            )

    def _on_host_message(self, event: HostMessage) -> None:
        message = event.message
        host = self._table.hosts.get(event.name)
        if isinstance(message, Ended):
            self._ended_hosts.add(event.name)
        elif isinstance(message, ProbeAnswer):
            self._answers[event.name, message.number] = message
        elif isinstance(message, FileReceipt):
            if host is not None:
                host.transfers.on_receipt(message)
        elif isinstance(message, (Exited, NotStarted, Lines)):
            running = self._table.workers.get(message.name)
            if running is None or running.host != event.name or host is None:
                return
            if isinstance(message, Lines):
                if not running.spec.events:
                    return
                self._backlog += [WorkerLine(message.name, line) for line in message.lines]
                return
            del self._table.workers[message.name]
            ended = _build_exit(message, running, host)
            if ended.exit_code != 0 and not host.leaving:
                self._note_failure(
                    running,
                    _failure_reason(ended, message),
                    is_host_fault=isinstance(message, NotStarted),
                )
            self._backlog.append(ended)
            if (
                host.leaving
                and not self._table.workers_on(event.name)
                and self._control is not None
            ):
                self._control.dismiss(event.name)
                self._table.remove_host(event.name)


def _build_exit(
    message: Exited | NotStarted, running: RunningWorker, host: JoinedHost
) -> WorkerExit:
    """Return the exit event of a worker, built from its host's message.

    If the host does not share the run folder, the log tail from the message is appended to the log
    file on this machine, with a line that names its origin.
    """
    log = running.spec.log
    if isinstance(message, NotStarted):
        return WorkerExit(
            message.name,
            1,
            log,
            _file_size(log),
            f"host {host.hello.name} cannot start it: {message.reason}",
        )
    cause = f"removed with its host {host.hello.name}" if host.leaving else message.cause
    last_words = find_fatal_line(message.tail)
    if host.shared:
        return WorkerExit(message.name, message.exit_code, log, message.log_from, cause, last_words)
    start = _file_size(log)
    end = b"" if message.tail.endswith(b"\n") else b"\n"
    with contextlib.suppress(OSError):  # a full disk must not end the run
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(
                f"[end of {message.log} on host {host.hello.name}]\n".encode() + message.tail + end
            )
    return WorkerExit(message.name, message.exit_code, log, start, cause, last_words)


def _failure_reason(ended: WorkerExit, message: Exited | NotStarted) -> str:
    """Return a phrase that describes why a worker has failed."""
    if isinstance(message, NotStarted):
        return f"cannot be started there: {message.reason}"
    cause = (
        find_failure_cause(ended.log, ended.log_from, ended.last_words)
        if ended.exit_code > 0
        else None
    )
    return f"has ended there at once: {cause or ended.reason}"


def _build_unused_notice(hello: HostHello) -> Notice:
    return Notice(
        f"host {hello.name}: a synchronous run cannot get more workers while it runs; the next run "
        "uses this host"
    )


def _file_size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _describe_missing(missing: set[str], count: int) -> str:
    """Return a phrase that describes the hosts that have not joined yet."""
    names = f"host{'s' if len(missing) > 1 else ''} {', '.join(sorted(missing))}" if missing else ""
    further = count - len(missing)
    more = (
        f"{further} {'more ' if missing else ''}host{'s' if further > 1 else ''}"
        if further > 0
        else ""
    )
    return " and ".join(text for text in (names, more) if text)


DEFINITION = SchedulerDefinition(
    ClusterOptions,
    ClusterScheduler,
    several_hosts=True,
    problems=placement_problems,
    elsewhere=elsewhere,
)
