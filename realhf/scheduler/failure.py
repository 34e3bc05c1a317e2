"""How a worker fails: the whole traceback in its log, one line about the cause for the person at the terminal."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

_MARK = "FATAL: "
STOP_WITHIN_S = 5
"""Who unwinds longer after a SIGTERM is ended by the kernel: nobody else may be left to do it."""


class WorkerStopped(SystemExit):
    """SIGTERM arrived: leave through every ``finally``."""


def run_guarded(work: Callable[[], None]) -> int:
    """Run a worker's main function; the exit code of the process. SIGTERM unwinds it (exit code 143), for at most
    ``STOP_WITHIN_S`` seconds."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        work()
    except WorkerStopped as stop:
        return int(stop.code or 0)
    except Exception as error:
        traceback.print_exc()
        print(_MARK + describe(error), file=sys.stderr, flush=True)
        return 1
    return 0


def describe(error: BaseException) -> str:
    """The cause in one line, without a traceback."""
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
    """Why a worker failed: the line that ``run_guarded`` left in its log from byte ``since`` on, or else the last line
    there."""
    lines = [line for line in log_tail(log, 400, since) if line.strip()]
    marked = [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]
    return marked[-1] if marked else lines[-1].strip() if lines else None


def log_tail(log: Path, n_lines: int, since: int = 0) -> list[str]:
    """The last lines of a log file from byte ``since`` on, at most 64 KiB; empty if there is none."""
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
