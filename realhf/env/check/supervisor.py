"""Supervision of a check in a child process, which is ended at its deadline, whatever the
environment's code does."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from realhf.base import process_clock
from realhf.env.check.calls import UserCode
from realhf.env.check.report import (
    ABOUT,
    DUMP,
    ENDED,
    EXIT,
    FINDING,
    FOLDER,
    NOW,
    ORDER,
    Finding,
    Order,
    quote,
)

_GRACE_S = 3.0
"""Seconds to wait for an answer beyond the time limit of a call; within these the child itself
reports a call that is late."""
_START_S = 30.0
"""Seconds that the child may take to start."""
_DUMP_S = 5.0
"""Seconds to wait for the stack dump of a silent child. They are generous, because the location is
the most helpful part of a report and a busy machine is slow."""
_EXIT_S = 3.0
"""Seconds that the child may take to exit after its last report."""
_OUTPUT_BYTES = 8192
"""Number of bytes of the child's output that are kept."""
_READ_BYTES = 1 << 16
"""Maximum number of bytes of one read."""


class CheckSupervisor:
    """Supervisor of the child process for one ``order``.

    ``on_event`` is called with every event as a list, including findings that are only known from
    the way the child ended.
    """

    def __init__(self, order: Order, code: UserCode, on_event: Callable[[list[Any]], None]) -> None:
        self._order = order
        self._code = code
        self._on_event = on_event
        self._check = ""
        self._call = "its start"
        self._task = ""
        self._exit: tuple[int, str] | None = None
        self._is_complete = False
        self._silent_at = 0.0
        self._partial_line = b""
        self._output = b""

    def run(self, limit_s: float, hash_seed: int) -> None:
        """Run the child process to its end, for at most ``limit_s`` seconds. When this returns or
        raises, the child no longer exists.

        ``hash_seed`` sets the child's hash seed, and with it the iteration order of its sets.
        """
        with tempfile.TemporaryDirectory(prefix="realhf-check-") as folder, ExitStack() as stack:
            (Path(folder) / ORDER).write_text(json.dumps(asdict(self._order)), encoding="utf-8")
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "realhf.env.check.checker", str(writing), folder],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(writing,),
                    env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
                    start_new_session=True,
                )
            finally:
                os.close(writing)
            stack.enter_context(process)
            stack.callback(_kill_descendants, process)
            self._watch(process, reading, Path(folder) / DUMP, process_clock.now() + limit_s)

    def _watch(
        self, process: subprocess.Popen[bytes], reading: int, dump: Path, limit: float
    ) -> None:
        self._silent_at = process_clock.now() + _START_S
        assert process.stdout is not None
        exited = os.pidfd_open(process.pid)
        printed = process.stdout.fileno()
        try:
            with selectors.DefaultSelector() as selector:
                handlers = {reading: self._parse_lines, printed: self._record_output}
                for file in (*handlers, exited):
                    selector.register(file, selectors.EVENT_READ, handlers.get(file))
                while (now := process_clock.now()) < limit:
                    if exited in self._read(selector, max(0.0, min(self._silent_at, limit) - now)):
                        _kill_descendants(process)
                        # The child's own children may hold the pipes open, so only the data written
                        # so far is read, without waiting.
                        while self._read(selector, 0) - {exited}:
                            pass
                        self._report_end(process.returncode, dump)
                        return
                    if now >= self._silent_at:
                        # Events that arrived while this process was suspended have been read.
                        # Output is not an event, so it does not extend the deadline.
                        break
            self._report_silence(process, dump, late=process_clock.now() >= limit)
        finally:
            os.close(exited)

    def _read(self, selector: selectors.BaseSelector, wait_s: float) -> set[int]:
        """Read the data that has arrived; return the descriptors that were ready."""
        ready = set()
        for key, _ in selector.select(wait_s):
            ready.add(key.fd)
            if key.data is not None:
                if data := os.read(key.fd, _READ_BYTES):
                    key.data(data)
                else:
                    selector.unregister(key.fd)
        return ready

    def _record_output(self, data: bytes) -> None:
        self._output = (self._output + data)[-_OUTPUT_BYTES:]

    def _parse_lines(self, data: bytes) -> None:
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            # The environment may write to any descriptor of its process.
            with suppress(json.JSONDecodeError):
                self._handle_event(json.loads(line))

    def _handle_event(self, event: list[Any]) -> None:
        kind, *values = event
        if kind == NOW:
            self._check, self._call, self._task, limit_s = values
            self._silent_at = process_clock.now() + limit_s + _GRACE_S
        elif kind == ABOUT:
            [properties] = values
            if FOLDER in properties:
                self._code.add(properties[FOLDER])
            self._exit = properties.get(EXIT, self._exit)
            if ENDED in properties:
                self._is_complete = True
                self._silent_at = process_clock.now() + _EXIT_S
        self._on_event(event)

    def _report_finding(
        self, check: str, problem: str, fix: str, where: str, task: str = ""
    ) -> None:
        self._on_event([FINDING, asdict(Finding(check, problem, fix, where, task))])

    def _report_end(self, status: int, dump: Path) -> None:
        """Report the end of the child process if it ended early or with an error."""
        if self._is_complete and status == 0:
            return
        where = self._exit[1] if self._exit else self._code.find_in_dump(_read_dump(dump))
        exit_reason = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        if self._is_complete:
            problem = f"the process ended with {exit_reason} after all was closed"
            fix = "Stop in close what still runs"
        else:
            cause = f"os._exit({self._exit[0]})" if self._exit else exit_reason
            problem = f"the process of the environment died by {cause} in {self._call}"
            fix = "It would take all episodes of a worker with it; raise an exception instead"
        output = self._output.decode(errors="replace").strip().splitlines()
        if output and not where:
            problem = f"{problem}; it printed last: {quote(output[-1], 160)}"
        self._report_finding("dies", problem, fix, where, self._task)

    def _report_silence(self, process: subprocess.Popen[bytes], dump: Path, *, late: bool) -> None:
        """Report a child process that exceeded a time limit."""
        where = self._locate(process, dump)
        if self._is_complete:
            problem = f"the process does not end within {_EXIT_S:g} s after everything was closed"
            self._report_finding(
                "exit", problem, "Make threads daemons, or end them in close", where
            )
        elif late:
            fewer = "a smaller --most" if self._order.mutants else "fewer --instances"
            problem = f"the check was not finished by its limit, in {self._check or 'its start'}"
            self._report_finding(
                "limit", problem, f"Give it a larger --limit, or {fewer}", where, self._task
            )
        else:
            problem = (
                f"{self._call} blocks the event loop and gave no answer within "
                f"{self._order.timeout_s:g} s"
            )
            fix = (
                "Await what waits, with a deadline; nothing else can go on, and nothing can end it"
            )
            if not self._task:
                problem = f"{self._call} did not end in time"
                fix = "Load large things on first use, or raise --slow"
            self._report_finding("hangs", problem, fix, where, self._task)

    def _locate(self, process: subprocess.Popen[bytes], dump: Path) -> str:
        """Return the line that the child is executing; "" if unknown. It is read from a stack dump
        by faulthandler, which works even while the interpreter lock is held."""
        with suppress(OSError):
            process.send_signal(signal.SIGUSR1)
        end = process_clock.now() + _DUMP_S
        where = ""
        while not where and process_clock.now() < end:
            time.sleep(0.02)
            where = self._code.find_in_dump(_read_dump(dump))
        return where


def _read_dump(dump: Path) -> str:
    try:
        return dump.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _kill_descendants(process: subprocess.Popen[bytes]) -> None:
    """Kill the child process, its session and its descendants in other sessions, and wait for the
    child.

    It does nothing if the child has already been waited for, because its process id may be reused.
    Orphaned descendants in their own sessions are not found.
    """
    if process.returncode is not None:
        return
    with suppress(psutil.Error):
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                each.kill()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
