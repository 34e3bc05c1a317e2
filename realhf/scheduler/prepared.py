"""Starts workers out of a process that has imported what they need: they begin at once and share its memory.

Importing PyTorch takes a worker two seconds of CPU, and more where others compute. ``PreparedWorkers`` does it once for
all workers of a host, while the host registers; see ``prepared_server`` for the other side.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from realhf.scheduler.prepared_server import MOST_BYTES

PREPARED_WITHIN_S = 120.0
"""How long workers wait for the imports; then they import for themselves."""
FORKED_WITHIN_S = 15.0
END_S = 2.0


class ForkedWorker:
    """Is a worker, seen from its parent, as far as ``subprocess.Popen`` is needed for one."""

    def __init__(self, pid: int, stdout: IO[bytes] | None) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self.peak_bytes = 0
        self._pidfd = os.pidfd_open(pid)

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
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._until = 0.0

    def begin(self) -> None:
        """Start the process; one that runs is kept."""
        if self._process is not None and self._process.poll() is None:
            return
        self.end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "realhf.scheduler.prepared_server", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *self._modules],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._control, self._until = ours, time.monotonic() + PREPARED_WITHIN_S

    def importing(self) -> bool:
        """Return whether workers should be started a little later. Does not wait; gives up after
        ``PREPARED_WITHIN_S``."""
        if self._control is None or self._ready:
            return False
        if not _readable(self._control, 0.0):
            if time.monotonic() > self._until:
                self.end()
            return self._control is not None
        self._ready = bool(self._received(0.0))
        return False

    def fork(
        self, module: str, argv: Sequence[str], log: int, *, niceness: int, environment: Mapping[str, str], lines: bool
    ) -> ForkedWorker | None:
        """Start ``python -m module *argv`` with these changes of its environment; its standard error, and its output
        too unless ``lines`` is set, go to the descriptor ``log``. None when there is no prepared process, and it
        has to be started otherwise."""
        if self.importing() or self._control is None or not self._ready:
            return None
        request = {"module": module, "argv": [*argv], "niceness": niceness, "environment": dict(environment)}
        with contextlib.ExitStack() as stack:
            go, may_go = _pipe(stack)
            read, write = _pipe(stack) if lines else (-1, log)
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], [write, log, go])
                worker = ForkedWorker(int(self._received(FORKED_WITHIN_S)["pid"]), None)
                os.write(may_go, b"!")
            except (OSError, KeyError, ValueError):
                self.end()  # a worker that comes late has no one who lets it begin
                return None
            if lines:
                worker.stdout = os.fdopen(os.dup(read), "rb", buffering=0)
            return worker

    def end(self) -> None:
        """End the process; workers go on."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None
        self._ready = False

    def _received(self, timeout_s: float) -> dict[str, Any]:
        """Return the next message, an empty one when none comes or the process has ended."""
        if self._control is None or not _readable(self._control, timeout_s):
            return {}
        try:
            data = self._control.recv(MOST_BYTES)
            found = json.loads(data) if data else None
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict):
            self.end()
            return {}
        return found


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """Return the ends of a pipe, which are closed with ``stack``."""
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


def _readable(control: socket.socket, timeout_s: float) -> bool:
    watch = select.poll()
    watch.register(control, select.POLLIN)
    return bool(watch.poll(timeout_s * 1000))
