"""Ends a worker process with its parent, adopts orphans, and reports how a worker failed, in its log and in one
line."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM to this process when the thread that started it ends. Exits at once if the parent is
    gone already. Has no effect outside Linux."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        raise SystemExit("the process that started this worker is gone")


@contextlib.contextmanager
def orphans_adopted() -> Iterator[None]:
    """Make this process the parent of descendants whose own parent ends, so that none of them escapes. Afterwards the
    process is what it was before: a program that trains with the launcher inside it must not collect zombies.
    """
    before = ctypes.c_int(0)
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _prctl(option: int, value: object) -> None:
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


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
    """Return the last ``n_lines`` lines of a log file from byte ``since`` on, out of its last 64 KiB."""
    return log_end(log, since).decode("utf-8", "replace").splitlines()[-n_lines:]


def log_end(log: Path, since: int = 0, most: int = 1 << 16) -> bytes:
    """Return what a log file has from byte ``since`` on, at most its last ``most`` bytes; nothing if there is no
    file."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(since, file.tell() - most))
            return file.read(most)
    except OSError:
        return b""


def _stop(signum: int, frame: FrameType | None) -> None:
    del frame
    signal.alarm(STOP_WITHIN_S)
    raise WorkerStopped(128 + signum)
