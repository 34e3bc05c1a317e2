"""Runs workers as processes of this machine, each in a session of its own, started anew or forked from a prepared one.

Importing PyTorch takes a worker two seconds of CPU, and more where others compute. ``PreparedWorkers`` does it once for
all workers of a host, while the host registers; see ``prepared_server`` for the other side.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from realhf.base import process_clock
from realhf.base.host_resources import MOUNT, counters, groups, memory_limit
from realhf.base.process import start_time
from realhf.env.containment.fork_server import ForkServer
from realhf.scheduler.base import SchedulerDefinition, WorkerEvent, WorkerExit, WorkerLine, WorkerSpec
from realhf.scheduler.gpus import VISIBLE, with_one_gpu
from realhf.scheduler.process import LAST_WORDS, make_last_words, read_last_words

WANT_OF_MEMORY = "killed by the kernel for want of memory"
"""Begins the cause of such an end."""
LATELY_S = 5.0
"""A kill and the end of the process that it hit are seen within this time."""
LOOK_S = 1.0
_KILLS = "oom_kill"


class MemoryKills:
    """Watches the kernel's count of such kills in the control group of this process, which its workers share; in a
    group without one, that of the whole machine. ``look`` has to be called every few seconds."""

    def __init__(self, mount: Path = MOUNT, proc: Path = Path("/proc")) -> None:
        self._mount, self._own = mount, proc / "self" / "cgroup"
        names = ("memory.events", "memory.oom_control")
        own = (group / name for group in groups("memory", mount, self._own) for name in names)
        self._counter = next((file for file in own if _KILLS in counters(file)), proc / "vmstat")
        self._count = self._read()
        self._rose_at = float("-inf")
        self._next = 0.0

    def look(self, *, now: bool = False) -> None:
        """Note whether there was a kill; once in ``LOOK_S`` unless ``now``."""
        if now or process_clock.now() >= self._next:
            self._next = process_clock.now() + LOOK_S
            count = self._read()
            if count > self._count:
                self._rose_at = process_clock.now()
            self._count = count

    def cause(self, peak_bytes: int) -> str:
        """Return the cause of a SIGKILL that nobody here has sent, "" where it is not the kernel's. ``peak_bytes`` is
        what the process had at most."""
        self.look(now=True)
        if process_clock.now() - self._rose_at > LATELY_S:
            return ""
        limit = memory_limit(self._mount, self._own)
        whole = psutil.virtual_memory().total
        whose = "its group may take" if limit is not None and limit < whole else "this machine has"
        most = min(whole, limit or whole)
        return f"{WANT_OF_MEMORY}: it had {peak_bytes / 2**30:.1f} GiB at its peak, and {whose} {most / 2**30:.1f}"

    def _read(self) -> int:
        return counters(self._counter).get(_KILLS, 0)


PREPARED_WITHIN_S = 120.0
"""How long workers wait for the imports; then they import for themselves."""
FORKED_WITHIN_S = 15.0
END_S = 0.1


class ForkedWorker:
    """Is a worker, seen from its parent, as far as ``subprocess.Popen`` is needed for one."""

    def __init__(self, pid: int, pidfd: int, stdout: IO[bytes] | None) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self.peak_bytes = 0
        self._pidfd = pidfd

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status, usage = os.wait4(self.pid, os.WNOHANG)
                self.peak_bytes = usage.ru_maxrss * 1024
            except ChildProcessError:
                pid, status = self.pid, 1 << 8  # somebody else has collected it
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the worker has ended. Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            watch = select.poll()
            watch.register(self._pidfd, select.POLLIN)
            watch.poll(None if timeout is None else timeout * 1000)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal; one that has ended is left alone."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class PreparedWorkers:
    """Keeps one process that imports ``modules``, by name, between ``begin`` and ``end``. This process has to adopt
    orphans (``orphans_adopted``), and one thread uses this."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = tuple(modules)
        self._server: ForkServer | None = None
        self._ready = False
        self._until = 0.0

    def begin(self) -> None:
        """Start the process; one that runs is kept."""
        if self._server is not None and self._server.alive():
            return
        self.end()
        arguments = [str(os.getpid()), *self._modules]
        self._server = ForkServer("realhf.scheduler.prepared_server", None, None, arguments, options=())
        self._server.start()
        self._until = process_clock.now() + PREPARED_WITHIN_S

    def importing(self) -> bool:
        """Return whether workers should be started a little later. Does not wait; gives up after
        ``PREPARED_WITHIN_S``."""
        if self._server is None or self._ready:
            return False
        try:
            self._server.wait_ready(0.0)
            self._ready = True
        except TimeoutError:
            if process_clock.now() <= self._until:
                return True
            self.end()
        except (OSError, RuntimeError, ValueError):
            self.end()
        return False

    def fork(
        self,
        module: str,
        argv: Sequence[str],
        log: int,
        words: int,
        *,
        niceness: int,
        environment: Mapping[str, str],
        lines: bool,
    ) -> ForkedWorker | None:
        """Start ``python -m module *argv`` with these changes of its environment; its standard error, and its output
        too unless ``lines`` is set, go to the descriptor ``log``, and its last words to ``words``. None when
        there is no prepared process, and it has to be started otherwise."""
        if self.importing() or self._server is None or not self._server.alive():
            return None
        request = {"module": module, "argv": [*argv], "niceness": niceness, "environment": dict(environment)}
        read, write = os.pipe() if lines else (-1, log)
        try:
            forked = self._server.fork(request, [write, log, words], module, FORKED_WITHIN_S)
            if forked.pid < 0:
                os.close(forked.pidfd)
                raise ProcessLookupError(f"{module} has ended already")
        except (OSError, RuntimeError, ValueError):
            self.end()  # a worker that comes late has no one who lets it begin
            if lines:
                os.close(read)
            return None
        finally:
            if lines:
                os.close(write)
        return ForkedWorker(forked.pid, forked.pidfd, os.fdopen(read, "rb", buffering=0) if lines else None)

    def end(self) -> None:
        """End the process; workers go on."""
        if self._server is not None:
            self._server.stop(END_S)
        self._server, self._ready = None, False


_KILL_DEADLINE_S = 5.0
"""How long killed processes may take to disappear."""


@dataclass
class _Child:
    spec: WorkerSpec
    process: subprocess.Popen[bytes] | ForkedWorker
    pidfd: int
    log: IO[bytes]
    log_from: int
    words: int
    """The descriptor of its last words, see ``make_last_words``; -1 once it is closed."""
    partial: bytes = b""
    cause: str = ""
    relatives: set[psutil.Process] = field(default_factory=set)

    @property
    def lines(self) -> int | None:
        """The descriptor of the event stream, or None without events."""
        return self.process.stdout.fileno() if self.process.stdout else None


class LocalScheduler:
    """Implements ``Scheduler`` with subprocesses. The exit of a worker is noticed through its pidfd, at once and
    without polling.

    With ``orphans_are_ours`` this process adopts the orphans of its workers (see ``orphans_adopted``), so that every
    child left at the end is killed, but for those that it had when the scheduler was made, those of ``beside``, and
    what they have started. Use it only in a process that starts nothing else meanwhile. With ``prepared`` workers are
    forked from its process where there is one.
    """

    def __init__(self, *, orphans_are_ours: bool = False, prepared: PreparedWorkers | None = None) -> None:
        self._prepared = prepared
        self._memory_kills = MemoryKills()
        self._children: dict[str, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._orphans_are_ours = orphans_are_ours
        self._strangers = set(psutil.Process().children()) if orphans_are_ours else set()

    def start(self, spec: WorkerSpec) -> None:
        """See ``Scheduler``."""
        before = self._children.get(spec.name)
        if before is not None:
            if before.process.poll() is None:
                raise ValueError(f"worker {spec.name} was started already")
            self._kill_orphans(before)
        environment = None if spec.gpu is None else with_one_gpu(spec.gpu)
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        log = spec.log.open("ab")
        log_from = log.tell()
        words = make_last_words()
        try:
            process = self._forked(spec, log, words, environment) or _started(spec, log, words, environment)
        except BaseException:
            os.close(words)
            log.close()
            raise
        child = _Child(spec, process, os.pidfd_open(process.pid), log, log_from, words)
        self._children[spec.name] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        if child.lines is not None:
            os.set_blocking(child.lines, False)
            self._selector.register(child.lines, selectors.EVENT_READ, child)

    def _forked(
        self, spec: WorkerSpec, log: IO[bytes], words: int, environment: dict[str, str] | None
    ) -> ForkedWorker | None:
        if self._prepared is None:
            return None
        changes = {VISIBLE: environment[VISIBLE]} if environment is not None else {}
        return self._prepared.fork(
            spec.module, spec.argv, log.fileno(), words, niceness=spec.niceness, environment=changes, lines=spec.events
        )

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """See ``Scheduler``."""
        self._memory_kills.look()
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return []
        events: list[WorkerEvent] = []
        exited: list[_Child] = []
        for key, _ in self._selector.select(timeout_s):
            child: _Child | None = key.data
            if child is None:
                continue
            if key.fd == child.pidfd:
                exited.append(child)
            else:
                events += self._read_lines(child)
        for child in exited:
            events += self._read_lines(child)
            events.append(self._reap(child))
        return events

    def stop(self, grace_s: float = 8.0) -> None:
        """See ``Scheduler``."""
        alive = [child for child in self._children.values() if child.process.poll() is None]
        for child in alive:
            child.relatives |= _descendants(child.process.pid)
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
        deadline = process_clock.now() + grace_s
        for child in alive:
            _has_ended(child, deadline - process_clock.now())
        self._kill_leftovers()
        for child in self._children.values():
            self._forget(child)
        self._children.clear()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Leave alone, as if they had been there when the scheduler was made, the children that this process gets
        within the block."""
        before = set(psutil.Process().children())
        try:
            yield
        finally:
            self._strangers |= set(psutil.Process().children()) - before

    def watch(self, descriptor: int) -> None:
        """Let ``wait`` return, perhaps without events, when this descriptor becomes readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def unwatch(self, descriptor: int) -> None:
        """Watch a descriptor no longer."""
        self._selector.unregister(descriptor)

    def end(self, name: str) -> None:
        """Ask one worker to end (SIGTERM). One that does not run is left alone; its end is reported as ever."""
        child = self._children.get(name)
        if child is not None and child.process.poll() is None:
            child.relatives |= _descendants(child.process.pid)
            child.process.send_signal(signal.SIGTERM)

    def interrupt(self, name: str) -> None:
        """See ``Scheduler``."""
        child = self._children.get(name)
        if child is not None and child.process.poll() is None:
            child.process.send_signal(signal.SIGINT)

    def kill(self, name: str, cause: str, *, pid: int = 0, started: int = 0) -> None:
        """See ``Scheduler``."""
        child = self._children.get(name)
        if child is None or child.process.poll() is not None:
            return
        if pid and (pid, started) != (child.process.pid, start_time(pid)):
            return
        child.cause = cause
        doomed = child.relatives | _descendants(child.process.pid)
        child.process.kill()
        _kill(doomed)

    def _kill_orphans(self, child: _Child) -> None:
        """Kill what a worker that has ended left behind, e.g. servers it had started."""
        mine = {other.process.pid for other in self._children.values()}
        doomed = {process for process in psutil.process_iter() if _session(process.pid) == child.process.pid}
        if self._orphans_are_ours:
            adopted = set(psutil.Process().children()) - self._strangers
            doomed |= {process for process in adopted if process.pid not in mine}
        doomed |= {relative for process in doomed for relative in _descendants(process.pid)}
        _kill(doomed)
        psutil.wait_procs(doomed, timeout=_KILL_DEADLINE_S)

    def _kill_leftovers(self) -> None:
        sessions = {child.process.pid for child in self._children.values()}
        doomed = {relative for child in self._children.values() for relative in child.relatives}
        doomed |= {process for process in psutil.process_iter() if _session(process.pid) in sessions}
        for child in self._children.values():
            if child.process.poll() is None:
                doomed |= _descendants(child.process.pid)
        if self._orphans_are_ours:
            theirs = {relative for process in self._strangers for relative in _descendants(process.pid)}
            doomed |= _descendants(os.getpid()) - self._strangers - theirs
        _kill(doomed)
        for child in self._children.values():
            _has_ended(child, _KILL_DEADLINE_S)
        psutil.wait_procs(doomed, timeout=_KILL_DEADLINE_S)

    def _read_lines(self, child: _Child) -> list[WorkerEvent]:
        if child.lines is None or child.lines not in self._selector.get_map():
            return []
        chunks = [child.partial]
        while True:
            try:
                chunk = os.read(child.lines, 65536)
            except BlockingIOError:
                break
            if not chunk:
                self._selector.unregister(child.lines)
                break
            chunks.append(chunk)
        *lines, child.partial = b"".join(chunks).split(b"\n")
        return [WorkerLine(child.spec.name, line.decode("utf-8", "replace")) for line in lines]

    def _reap(self, child: _Child) -> WorkerExit:
        peak_bytes = _peak_bytes(child.process)
        exit_code = child.process.wait(_KILL_DEADLINE_S)
        words = read_last_words(child.words)
        self._forget(child)
        cause = ""
        if exit_code == -signal.SIGKILL:
            cause = child.cause or self._memory_kills.cause(peak_bytes)
        return WorkerExit(child.spec.name, exit_code, child.spec.log, child.log_from, cause, words)

    def _forget(self, child: _Child) -> None:
        """Close the descriptors and the log of a child that has ended."""
        watched = self._selector.get_map()
        for descriptor in (child.pidfd, child.lines):
            if descriptor is not None and descriptor >= 0 and descriptor in watched:
                self._selector.unregister(descriptor)
        if child.pidfd >= 0:
            os.close(child.pidfd)
            child.pidfd = -1
        if child.words >= 0:
            os.close(child.words)
            child.words = -1
        child.log.close()
        if child.process.stdout and child.process.returncode is not None:
            child.process.stdout.close()
            child.process.stdout = None


def _started(
    spec: WorkerSpec, log: IO[bytes], words: int, environment: dict[str, str] | None
) -> subprocess.Popen[bytes]:
    start = [str(os.getpid()), str(spec.niceness), spec.module, *spec.argv]
    return subprocess.Popen(
        [sys.executable, "-m", "realhf.scheduler.child", *start],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if spec.events else log,
        stderr=log,
        start_new_session=True,
        pass_fds=[words],
        env={**(os.environ if environment is None else environment), LAST_WORDS: str(words)},
    )


def _peak_bytes(process: subprocess.Popen[bytes] | ForkedWorker) -> int:
    """Collect a process that has ended, and return the most memory that it had; 0 where somebody has collected it."""
    if isinstance(process, ForkedWorker):
        process.poll()
        return process.peak_bytes
    if process.returncode is not None:
        return 0
    try:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    if pid:
        process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * 1024


def _descendants(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _has_ended(child: _Child, within_s: float) -> bool:
    """Return whether a worker has ended, or does within so many seconds."""

    def ends(left_s: float) -> bool:
        try:
            child.process.wait(left_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    return process_clock.wait(ends, within_s)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return -1


@dataclass
class LocalOptions:
    """The scheduler of this machine has no options."""


DEFINITION = SchedulerDefinition(LocalOptions, lambda options: LocalScheduler(orphans_are_ours=True))
