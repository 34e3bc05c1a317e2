"""Starts processes fast and cheaply: a zygote imports what its children need and forks them on
request.

The owner (``ForkServer``) and the zygote speak JSON datagrams over a socketpair; descriptors travel
beside them. A request has a number and its reply repeats it: a late reply is never taken for
another's. A child begins once the owner says that it holds its descriptor, and ends where anything
fails before, so there is none that nobody can end. Children are born single-threaded, share the
zygote's memory copy-on-write, and die with it; the zygote ends when the owner's end of the
socketpair closes, so SIGKILL of the owner leaves nothing behind. Where the owner adopts orphans it
may have the children for its own, with their exit codes: they are forked twice, and outlive the
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
from dataclasses import dataclass
from typing import IO, Any

from realhf.base import process_clock
from realhf.base.process import share_niceness
from realhf.env.containment import sandbox

_MAX_DATAGRAM = 64 * 1024
_RESTART_S = 30.0
_KILLED_S = 3.0
_STATUS_BYTES = 8192
_BEGIN = b"b"
_NOBODY = -1
"""Number of no request: a child that waits for its beginning ends."""

Child = Callable[[dict[str, Any], list[int]], None]
"""Runs in the forked process with its request and descriptors; the process ends when it returns."""


@dataclass
class ForkedProcess:
    """Holds a child of a zygote by a pidfd: its pid can never be mistaken for another process's."""

    pid: int
    pidfd: int
    name: str

    def alive(self) -> bool:
        """Whether the process runs, and nobody killed it: one with threads needs milliseconds to
        end."""
        if self.pidfd < 0 or _readable(self.pidfd, 0):
            return False
        return not _is_ending(self._status()) and not _readable(self.pidfd, 0)

    def stopped(self) -> bool:
        """Whether a signal keeps the process from running, until another one lets it go on."""
        return _STOPPED.search(self._status()) is not None

    def _status(self) -> bytes:
        """Return what /proc says of the process, nothing of one that is gone."""
        try:
            status = os.open(f"/proc/{self.pid}/status", os.O_RDONLY)
        except OSError:
            return b""
        try:
            return os.read(status, _STATUS_BYTES)
        except OSError:
            return b""
        finally:
            os.close(status)

    def kill(self, timeout_s: float = 2.0) -> None:
        """Send SIGKILL and wait until the process is gone. Idempotent. Raises TimeoutError naming
        the process."""
        if self.pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        if not _readable(self.pidfd, timeout_s):
            raise TimeoutError(
                f"{self.name} (pid {self.pid}) did not end within {timeout_s} s of SIGKILL"
            )
        os.close(self.pidfd)
        self.pidfd = -1


class ForkServer:
    """Starts a zygote and asks it for children, on the owner's side. ``module`` is run as ``python
    -m module <control fd> *arguments`` and calls ``serve_forks``; ``prefix`` goes before
    ``python``: the words of a sandbox program that hands descriptors on. Without ``log`` and
    ``environment`` it has the owner's; ``options`` are those of Python."""

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
        """Begin to start the zygote; ``wait_ready`` waits for it."""
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
        """Wait for the zygote's greeting, which it sends once its imports are done, and return
        it."""
        return self._receive(timeout_s)[0]

    def fork(
        self, request: dict[str, Any], fds: Sequence[int], name: str, timeout_s: float = 15.0
    ) -> ForkedProcess:
        """Fork a child with ``request`` and copies of ``fds``. Raises TimeoutError, or RuntimeError
        with the reason; no child runs then."""
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
                child = self._child(name, timeout_s)
                self._control.send(json.dumps([self._number]).encode())
            except BaseException as error:
                if child is not None:
                    os.close(child.pidfd)  # it never begins
                with contextlib.suppress(OSError):
                    self._control.send(json.dumps([_NOBODY]).encode())
                if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                    raise RuntimeError(f"{self._module} could not fork {name}: {error}") from error
                raise
        return child

    def _child(self, name: str, timeout_s: float) -> ForkedProcess:
        """Return the child of the latest request, which does not run yet. Answers to older ones,
        given up meanwhile, are thrown away: their children never run."""
        deadline = process_clock.now() + timeout_s
        while True:
            reply, received = self._receive(max(0.0, deadline - process_clock.now()))
            if reply.get("number") == self._number:
                break
            for pidfd in received:
                os.close(pidfd)
        if not received:
            reason = (
                reply.get("error")
                or "its descriptor was lost: this process has too many files open"
            )
            raise RuntimeError(f"{self._module} could not fork {name}: {reason}")
        try:
            return ForkedProcess(pid=_pid_of(received[0]), pidfd=received[0], name=name)
        except BaseException:
            os.close(received[0])
            raise

    def _receive(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        assert self._control is not None
        if not _readable(self._control.fileno(), timeout_s):
            raise TimeoutError(f"waited {timeout_s:.3g} s for {self._module}")
        data, fds, _, _ = socket.recv_fds(self._control, _MAX_DATAGRAM, 1)
        if not data:
            raise RuntimeError(f"{self._module} ended while it was needed")
        return json.loads(data), fds

    def alive(self) -> bool:
        """Whether the zygote runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Pid of the zygote; -1 before ``start``."""
        return self._process.pid if self._process else -1

    def stop(self, timeout_s: float = 3.0) -> None:
        """End the zygote, and with it all its children. Idempotent."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_KILLED_S)
            self._process = None


def _readable(fd: int, timeout_s: float) -> bool:
    """Return whether ``fd`` becomes readable. ``select`` will not do: it knows no descriptor beyond
    1023, and a server of many sessions has more."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(process_clock.wait(lambda left_s: poll.poll(left_s * 1000), timeout_s))


_ENDING = re.compile(
    rb"^(?:State:\s+[ZX]|S(?:ig|hd)Pnd:\s+[0-9a-f]*[13579bdf][0-9a-f]{2}$)", re.MULTILINE
)
"""A state that is an end, or pending signals with the ninth bit, SIGKILL's."""


_STOPPED = re.compile(rb"^State:\s+T", re.MULTILINE)
"""A stop by a signal; a debugger's, ``t``, is over in a moment."""


def _is_ending(status: bytes) -> bool:
    """Return whether a process, by its status in /proc, has a SIGKILL before it or behind it. The
    kernel turns every signal that ends a process into one."""
    return _ENDING.search(status) is not None


def _pid_of(pidfd: int) -> int:
    """Return the pid of the process as the owner sees it: the zygote may live in a pid namespace of
    its own. -1 when it ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        return next(int(line.split()[1]) for line in info if line.startswith("Pid:"))


def serve_forks(
    control: socket.socket, greeting: dict[str, Any], child: Child, owner: int = 0
) -> None:
    """Run the zygote's loop: fork ``child(request, fds)`` per datagram until the owner's end
    closes. With ``owner``, the pid of a process that adopts orphans, the children become its own,
    each in a session of its own.

    Must be called with a single thread.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.send(json.dumps(greeting).encode())
    go: tuple[int, int] | None = None
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MAX_DATAGRAM, 8)
        number, *asked = json.loads(data) if data else (_NOBODY,)
        if go is not None:  # a child waits for its beginning; whatever else comes, it ends
            if (number, asked) == (go[0], []):
                with contextlib.suppress(BrokenPipeError):
                    os.write(go[1], _BEGIN)
            os.close(go[1])
            go = None
        if not data:
            return
        if asked:
            go = _forked(control, number, asked[1], fds, asked[0], child, owner)
        for fd in fds:
            os.close(fd)


def _forked(
    control: socket.socket,
    number: int,
    request: dict[str, Any],
    fds: list[int],
    expected: int,
    child: Child,
    owner: int,
) -> tuple[int, int] | None:
    """Fork a child and send its descriptor; returns the number of the request and the pipe that the
    child waits at. A child that nobody could end does not stay."""
    pipe: tuple[int, ...] = ()
    try:
        if len(fds) != expected:
            raise OSError("descriptors were lost: the zygote has too many files open")
        zygote = os.getpid()
        pipe = wait, go = os.pipe()
        pid = _fork_twice() if owner else os.fork()
        if pid == 0:
            os.close(go)
            _become_child(control, owner or zygote, request, fds, child, wait, adopted=bool(owner))
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
    os.close(wait)
    return number, go


def _fork_twice() -> int:
    """Fork a process whose parent has ended; returns its pid, 0 in it. Raises OSError."""
    told, tell = os.pipe()
    with open(told, "rb", buffering=0) as reader, open(tell, "wb", buffering=0) as writer:
        between = os.fork()
        if between == 0:
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
        with contextlib.suppress(
            ChildProcessError
        ):  # it is not collected, but waited for: then its child is adopted
            os.waitpid(between, 0)
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
    wait: int,
    *,
    adopted: bool,
) -> None:
    code = 1
    try:
        if not adopted:
            sandbox.die_with_parent()
        begun = os.read(wait, 1) == _BEGIN
        os.close(wait)
        if begun and os.getppid() == parent:
            if adopted:
                os.setsid()
            else:
                os.setpgid(0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            child(request, fds)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
