"""Runs a check in a child process and ends it by its deadline, whatever the environment does in there."""

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
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from realhf.env.check.calls import UserCode
from realhf.env.check.report import CRASH, DUMP, END, EXIT, FOLDER, NOW, ORDER, STAGE, Finding, Order, quoted

_GRACE_S = 3.0
"""How much longer than a call may take its answer is waited for: the child itself reports it in this time."""
_START_S = 30.0
_DUMP_S = 5.0
"""How long the stacks of a silent child are waited for: the place is most of what helps, and a busy machine is slow."""
_EXIT_S = 3.0
_OUTPUT_BYTES = 8192
_READ_BYTES = 1 << 16


class Supervisor:
    """Runs one child for ``order``; ``hear`` gets every event as a list, and ``add`` the findings that only the end of
    the child shows. ``limit_s`` bounds everything together."""

    def __init__(
        self, order: Order, code: UserCode, hear: Callable[[list[Any]], None], add: Callable[[Finding], None]
    ) -> None:
        self._order = order
        self._code = code
        self._hear = hear
        self._add = add
        self._call = self._task = self._stage = ""
        self._exit: tuple[int, str] | None = None
        self._ended = self._crashed = False
        self._silent_at = 0.0
        self._text = b""
        self._output = b""

    def run(self, limit_s: float, hash_seed: int) -> bool:
        """Run the child to its end. Returns whether it did all that it was asked to. ``hash_seed`` decides the order of
        its sets. The child is gone when this returns or raises."""
        with tempfile.TemporaryDirectory(prefix="realhf-check-") as folder:
            dump = Path(folder) / DUMP
            (Path(folder) / ORDER).write_text(self._order.to_text(), encoding="utf-8")
            reading, writing = os.pipe()
            try:
                process = self._start(writing, folder, hash_seed)
            except BaseException:
                os.close(reading)
                raise
            finally:
                os.close(writing)
            try:
                self._watch(process, reading, dump, time.monotonic() + limit_s)
            finally:
                _kill_family(process)
                os.close(reading)
                if process.stdout is not None:
                    process.stdout.close()
        return self._ended

    def _start(self, writing: int, folder: str, hash_seed: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "realhf.env.check.child", str(writing), folder]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            start_new_session=True,
        )

    def _watch(self, process: subprocess.Popen[bytes], reading: int, dump: Path, limit: float) -> None:
        self._silent_at = time.monotonic() + _START_S
        exited = os.pidfd_open(process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                for file in (reading, process.stdout, exited):
                    assert file is not None
                    selector.register(file, selectors.EVENT_READ)
                while (now := time.monotonic()) < limit:
                    ready = {key.fd for key, _ in selector.select(max(0.0, min(self._silent_at, limit) - now))}
                    self._read(process, reading, ready, selector)
                    if exited in ready:
                        _kill_family(process)
                        self._drain(process, reading, selector)
                        self._judge_end(process.returncode, dump)
                        return
                    if now >= self._silent_at:
                        break  # What it said while this process may have stood still is read; printing is no answer.
            self._judge_silence(process, dump, late=time.monotonic() >= limit)
        finally:
            os.close(exited)

    def _read(
        self, process: subprocess.Popen[bytes], reading: int, ready: set[int], selector: selectors.BaseSelector
    ) -> bool:
        """Take in what has arrived; return whether there was anything."""
        some = False
        if reading in ready:
            found = os.read(reading, _READ_BYTES)
            some = bool(found)
            if not found:
                selector.unregister(reading)
            *lines, self._text = (self._text + found).split(b"\n")
            for line in lines:
                with suppress(json.JSONDecodeError):  # the environment may write to any descriptor of its process
                    self._take(json.loads(line))
        output = process.stdout
        if output is not None and output.fileno() in ready:
            found = os.read(output.fileno(), _READ_BYTES)
            some = some or bool(found)
            if not found:
                selector.unregister(output)
            self._output = (self._output + found)[-_OUTPUT_BYTES:]
        return some

    def _drain(self, process: subprocess.Popen[bytes], reading: int, selector: selectors.BaseSelector) -> None:
        """Read what the child wrote before it ended; its own children may hold the pipes open, so nothing waits."""
        while self._read(process, reading, {key.fd for key, _ in selector.select(0)}, selector):
            pass

    def _take(self, event: list[Any]) -> None:
        kind, *values = event
        if kind == NOW:
            self._call, self._task, limit_s = values
            self._silent_at = time.monotonic() + limit_s + _GRACE_S
        elif kind == STAGE:
            self._stage, limit_s = values
            self._call, self._task = values[0], ""
            self._silent_at = time.monotonic() + limit_s + _GRACE_S
        elif kind == FOLDER:
            self._code.add(values[0])
        elif kind == EXIT:
            self._exit = (values[0], values[1])
        elif kind == CRASH:
            self._crashed = True
            last = values[0].strip().splitlines()[-1]
            self._add(Finding("check", f"the check itself failed: {quoted(last)}", "Report this, with the environment"))
        elif kind == END:
            self._ended = True
            self._silent_at = time.monotonic() + _EXIT_S
        self._hear(event)

    def _judge_end(self, status: int, dump: Path) -> None:
        """The child has ended: was it time?"""
        if self._crashed or (self._ended and status == 0):
            return
        where = self._exit[1] if self._exit else self._code.of_dump(_text_of(dump))
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        if self._ended:
            what, mend = f"the process ended with {how} after all was closed", "Stop in close what still runs"
        else:
            cause = f"os._exit({self._exit[0]})" if self._exit else how
            what = f"the process of the environment died by {cause} in {self._call or self._stage or 'its start'}"
            mend = "It would take all episodes of a worker with it; raise an exception instead"
        output = self._output.decode(errors="replace").strip().splitlines()
        if output and not where:
            what = f"{what}; it printed last: {quoted(output[-1], 160)}"
        self._add(Finding("dies", what, mend, where, self._task))

    def _judge_silence(self, process: subprocess.Popen[bytes], dump: Path, *, late: bool) -> None:
        """Nothing was heard in time: find out where the child is."""
        where = self._place(process, dump)
        if self._ended:
            what = f"the process does not end within {_EXIT_S:g} s after everything was closed"
            self._add(Finding("exit", what, "Make threads daemons, or end them in close", where))
        elif late:
            fewer = "a smaller --most" if self._order.mutants else "fewer --instances"
            what = f"the check was not finished by its limit, in {self._stage or 'its start'}"
            self._add(Finding("limit", what, f"Give it a larger --limit, or {fewer}", where, self._task))
        else:
            what = f"{self._call} blocks the event loop and gave no answer within {self._order.timeout_s:g} s"
            mend = "Await what waits, with a deadline; nothing else can go on, and nothing can end it"
            if not self._task:
                what = f"{self._call or 'the start'} did not end in time"
                mend = "Load large things on first use, or raise --slow"
            self._add(Finding("hangs", what, mend, where, self._task))

    def _place(self, process: subprocess.Popen[bytes], dump: Path) -> str:
        """Ask the child's faulthandler for the stacks of its threads; it answers even when the interpreter is held."""
        with suppress(OSError):
            process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + _DUMP_S
        where = ""
        while not where and time.monotonic() < end:
            time.sleep(0.02)
            where = self._code.of_dump(_text_of(dump))
        return where


def _text_of(dump: Path) -> str:
    try:
        return dump.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _kill_family(process: subprocess.Popen[bytes]) -> None:
    """End the child, its session and its descendants in others, unless that is done: its number may then be another's.
    Descendants whose parent has ended, in a session of their own, are not found."""
    if process.returncode is not None:
        return
    with suppress(psutil.Error):
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                each.kill()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
