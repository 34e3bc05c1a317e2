"""Reports how a worker failed: the whole traceback in its log, and one line about the cause for the terminal."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

FATAL = "FATAL: "
"""Begins the line of a log that states why the worker failed."""
STOP_WITHIN_S = 5
"""How long a process may unwind after a SIGTERM, in seconds; then the kernel ends it, since no other process may be
left to do so."""


class WorkerStopped(SystemExit):
    """Is raised when SIGTERM arrives, so that the process leaves through every ``finally``."""


def run_guarded(work: Callable[[], None]) -> int:
    """Run a worker's main function and return the exit code of the process. SIGTERM unwinds it (exit code 143), for at
    most ``STOP_WITHIN_S`` seconds."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        work()
    except WorkerStopped as stop:
        return int(stop.code or 0)
    except Exception as error:
        traceback.print_exc()
        print(FATAL + describe(error), file=sys.stderr, flush=True)
        return 1
    return 0


def describe(error: BaseException) -> str:
    """Return the cause of an error in one line, without a traceback."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space left on the device of {error.filename or 'fileroot'}; free some, then run again"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port taken: {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    builtin = type(error).__module__ == "builtins"
    speaks = not builtin or type(error) in (ValueError, RuntimeError)
    return lines[0] if speaks else f"{type(error).__name__}: {lines[0]}"


def failure_cause(log: Path, since: int = 0) -> str | None:
    """Return why a worker failed: the line that ``run_guarded`` left in its log from byte ``since`` on, or else the
    last line there; None for an empty log."""
    lines = [line for line in log_tail(log, 400, since) if line.strip()]
    marked = [line.removeprefix(FATAL) for line in lines if line.startswith(FATAL)]
    return marked[-1] if marked else lines[-1].strip() if lines else None


def log_tail(log: Path, n_lines: int, since: int = 0) -> list[str]:
    """Return the last ``n_lines`` lines of a log file from byte ``since`` on, out of its last 64 KiB; an empty list if
    there is no file."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(since, file.tell() - 65536))
            return file.read().decode("utf-8", "replace").splitlines()[-n_lines:]
    except OSError:
        return []


def _stop(signum: int, frame: FrameType | None) -> None:
    del frame
    signal.alarm(STOP_WITHIN_S)
    raise WorkerStopped(128 + signum)
