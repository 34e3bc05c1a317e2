"""Fork server: a zygote process that imports what its children need and forks them on request,
which is faster than starting programs and takes less memory.

The owner (``ForkServer``) and the zygote exchange JSON datagrams over a socketpair; file
descriptors travel with them as ancillary data. Every request has a number, which its reply repeats,
so that a late reply is not taken for the reply to another request. A child starts its work only
once the owner confirms that it holds the child's pidfd. If anything fails before that, the child
exits, so no child runs that the owner cannot kill.

Children start with a single thread, share the zygote's memory copy-on-write, and die with the
zygote. The zygote exits when the owner's end of the socketpair closes, so nothing is left behind
even if the owner is killed by SIGKILL. An owner that adopts orphans may instead ask for children
that become its own, so that it receives their exit codes: these are forked twice and outlive the
zygote.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from realhf.base import process_clock
from realhf.base.process import share_niceness
from realhf.env.containment import sandbox

_MAX_DATAGRAM = 64 * 1024
"""Maximum bytes of a datagram between the owner and the zygote."""
_RESTART_S = 30.0
"""Timeout in seconds of starting the zygote again after it has died."""
_KILL_WAIT_S = 3.0
"""Seconds to wait for the zygote to exit after SIGKILL."""
_STATUS_BYTES = 8192
"""Bytes read of /proc/PID/status; enough for all of it."""
_BEGIN = b"b"
"""Byte written to a child's pipe when it may start its work."""
_NO_REQUEST = -1
"""Request number that belongs to no request; a child that waits for its start signal exits when it
receives it."""

Child = Callable[[dict[str, Any], list[int]], None]
"""Function run in the forked process with (request, descriptors); the process exits when it
returns."""


@dataclass
class ForkedProcess:
    """A child of a zygote, held by a pidfd, so that another process that reuses its pid is never
    mistaken for it."""

    pid: int
    """Pid as the owner sees it; -1 if the process had already exited when it was read."""
    pidfd: int
    """Descriptor of the process; -1 after ``kill``."""
    name: str
    """Description of the process, for error messages."""
    _status_file: int = -1
    """Descriptor of /proc/PID/status; -1 as long as it is not open."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Held while a descriptor is used or closed, since one thread may ask while another kills. A
    closed descriptor's number may belong to another file."""

    def alive(self) -> bool:
        """Return whether the process runs and has not been sent a SIGKILL. A process with threads
        takes milliseconds to exit, so a pending SIGKILL counts as the end."""
        with self._lock:
            if self.pidfd < 0:
                return False
            status = self._status()
            return not (_is_ending(status) if status else _is_readable(self.pidfd, 0))

    def stopped(self) -> bool:
        """Return whether the process is stopped by a signal (state T), until SIGCONT."""
        with self._lock:
            return self.pidfd >= 0 and _STOPPED.search(self._status()) is not None

    def _status(self) -> bytes:
        """Return the contents of /proc/PID/status; b"" if the process is gone or this one has too
        many files open.

        The file stays open, since it is read before each command. It belongs to the process, not to
        its pid: it cannot be read once the process is gone, whoever gets the pid.
        """
        try:
            if self._status_file < 0:
                opened = os.open(f"/proc/{self.pid}/status", os.O_RDONLY)
                if _is_readable(self.pidfd, 0):  # gone, so the pid may have been another's
                    os.close(opened)
                    return b""
                self._status_file = opened
            return os.pread(self._status_file, _STATUS_BYTES, 0)
        except OSError:
            return b""

    def kill(self, timeout_s: float = 2.0) -> None:
        """Send SIGKILL and wait until the process is gone. Idempotent.

        Raises TimeoutError, which names the process, if it has not exited within ``timeout_s``
        seconds.
        """
        if self.pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        if not _is_readable(self.pidfd, timeout_s):
            raise TimeoutError(
                f"{self.name} (pid {self.pid}) did not end within {timeout_s} s of SIGKILL"
            )
        with self._lock:
            os.close(self.pidfd)
            self.pidfd = -1
            if self._status_file >= 0:
                os.close(self._status_file)
                self._status_file = -1


class ForkServer:
    """Owner's side of a zygote: starts it and asks it for children. ``fork`` may be called from
    several threads.

    module: run as ``python -m module <control fd> *arguments``; it must call ``serve_forks``. log:
    file for the zygote's stdout and stderr; None inherits the owner's. environment: environment
    variables; None inherits the owner's. prefix: words put before ``python`` in the command line,
    of a sandbox program that passes descriptors on. options: options of the Python interpreter.
    """

    def __init__(
        self,
        module: str,
        log: IO[bytes] | None,
        environment: dict[str, str] | None,
        arguments: Sequence[str] = (),
        prefix: Sequence[str] = (),
        options: Sequence[str] = ("-P", "-B"),
    ) -> None:
        self._module = module
        self._log = log
        self._environment = environment
        self._arguments = tuple(arguments)
        self._command = [*prefix, sys.executable, *options, "-m", module]
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0

    def start(self) -> None:
        """Start the zygote without waiting for it; see ``wait_ready``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=self._environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        share_niceness(self._process.pid)
        self._control = ours

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the greeting that the zygote sends once its imports are done, and return it.

        Raises TimeoutError after ``timeout_s`` seconds, and RuntimeError if the zygote exits.
        """
        return self._receive(timeout_s)[0]

    def fork(
        self, request: dict[str, Any], fds: Sequence[int], name: str, timeout_s: float = 15.0
    ) -> ForkedProcess:
        """Fork a child with ``request`` and copies of ``fds``; restart the zygote first if it has
        died.

        Raises TimeoutError after ``timeout_s`` seconds, or RuntimeError with the reason; in both
        cases no child runs.
        """
        with self._lock:
            if self._process is None or self._control is None:
                raise RuntimeError(f"{self._module} is not running")
            if self._process.poll() is not None:
                self._control.close()
                self.start()
                self.wait_ready(_RESTART_S)
            self._number += 1
            child: ForkedProcess | None = None
            try:
                socket.send_fds(
                    self._control,
                    [json.dumps([self._number, len(fds), request]).encode()],
                    list(fds),
                )
                child = self._receive_child(name, timeout_s)
                self._control.send(json.dumps([self._number]).encode())
            except BaseException as error:
                if child is not None:
                    os.close(child.pidfd)  # the child never starts its work
                with contextlib.suppress(OSError):
                    self._control.send(json.dumps([_NO_REQUEST]).encode())
                if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                    raise RuntimeError(f"{self._module} could not fork {name}: {error}") from error
                raise
        return child

    def _receive_child(self, name: str, timeout_s: float) -> ForkedProcess:
        """Return the child for the latest request; the child still waits for its start signal.

        Replies to older requests, which timed out, are discarded; their children exit without
        having started.
        """
        deadline = process_clock.now() + timeout_s
        while True:
            reply, descriptors = self._receive(max(0.0, deadline - process_clock.now()))
            if reply.get("number") == self._number:
                break
            for pidfd in descriptors:
                os.close(pidfd)
        if not descriptors:
            reason = (
                reply.get("error")
                or "its descriptor was lost: this process has too many files open"
            )
            raise RuntimeError(f"{self._module} could not fork {name}: {reason}")
        try:
            return ForkedProcess(pid=_read_pid(descriptors[0]), pidfd=descriptors[0], name=name)
        except BaseException:
            os.close(descriptors[0])
            raise

    def _receive(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        """Return the next datagram of the zygote, with the descriptors sent along.

        Raises TimeoutError, and RuntimeError if the zygote has exited.
        """
        assert self._control is not None
        if not _is_readable(self._control.fileno(), timeout_s):
            raise TimeoutError(f"waited {timeout_s:.3g} s for {self._module}")
        data, fds, _, _ = socket.recv_fds(self._control, _MAX_DATAGRAM, 1)
        if not data:
            raise RuntimeError(f"{self._module} ended while it was needed")
        return json.loads(data), fds

    def alive(self) -> bool:
        """Return whether the zygote runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Pid of the zygote; -1 before ``start`` and after ``stop``."""
        return self._process.pid if self._process else -1

    def stop(self, timeout_s: float = 3.0) -> None:
        """Stop the zygote, and with it all children except those that the owner adopted.
        Idempotent.

        The zygote is killed if it has not exited after ``timeout_s`` seconds.
        """
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_KILL_WAIT_S)
            self._process = None


def _is_readable(fd: int, timeout_s: float) -> bool:
    """Return whether ``fd`` becomes readable within ``timeout_s`` seconds.

    Uses poll, because select supports no descriptor above 1023 and a server of many sessions has
    more.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(process_clock.wait(lambda left_s: poll.poll(left_s * 1000), timeout_s))


_ENDING = re.compile(
    rb"^(?:State:\s+[ZX]|S(?:ig|hd)Pnd:\s+[0-9a-f]*[13579bdf][0-9a-f]{2}$)", re.MULTILINE
)
"""Matches /proc/PID/status of a process that is a zombie or dead, or that has a pending SIGKILL
(the ninth bit of the pending signals)."""


_STOPPED = re.compile(rb"^State:\s+T", re.MULTILINE)
"""Matches /proc/PID/status of a process that was stopped by a signal. State ``t``, a stop by a
debugger, does not count, because it lasts only a moment."""


def _is_ending(status: bytes) -> bool:
    """Return whether a process, given its /proc/PID/status, has exited or is about to. The kernel
    turns every signal that terminates a process into a pending SIGKILL."""
    return _ENDING.search(status) is not None


def _read_pid(pidfd: int) -> int:
    """Return a process's pid as seen by this process; -1 if the process has exited. The zygote sees
    another number if it is in its own pid namespace."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        return next(int(line.split()[1]) for line in info if line.startswith("Pid:"))


def serve_forks(
    control: socket.socket, greeting: dict[str, Any], child: Child, owner: int = 0
) -> None:
    """Run the loop of the zygote: fork ``child(request, fds)`` for each request, until the owner's
    end of ``control`` closes.

    owner: pid of a process that adopts orphans; the children then become that process's own, each
    in its own session. 0: children stay the zygote's. Must be called while the process has a single
    thread.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.send(json.dumps(greeting).encode())
    waiting_child: tuple[int, int] | None = None
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MAX_DATAGRAM, 8)
        number, *arguments = json.loads(data) if data else (_NO_REQUEST,)
        if waiting_child is not None:
            # The child starts at the next message with its number; any other makes it exit.
            if (number, arguments) == (waiting_child[0], []):
                with contextlib.suppress(BrokenPipeError):
                    os.write(waiting_child[1], _BEGIN)
            os.close(waiting_child[1])
            waiting_child = None
        if not data:
            return
        if arguments:
            waiting_child = _fork_child(
                control, number, arguments[1], fds, arguments[0], child, owner
            )
        for fd in fds:
            os.close(fd)


def _fork_child(
    control: socket.socket,
    number: int,
    request: dict[str, Any],
    fds: list[int],
    expected: int,
    child: Child,
    owner: int,
) -> tuple[int, int] | None:
    """Fork a child and send its pidfd to the owner.

    Return (request number, write end of the pipe on which the child waits for its start signal), or
    None after a failure, which is reported to the owner. If the pidfd cannot be sent, the child
    exits.
    """
    pipe: tuple[int, ...] = ()
    try:
        if len(fds) != expected:
            raise OSError("descriptors were lost: the zygote has too many files open")
        zygote = os.getpid()
        pipe = wait_pipe, start_pipe = os.pipe()
        pid = _fork_twice() if owner else os.fork()
        if pid == 0:
            os.close(start_pipe)
            _become_child(
                control, owner or zygote, request, fds, child, wait_pipe, adopted=bool(owner)
            )
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(control, [json.dumps({"number": number}).encode()], [pidfd])
        finally:
            os.close(pidfd)
    except OSError as error:
        for fd in pipe:
            os.close(fd)
        with contextlib.suppress(OSError):
            control.send(json.dumps({"number": number, "error": str(error)}).encode())
        return None
    os.close(wait_pipe)
    return number, start_pipe


def _fork_twice() -> int:
    """Fork a process whose parent has exited, so that the owner adopts it. Return its pid; 0 in the
    process itself. Raises OSError."""
    read_end, write_end = os.pipe()
    with open(read_end, "rb", buffering=0) as reader, open(write_end, "wb", buffering=0) as writer:
        intermediate = os.fork()
        if intermediate == 0:
            pid = -1
            try:
                pid = os.fork()
                if pid > 0:
                    writer.write(str(pid).encode())
            finally:
                if pid != 0:
                    os._exit(0)
            return 0
        writer.close()
        # SIGCHLD is ignored, so waitpid only waits for the intermediate process to exit; its child
        # is then adopted by the owner.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(intermediate, 0)
        pid = int(reader.read(32) or -1)
    if pid < 0:
        raise OSError("the process cannot be made")
    return pid


def _become_child(
    control: socket.socket,
    parent: int,
    request: dict[str, Any],
    fds: list[int],
    child: Child,
    wait_pipe: int,
    *,
    adopted: bool,
) -> None:
    """Wait for the start signal in the forked process, then run ``child`` and exit. The exit code
    is 0 only if ``child`` returned."""
    exit_code = 1
    try:
        if not adopted:
            sandbox.die_with_parent()
        may_start = os.read(wait_pipe, 1) == _BEGIN
        os.close(wait_pipe)
        if may_start and os.getppid() == parent:
            if adopted:
                os.setsid()
            else:
                os.setpgid(0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            child(request, fds)
            exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(exit_code)
