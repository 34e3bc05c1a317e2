"""Local scheduler, which runs workers as processes on this machine, each in its own session.

Workers are either started as new processes or forked from a prepared process. Importing PyTorch
would take each new process two seconds of CPU time. ``PreparedWorkers`` controls a process that
imports it once for all workers of a host, while the host registers; ``prepared_server`` is the
program of that process.
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
from realhf.base.host_resources import MOUNT, control_groups, memory_limit, read_counters
from realhf.base.process import start_time
from realhf.env.containment.fork_server import ForkServer
from realhf.scheduler.base import (
    SchedulerDefinition,
    WorkerEvent,
    WorkerExit,
    WorkerLine,
    WorkerSpec,
)
from realhf.scheduler.gpus import VISIBLE, restrict_to_gpus
from realhf.scheduler.process import LAST_WORDS, create_last_words, read_last_words

OOM_KILLED = "killed by the kernel because memory ran out"
"""Prefix of ``WorkerExit.cause`` for a worker that the kernel's OOM killer ended."""
RECENT_KILL_S = 5.0
"""Maximum seconds between an increase of the kernel's counter and the exit of the killed
process."""
POLL_INTERVAL_S = 1.0
"""Minimum seconds between two reads of the kernel's counter."""
_KILLS = "oom_kill"


class OomKillMonitor:
    """Detector of OOM kills. It reads the kernel's counter for the control group that this process
    shares with its workers, or for the whole machine if the group has no counter. Call ``poll``
    every few seconds."""

    def __init__(self, mount: Path = MOUNT, proc: Path = Path("/proc")) -> None:
        self._mount = mount
        self._group_file = proc / "self" / "cgroup"
        names = ("memory.events", "memory.oom_control")
        candidates = (
            group / name
            for group in control_groups("memory", mount, self._group_file)
            for name in names
        )
        self._counter = next(
            (file for file in candidates if _KILLS in read_counters(file)), proc / "vmstat"
        )
        self._count = self._read_count()
        self._last_kill_at = float("-inf")
        self._next_poll_at = 0.0

    def poll(self, *, now: bool = False) -> None:
        """Read the counter, and record the time if it has increased. Unless ``now``, the counter is
        read at most every ``POLL_INTERVAL_S`` seconds."""
        if now or process_clock.now() >= self._next_poll_at:
            self._next_poll_at = process_clock.now() + POLL_INTERVAL_S
            count = self._read_count()
            if count > self._count:
                self._last_kill_at = process_clock.now()
            self._count = count

    def explain_sigkill(self, peak_bytes: int) -> str:
        """Return the cause of a SIGKILL that this process has not sent, if it was an OOM kill; else
        "".

        ``peak_bytes`` is the peak memory of the killed process in bytes.
        """
        self.poll(now=True)
        if process_clock.now() - self._last_kill_at > RECENT_KILL_S:
            return ""
        limit = memory_limit(self._mount, self._group_file)
        total = psutil.virtual_memory().total
        whose = "its group may take" if limit is not None and limit < total else "this machine has"
        available = min(total, limit or total)
        return (
            f"{OOM_KILLED}: it had {peak_bytes / 2**30:.1f} GiB at its peak, and {whose} "
            f"{available / 2**30:.1f}"
        )

    def _read_count(self) -> int:
        return read_counters(self._counter).get(_KILLS, 0)


PREPARE_TIMEOUT_S = 120.0
"""Seconds that worker starts are delayed by unfinished prepared imports. After that, workers import
the modules themselves."""
FORK_TIMEOUT_S = 15.0
"""Timeout in seconds for forking a worker."""
SERVER_EXIT_S = 0.1
"""Seconds within which the fork server must exit."""


class ForkedWorker:
    """A forked worker process. It has the part of the ``subprocess.Popen`` interface that this
    module uses."""

    def __init__(self, pid: int, pidfd: int, stdout: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self.peak_bytes = 0
        """Peak resident memory in bytes; 0 until the process has exited."""
        self._pidfd = pidfd

    def poll(self) -> int | None:
        """Return the exit code (negative if a signal ended the process), or None while the process
        runs."""
        if self.returncode is None:
            try:
                pid, status, usage = os.wait4(self.pid, os.WNOHANG)
                self.peak_bytes = usage.ru_maxrss * 1024
            except ChildProcessError:
                # Another part of the program has already reaped the process: report exit code 1.
                pid = self.pid
                status = 1 << 8
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit and return the exit code. Raises subprocess.TimeoutExpired after
        ``timeout`` seconds."""
        if self.poll() is None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            poller.poll(None if timeout is None else timeout * 1000)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class PreparedWorkers:
    """Handle of a process that imports ``modules`` and then forks workers. It runs from ``start``
    to ``stop``.

    The calling process must adopt orphans (``adopt_orphans``). Not thread-safe.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = tuple(modules)
        self._server: ForkServer | None = None
        self._ready = False
        self._give_up_at = 0.0

    def start(self) -> None:
        """Start the process unless it is running."""
        if self._server is not None and self._server.alive():
            return
        self.stop()
        arguments = [str(os.getpid()), *self._modules]
        self._server = ForkServer(
            "realhf.scheduler.prepared_server", None, None, arguments, options=()
        )
        self._server.start()
        self._give_up_at = process_clock.now() + PREPARE_TIMEOUT_S

    def is_importing(self) -> bool:
        """Return whether the imports are still running. If so, workers should be started later.

        Does not block. If the imports take longer than ``PREPARE_TIMEOUT_S``, the process is ended,
        and workers are started without it.
        """
        if self._server is None or self._ready:
            return False
        try:
            self._server.wait_ready(0.0)
            self._ready = True
        except TimeoutError:
            if process_clock.now() <= self._give_up_at:
                return True
            self.stop()
        except (OSError, RuntimeError, ValueError):
            self.stop()
        return False

    def fork(
        self,
        module: str,
        argv: Sequence[str],
        log: int,
        last_words: int,
        *,
        niceness: int,
        environment: Mapping[str, str],
        lines: bool,
    ) -> ForkedWorker | None:
        """Fork a process that runs ``python -m module *argv``. Return None if there is no prepared
        process.

        ``environment`` contains environment variables to change. Standard error and, unless
        ``lines`` is set, standard output are written to the descriptor ``log``. The worker's last
        words are written to the descriptor ``last_words``.
        """
        if self.is_importing() or self._server is None or not self._server.alive():
            return None
        request = {
            "module": module,
            "argv": [*argv],
            "niceness": niceness,
            "environment": dict(environment),
        }
        read, write = os.pipe() if lines else (-1, log)
        try:
            forked = self._server.fork(request, [write, log, last_words], module, FORK_TIMEOUT_S)
            if forked.pid < 0:
                os.close(forked.pidfd)
                raise ProcessLookupError(f"{module} has ended already")
        except (OSError, RuntimeError, ValueError):
            # If the server forks the worker after the timeout, the worker waits to be released,
            # which never happens, and ends with the server.
            self.stop()
            if lines:
                os.close(read)
            return None
        finally:
            if lines:
                os.close(write)
        return ForkedWorker(
            forked.pid, forked.pidfd, os.fdopen(read, "rb", buffering=0) if lines else None
        )

    def stop(self) -> None:
        """End the prepared process. Workers that were forked from it continue."""
        if self._server is not None:
            self._server.stop(SERVER_EXIT_S)
        self._server = None
        self._ready = False


_KILL_TIMEOUT_S = 5.0
"""Seconds to wait for killed processes to disappear."""


@dataclass
class _Child:
    """A worker process of the local scheduler."""

    spec: WorkerSpec
    process: subprocess.Popen[bytes] | ForkedWorker
    pidfd: int
    """Descriptor that becomes readable when the process exits; -1 once it is closed."""
    log: IO[bytes]
    log_from: int
    """Offset in bytes at which this worker's output begins in ``log``."""
    last_words: int
    """Descriptor to which the worker writes its last words, see ``create_last_words``; -1 once it
    is closed."""
    partial: bytes = b""
    """Output that was read after the last complete line."""
    cause: str = ""
    """Argument ``cause`` of ``kill``; "" if the worker was not killed."""
    descendants: set[psutil.Process] = field(default_factory=set)
    """Descendants that the worker had when it was told to end."""

    @property
    def lines(self) -> int | None:
        """Descriptor of the worker's event stream; None if it has none."""
        return self.process.stdout.fileno() if self.process.stdout else None


class LocalScheduler:
    """``Scheduler`` that runs workers as subprocesses on this machine. Exits are detected through
    pidfds, without polling.

    Set ``adopts_orphans`` if this process adopts its workers' orphans (see ``adopt_orphans``). All
    children of this process that remain at the end are then killed, except those that existed
    before the scheduler, those created in ``preserve_children``, and their descendants. So use it
    only in a process that starts no other children. If ``prepared`` is given, workers are forked
    from its process whenever that is available.
    """

    def __init__(
        self, *, adopts_orphans: bool = False, prepared: PreparedWorkers | None = None
    ) -> None:
        self._prepared = prepared
        self._oom_monitor = OomKillMonitor()
        self._children: dict[str, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._adopts_orphans = adopts_orphans
        self._preserved = set(psutil.Process().children()) if adopts_orphans else set()
        """Children of this process that are not workers and must not be killed."""

    def start(self, spec: WorkerSpec) -> None:
        """See ``Scheduler``."""
        previous = self._children.get(spec.name)
        if previous is not None:
            if previous.process.poll() is None:
                raise ValueError(f"worker {spec.name} was started already")
            self._kill_orphans(previous)
        environment = None if spec.gpu is None else restrict_to_gpus((spec.gpu, *spec.further_gpus))
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        log = spec.log.open("ab")
        log_from = log.tell()
        last_words = create_last_words()
        try:
            process = self._fork(spec, log, last_words, environment) or _spawn(
                spec, log, last_words, environment
            )
        except BaseException:
            os.close(last_words)
            log.close()
            raise
        child = _Child(spec, process, os.pidfd_open(process.pid), log, log_from, last_words)
        self._children[spec.name] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        if child.lines is not None:
            os.set_blocking(child.lines, False)
            self._selector.register(child.lines, selectors.EVENT_READ, child)

    def _fork(
        self, spec: WorkerSpec, log: IO[bytes], last_words: int, environment: dict[str, str] | None
    ) -> ForkedWorker | None:
        if self._prepared is None:
            return None
        changes = {VISIBLE: environment[VISIBLE]} if environment is not None else {}
        return self._prepared.fork(
            spec.module,
            spec.argv,
            log.fileno(),
            last_words,
            niceness=spec.niceness,
            environment=changes,
            lines=spec.events,
        )

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """See ``Scheduler``."""
        self._oom_monitor.poll()
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
            child.descendants |= _descendants(child.process.pid)
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
        deadline = process_clock.now() + grace_s
        for child in alive:
            _wait_for_exit(child, deadline - process_clock.now())
        self._kill_leftovers()
        for child in self._children.values():
            self._close(child)
        self._children.clear()

    @contextlib.contextmanager
    def preserve_children(self) -> Iterator[None]:
        """Context manager that protects children of this process which are created in its block
        from being killed at the end."""
        before = set(psutil.Process().children())
        try:
            yield
        finally:
            self._preserved |= set(psutil.Process().children()) - before

    def watch(self, descriptor: int) -> None:
        """Make ``wait`` return, possibly without events, when this descriptor becomes readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor."""
        self._selector.unregister(descriptor)

    def terminate(self, name: str) -> None:
        """Send SIGTERM to a worker if it is running. Its exit is reported by ``wait`` as usual."""
        child = self._children.get(name)
        if child is not None and child.process.poll() is None:
            child.descendants |= _descendants(child.process.pid)
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
        victims = child.descendants | _descendants(child.process.pid)
        child.process.kill()
        _kill(victims)

    def _kill_orphans(self, child: _Child) -> None:
        """Kill the processes that an ended worker has left behind, such as servers that it had
        started."""
        workers = {other.process.pid for other in self._children.values()}
        victims = {
            process
            for process in psutil.process_iter()
            if _session(process.pid) == child.process.pid
        }
        if self._adopts_orphans:
            adopted = set(psutil.Process().children()) - self._preserved
            victims |= {process for process in adopted if process.pid not in workers}
        victims |= {relative for process in victims for relative in _descendants(process.pid)}
        _kill(victims)
        psutil.wait_procs(victims, timeout=_KILL_TIMEOUT_S)

    def _kill_leftovers(self) -> None:
        sessions = {child.process.pid for child in self._children.values()}
        victims = {relative for child in self._children.values() for relative in child.descendants}
        victims |= {
            process for process in psutil.process_iter() if _session(process.pid) in sessions
        }
        for child in self._children.values():
            if child.process.poll() is None:
                victims |= _descendants(child.process.pid)
        if self._adopts_orphans:
            preserved = {
                relative for process in self._preserved for relative in _descendants(process.pid)
            }
            victims |= _descendants(os.getpid()) - self._preserved - preserved
        _kill(victims)
        for child in self._children.values():
            _wait_for_exit(child, _KILL_TIMEOUT_S)
        psutil.wait_procs(victims, timeout=_KILL_TIMEOUT_S)

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
        exit_code = child.process.wait(_KILL_TIMEOUT_S)
        last_words = read_last_words(child.last_words)
        self._close(child)
        cause = ""
        if exit_code == -signal.SIGKILL:
            cause = child.cause or self._oom_monitor.explain_sigkill(peak_bytes)
        return WorkerExit(
            child.spec.name, exit_code, child.spec.log, child.log_from, cause, last_words
        )

    def _close(self, child: _Child) -> None:
        """Close the descriptors and the log of an ended child."""
        watched = self._selector.get_map()
        for descriptor in (child.pidfd, child.lines):
            if descriptor is not None and descriptor >= 0 and descriptor in watched:
                self._selector.unregister(descriptor)
        if child.pidfd >= 0:
            os.close(child.pidfd)
            child.pidfd = -1
        if child.last_words >= 0:
            os.close(child.last_words)
            child.last_words = -1
        child.log.close()
        if child.process.stdout and child.process.returncode is not None:
            child.process.stdout.close()
            child.process.stdout = None


def _spawn(
    spec: WorkerSpec, log: IO[bytes], last_words: int, environment: dict[str, str] | None
) -> subprocess.Popen[bytes]:
    """Start a worker as a new process in its own session."""
    start = [str(os.getpid()), str(spec.niceness), spec.module, *spec.argv]
    return subprocess.Popen(
        [sys.executable, "-m", "realhf.scheduler.child", *start],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if spec.events else log,
        stderr=log,
        start_new_session=True,
        pass_fds=[last_words],
        env={**(os.environ if environment is None else environment), LAST_WORDS: str(last_words)},
    )


def _peak_bytes(process: subprocess.Popen[bytes] | ForkedWorker) -> int:
    """Reap an ended process and return its peak memory in bytes; 0 if it was already reaped
    elsewhere."""
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


def _wait_for_exit(child: _Child, within_s: float) -> bool:
    """Wait up to ``within_s`` seconds for a worker's exit, and return whether it has ended."""

    def wait(left_s: float) -> bool:
        try:
            child.process.wait(left_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    return process_clock.wait(wait, within_s)


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
    """Options of the local scheduler: none."""


DEFINITION = SchedulerDefinition(LocalOptions, lambda options: LocalScheduler(adopts_orphans=True))
