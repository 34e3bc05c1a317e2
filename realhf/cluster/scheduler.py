"""Is the launcher's end: a ``Scheduler`` whose workers run on the hosts that have joined, and on its own machine."""

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
    FromHost,
    FromOperator,
    HostJoined,
    HostLost,
    HostRefused,
    InvalidMessage,
)
from realhf.cluster.file_transfer import (
    TransferQueue,
    files_for_host,
    key_file_in,
    needed_paths,
    read_plan,
    weights_problem,
)
from realhf.cluster.host_table import PROBE_S, FolderProbe, Host, HostTable, Running, warnings
from realhf.cluster.messages import (
    Ended,
    EndWorker,
    Exited,
    HostHello,
    Kept,
    KillWorker,
    Lines,
    NotStarted,
    Probed,
    StartWorker,
)
from realhf.cluster.operator import serve_operator
from realhf.cluster.options import ELASTIC, ClusterOptions, elsewhere, placement_problems
from realhf.cluster.own_host import fingerprint, unlike
from realhf.cluster.placement import LAUNCHER, ClusterError, Place, kind_of
from realhf.monitor.run_files import note_placement
from realhf.scheduler.base import (
    Notice,
    SchedulerDefinition,
    WorkerEvent,
    WorkerExit,
    WorkerLine,
    WorkerSpec,
    WorkerStarts,
    WorkersWanted,
)
from realhf.scheduler.local import LocalScheduler
from realhf.scheduler.process import failure_cause, fatal_line
from realhf.transport.sockets import allow_many_connections

JOB, MASTER = "job", "master"
REJOIN_S = 15.0
"""When a run begins again, hosts of before have so long to come back; then it begins without them."""
STOP_LATE_S = 6.0
LOST = -9
"""Exit code of a worker whose host was lost."""


class AgentStarter(Protocol):
    """Starts host agents when nobody else does, e.g. by Ray or Slurm. An agent is ``python -m realhf.worker --join
    ENDPOINT --key-file FILE --host-agent --name NAME`` on its host."""

    @property
    def hosts(self) -> Sequence[str]:
        """The names of the hosts that it starts agents on."""
        ...

    def check(self) -> None:
        """Raise OSError with one line where agents can never be started; called when the launcher starts, which may be
        long before hosts are waited for."""
        ...

    def start_agents(self, endpoint: str, keys: HostKeys) -> None:
        """Begin to start agents that join the endpoint at ``endpoint``, each with its key of ``keys``; called each time
        before hosts are waited for. One that was removed has none, and need not be started. Raises OSError with one
        line that says what is wrong."""
        ...

    def problem(self) -> str:
        """Return why agents that are waited for will not come; "" as long as they may."""
        ...

    def stop_agents(self) -> None:
        """End what ``start_agents`` has started. A second call does no harm."""
        ...


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class ClusterScheduler:
    """Implements ``Scheduler``. Jobs and the master run on the launcher's machine. The endpoint opens at the first
    start and closes with ``stop``; agents wait for the next time."""

    def __init__(
        self, options: ClusterOptions, starter: AgentStarter | None = None, say: Callable[[str], None] = _say
    ) -> None:
        self._options, self._starter, self._say = options, starter, say
        self.key_file = Path(options.key_file).expanduser().absolute() if options.key_file else None
        self._local = LocalScheduler(orphans_are_ours=True)
        self._table = HostTable()
        self._later: dict[str, WorkerSpec] = {}
        self._refused: dict[str, str] = {}
        self._control: ControlEndpoint | None = None
        self._known: KnownHosts | None = None
        self._backlog: list[WorkerEvent] = []
        self._answers: dict[tuple[str, int], Probed] = {}
        self._probes = 0
        self._ended: set[str] = set()
        self._before: set[str] | None = None
        self._placed: set[str] = set()
        self._running = False
        self._elastic = True
        self._run_dir: Path | None = None

    # ---- Scheduler

    def start(self, spec: WorkerSpec) -> None:
        """See ``Scheduler``. Raises ClusterError when no host fits or hosts that are waited for do not join. Where only
        hosts fit on which workers have failed just now, the worker starts when one of them has rested; see
        ``HostTable.failed``."""
        control = self._opened()
        if spec.name in self._table.workers or spec.name in self._later:
            raise ValueError(f"worker {spec.name} was started already")
        if spec.name == MASTER:
            self._wait_for_hosts(control)
            self._running, self._elastic = True, bool(read_plan(spec.log.parent.parent)["spec"].get("rollout"))
            self._run_dir = spec.log.parent.parent
            for hello in [host.hello for host in self._table.hosts.values()]:
                self._note(hello.name, made_of=hello.made_of)
                if hello.wants and not self._elastic:
                    self._backlog.append(_unused(hello))
        if kind_of(spec.name) != JOB:
            self._run_dir = spec.log.parent.parent
        if kind_of(spec.name) in (JOB, MASTER):
            self._start_here(spec)
            return
        self._look_at_folders(control, spec)
        places = self._table.places()
        wish, strict = spec.host, bool(spec.host)
        if not wish:
            wish = self._wish(spec.name)
            strict = spec.name not in self._placed
        try:
            place = placement.choose(spec.name, places, wish, strict=strict)
            if place.resting:
                self._later[spec.name] = spec
                return
            self._placed.add(spec.name)
            gpu = self._gpu_for(spec, place)
        except ClusterError as error:
            raise ClusterError(f"{error}; there are {placement.capacity(places)}") from None
        if kind_of(spec.name) == "generation":
            trainer = placement.choose("model_worker/0", places, self._wish("model_worker/0"), strict=False).name
            problem = weights_problem(spec.log.parent.parent, place.name, trainer, shared=place.shared)
            if problem:
                raise ClusterError(f"{spec.name}: {problem}")
        if text := placement.trainer_beside(spec.name, gpu, place):
            self._backlog.append(Notice(text))
        dealt = gpu is not None and (place.name != LAUNCHER or spec.gpu is None)
        if dealt and kind_of(spec.name) == "generation":
            # How much memory it may take depends on this, and the plan does not know of a GPU that is dealt out here.
            spec = replace(spec, argv=(*spec.argv, "--beside-trainer", "yes" if text else "no"))
        if place.name == LAUNCHER:
            self._start_here(replace(spec, gpu=gpu))
        else:
            self._start_there(spec, place.name, gpu)

    def _gpu_for(self, spec: WorkerSpec, place: Place) -> int | None:
        """Return the GPU that a worker gets on a host, None where it sees all of them. On the launcher's machine
        ``allocation.gpus`` decides; where nothing was said, and an agent on the same machine deals out its GPUs too,
        the worker is held to one that nobody else has. Raises ClusterError."""
        if not self._options.one_gpu_each:
            return spec.gpu if place.name == LAUNCHER else None
        if place.name != LAUNCHER:
            return placement.gpu_of(spec.name, place)
        shared = self._elastic and place.offered and place.free_gpus
        return placement.gpu_of(spec.name, place) if spec.gpu is None and shared else spec.gpu

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """See ``Scheduler``."""
        deadline = process_clock.now() + timeout_s
        while True:
            self._pump()
            self._start_late()
            if self._backlog or (left := deadline - process_clock.now()) <= 0:
                break
            self._wait_here(left)
        found, self._backlog = self._backlog, []
        return found

    def _start_late(self) -> None:
        """Try to start the workers that wait until a host has rested; one for which there is none any more ends."""
        waiting, self._later = self._later, {}
        for name, spec in waiting.items():
            try:
                self.start(spec)
            except OSError as error:
                self._backlog.append(WorkerExit(name, 1, spec.log, _size(spec.log), str(error)))
            else:
                if name not in self._later:
                    self._backlog.append(WorkerStarts(name))

    def _wait_here(self, timeout_s: float) -> None:
        """Wait for workers of this machine, and for anything at the endpoint; keep what happened for ``wait``."""
        for event in self._local.wait(timeout_s):
            if isinstance(event, WorkerExit):
                self._table.workers.pop(event.name, None)
            self._backlog.append(event)

    def interrupt(self, name: str) -> None:
        """See ``Scheduler``. The master runs on this machine."""
        self._local.interrupt(name)

    def kill(self, name: str, cause: str, *, pid: int = 0, started: int = 0) -> None:
        """See ``Scheduler``. On another host its agent does it; one that is mute is lost soon, with its workers."""
        running = self._table.workers.get(name)
        if running is not None and running.host != LAUNCHER and self._control is not None:
            self._control.send(running.host, "kill", KillWorker(name, cause, pid, started))
        else:
            self._local.kill(name, cause, pid=pid, started=started)

    def stop(self, grace_s: float = 8.0) -> None:
        """See ``Scheduler``. Workers of a host that does not answer end by themselves, with its agent."""
        control = self._control
        try:
            if control is not None:
                self._ended.clear()
                for name, host in self._table.hosts.items():
                    host.transfers.withdraw()
                    control.send(name, "end", EndWorker("", grace_s))
            self._local.stop(grace_s)
            if control is not None:
                deadline = process_clock.now() + grace_s + STOP_LATE_S
                while set(self._table.hosts) - self._ended and process_clock.now() < deadline:
                    self._local.wait(0.1)
                    self._pump()
        finally:
            if control is not None:
                stay = {name for name, host in self._table.hosts.items() if not host.leaving}
                self._before = stay if self._running else self._before
                self._local.unwatch(control.fileno())
                control.close()
                self._control = None
                if self._starter is not None:
                    self._starter.stop_agents()
            self._table, self._backlog = HostTable(self._table.troubles), []
            self._later.clear()

    def _wish(self, name: str) -> str:
        return placement.wished(name, self._options.placement)

    # ---- hosts

    def _opened(self) -> ControlEndpoint:
        if self._control is None:
            if not self._options.address:
                raise ClusterError("scheduler.address: empty; give the address of this machine that other hosts reach")
            if self._starter is not None:
                self._starter.check()
            allow_many_connections()  # each host has one
            options = self._options
            bind = f"tcp://{options.address}:{options.port}"
            try:
                if self._known is None:
                    if self.key_file is not None:
                        make_keys(self.key_file)
                    self._known = KnownHosts(self.key_file)
                self._control = ControlEndpoint(self._known, bind, options.dead_after_s, self._refusal)
            except Exception as error:
                raise ClusterError(
                    f"the endpoint for host agents (scheduler.address, scheduler.port, scheduler.key_file): {error}"
                ) from None
            self._local.watch(self._control.fileno())
        return self._control

    def _refusal(self, hello: HostHello) -> str:
        different = unlike(hello.made_of) if self._options.differing_hosts == "refuse" else ""
        return different and f"it has {different} (scheduler.differing_hosts=warn takes it)"

    def _wait_for_hosts(self, control: ControlEndpoint) -> None:
        """Wait until the hosts that were asked for are there, and when the run begins again, those of before or what is
        left of them after ``REJOIN_S``. Raises ClusterError."""
        assert self._known is not None
        if self._starter is not None:
            with self._local.preserve_children():
                self._starter.start_agents(control.endpoint, self._known.draw(self._starter.hosts))
        options = self._options
        again = self._before is not None
        wanted = self._before if self._before is not None else set(options.hosts)
        limit_s = REJOIN_S if again else options.wait_s
        deadline, told = process_clock.now() + limit_s, again
        while True:
            self._pump()
            missing = wanted - set(self._table.hosts)
            short = 0 if again else options.min_hosts - len(self._table.hosts)
            if not missing and short <= 0:
                return
            if not told:
                self._say(f"waiting {limit_s:g} s for {_who(missing, short)}; {self._what_helps(control, missing)}")
                told = True
            problem = self._starter.problem() if self._starter is not None else ""
            for name in sorted(missing & set(self._refused)):
                problem = f"{name} is refused: {self._refused[name]}"
            if problem or process_clock.now() > deadline:
                if again and not problem:
                    return
                there = ", ".join(sorted(self._table.hosts)) or "none"
                raise ClusterError(
                    f"{_who(missing, short)} did not join {control.endpoint}"
                    + (f": {problem}" if problem else f" within {limit_s:g} s")
                    + f"; joined so far: {there} (scheduler.hosts, scheduler.min_hosts, scheduler.wait_s)"
                )
            self._wait_here(min(0.5, max(0.01, deadline - process_clock.now())))

    def _what_helps(self, control: ControlEndpoint, missing: set[str]) -> str:
        """Return in one line what a person can do for hosts to join."""
        assert self._known is not None
        at, file = f"--join {control.endpoint} --key-file", self._known.file
        if self._starter is not None:
            return f"who is there: python -m realhf.cluster status {at} {file}"
        keyless = sorted(host for host in missing if not self._known.has(host))
        names = " ".join(keyless) if missing else "NAME"
        makes = f"; a key for it: python -m realhf.cluster keys {file} --host {names}" if keyless or not missing else ""
        return f"on each: python -m realhf.worker {at} ITS_KEY --host-agent{makes}"

    def _look_at_folders(self, control: ControlEndpoint, spec: WorkerSpec) -> None:
        """Ask hosts that have come whether they share the run folder. One that does not answer is lost soon anyway."""
        new = {name: host for name, host in self._table.hosts.items() if host.shared is None}
        if not new:
            return
        run_dir = spec.log.parent.parent
        paths = [*needed_paths(run_dir)][:256]
        looks = {path: fingerprint(Path(path)) for path in paths}
        asked: dict[str, tuple[int, FolderProbe]] = {}
        try:
            for name in new:
                self._probes += 1
                asked[name] = self._probes, FolderProbe(run_dir, looks)
                control.send(name, "probe", asked[name][1].question(self._probes))
            deadline = process_clock.now() + PROBE_S
            while process_clock.now() < deadline and any(
                (name, number) not in self._answers for name, (number, _) in asked.items() if name in self._table.hosts
            ):
                self._pump()
                self._wait_here(0.05)
            for name, (number, probe) in asked.items():
                if (answer := self._answers.pop((name, number), None)) is not None:
                    probe.judge(new[name], answer)
                elif name in self._table.hosts:
                    new[name].shared = False  # once is enough: every start of a worker would wait for it again
                    text = f"host {name} did not say within {PROBE_S:g} s what it shares; it is taken to share nothing"
                    self._backlog.append(Notice(text))
            self._answers.clear()
        finally:
            for _, probe in asked.values():
                probe.close()

    # ---- starting

    def _start_here(self, spec: WorkerSpec) -> None:
        self._local.start(spec)
        self._table.workers[spec.name] = Running(spec, LAUNCHER, process_clock.now(), spec.gpu)
        self._note(LAUNCHER, spec.name)

    def _start_there(self, spec: WorkerSpec, name: str, gpu: int | None) -> None:
        host = self._table.hosts[name]
        shared = bool(host.shared)
        brought = files_for_host(
            spec.log.parent.parent,
            host.hello.folder,
            key_file_in(spec.argv),
            shared=shared,
            there=[*host.there],
            limit_mb=self._options.carry_mb,
            host=name,
        )
        brought.files = {here: there for here, there in brought.files.items() if there not in host.transfers.brought}
        brought.texts = {there: text for there, text in brought.texts.items() if there not in host.transfers.brought}
        host.transfers.brought |= {*brought.files.values(), *brought.texts}
        argv = [brought.rewritten(text) for text in spec.argv]
        log = str(spec.log) if shared else brought.rewritten(str(spec.log))
        asked = StartWorker(spec.name, spec.module, argv, log, spec.events, spec.niceness, gpu)
        host.transfers.add(brought.pieces(), asked)
        self._table.workers[spec.name] = Running(spec, name, process_clock.now(), gpu)
        self._advance(name, host)
        self._note(name, spec.name)

    def _note(self, host: str, process: str = "", *, lost: str = "", made_of: Mapping[str, str] = {}) -> None:
        """Keep what happened to a host for the timeline, and what it is made of, which is part of what produced the
        run. A full disk must not end the run."""
        if self._run_dir is not None and kind_of(process) != JOB:
            with contextlib.suppress(OSError):
                note_placement(self._run_dir, host, process, lost=lost, made_of=made_of)

    # ---- what happens

    def _pump(self) -> None:
        """Take note of what hosts and operators have said."""
        for event in self._control.events() if self._control is not None else ():
            self._happened(event)
        for name, host in [*self._table.hosts.items()]:
            self._advance(name, host)
            if host.leave_by < process_clock.now() and self._control is not None:
                self._control.send_away(name)
                self._gone(name, f"its host {name} was removed, and did not say how its workers ended")

    def _advance(self, name: str, host: Host) -> None:
        """Bring a host more of what it needs; workers that it has no room for end before they start."""
        for worker, why in host.transfers.advance():
            if (running := self._table.workers.pop(worker, None)) is not None:
                log = running.spec.log
                self._failed(running, why, sure=True)
                self._backlog.append(WorkerExit(worker, 1, log, _size(log), f"host {name} {why}"))

    def _happened(self, event: EndpointEvent) -> None:
        if isinstance(event, HostJoined):
            self._came(event)
        elif isinstance(event, HostRefused):
            self._refused[event.name] = event.reason
            self._backlog.append(Notice(f"host {event.name} is refused: {event.reason}"))
        elif isinstance(event, HostLost):
            self._gone(event.name, f"its host {event.name} was lost: {event.reason}")
        elif isinstance(event, FromOperator) and self._control is not None:
            assert self._known is not None
            self._backlog += serve_operator(
                event, self._control, self._table, self._known, running=self._running, elastic=self._elastic
            )
        elif isinstance(event, InvalidMessage):
            self._told_nonsense(event)
        elif isinstance(event, FromHost):
            self._said(event)

    def _came(self, event: HostJoined) -> None:
        hello, control = event.hello, self._control
        assert control is not None
        transfers = TransferQueue(lambda kind, message: control.send(hello.name, kind, message, session=event.session))
        self._table.hosts[hello.name] = Host(hello, transfers)
        self._refused.pop(hello.name, None)
        if self._running:
            self._note(hello.name, made_of=hello.made_of)
        self._ended.add(hello.name)  # nothing runs there yet: the end of a run has not to wait for it
        self._backlog += [Notice(text) for text in warnings(hello)]
        if different := unlike(hello.made_of):
            self._backlog.append(Notice(f"host {hello.name} has {different}"))
        late = self._running and bool(self._table.workers)
        if late and not self._elastic:
            self._backlog.append(_unused(hello))
            return
        wants = hello.wants or (self._options.joining if late else {})
        if late:
            self._backlog.append(Notice(f"host {hello.name} ({hello.address}) joins the run"))
        self._backlog += [
            WorkersWanted(hello.name, kind, count) for kind, count in wants.items() if count and kind in ELASTIC
        ]

    def _gone(self, name: str, cause: str) -> None:
        assert self._known is not None
        if (host := self._table.hosts.get(name)) is not None and host.leaving:
            self._known.take_away(name)
        left = self._table.take(name)
        self._note(name, lost=cause.partition(": ")[2])
        self._backlog.append(Notice(f"{cause.removeprefix('its ')}; {len(left)} workers were there"))
        for worker, running in left.items():
            self._backlog.append(WorkerExit(worker, LOST, running.spec.log, _size(running.spec.log), cause))

    def _failed(self, worker: Running, why: str, *, sure: bool) -> None:
        if text := self._table.failed(worker, why, sure=sure):
            self._backlog.append(Notice(text))

    def _told_nonsense(self, event: InvalidMessage) -> None:
        """Tell once of a host that its agent says what cannot be understood."""
        host = self._table.hosts.get(event.name)
        if host is not None and not host.strange:
            host.strange = True
            self._backlog.append(Notice(f"host {event.name}: its agent says what no agent says: {event.reason}"))

    def _said(self, event: FromHost) -> None:
        message, host = event.message, self._table.hosts.get(event.name)
        if isinstance(message, Ended):
            self._ended.add(event.name)
        elif isinstance(message, Probed):
            self._answers[event.name, message.number] = message
        elif isinstance(message, Kept):
            if host is not None:
                host.transfers.has_kept(message)
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
            ended = _exit(message, running, host)
            if ended.exit_code != 0 and not host.leaving:
                self._failed(running, _why(ended, message), sure=isinstance(message, NotStarted))
            self._backlog.append(ended)
            if host.leaving and not self._table.on(event.name) and self._control is not None:
                self._control.send_away(event.name)
                self._table.take(event.name)


def _exit(message: Exited | NotStarted, running: Running, host: Host) -> WorkerExit:
    """Return the exit of a worker; the end of a log that is elsewhere is kept in a file here, which says where."""
    log = running.spec.log
    if isinstance(message, NotStarted):
        return WorkerExit(message.name, 1, log, _size(log), f"host {host.hello.name} cannot start it: {message.reason}")
    cause = f"removed with its host {host.hello.name}" if host.leaving else message.cause
    words = fatal_line(message.tail)
    if host.shared:
        return WorkerExit(message.name, message.exit_code, log, message.log_from, cause, words)
    start, end = _size(log), b"" if message.tail.endswith(b"\n") else b"\n"
    with contextlib.suppress(OSError):  # a full disk must not end the run
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(f"[end of {message.log} on host {host.hello.name}]\n".encode() + message.tail + end)
    return WorkerExit(message.name, message.exit_code, log, start, cause, words)


def _why(ended: WorkerExit, message: Exited | NotStarted) -> str:
    """Return in one line why a worker has failed."""
    if isinstance(message, NotStarted):
        return f"cannot be started there: {message.reason}"
    cause = failure_cause(ended.log, ended.log_from, ended.words) if ended.exit_code > 0 else None
    return f"has ended there at once: {cause or ended.reason}"


def _unused(hello: HostHello) -> Notice:
    return Notice(
        f"host {hello.name}: a synchronous run takes no more workers while it goes on; this host gets some when a run "
        "begins after it has joined"
    )


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _who(missing: set[str], short: int) -> str:
    """Return for whom is waited, in words."""
    names = f"host{'s' if len(missing) > 1 else ''} {', '.join(sorted(missing))}" if missing else ""
    further = short - len(missing)
    more = f"{further} {'more ' if missing else ''}host{'s' if further > 1 else ''}" if further > 0 else ""
    return " and ".join(text for text in (names, more) if text)


DEFINITION = SchedulerDefinition(
    ClusterOptions, ClusterScheduler, several_hosts=True, problems=placement_problems, elsewhere=elsewhere
)
