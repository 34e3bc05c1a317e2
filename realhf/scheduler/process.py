"""Ends a worker process with its parent, adopts orphans, and reports how a worker failed, in its log and in one
line."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
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


LAST_WORDS = "REALHF_LAST_WORDS"
"""The environment variable that names the descriptor of ``make_last_words`` to a process that is started."""
LAST_WORDS_BYTES = 4096
_last_words = -1


def make_last_words() -> int:
    """Return the descriptor of a file in memory, of ``LAST_WORDS_BYTES`` bytes, in which a worker leaves why it fails:
    the disk of its log may be full. Raises OSError."""
    words = os.memfd_create("last-words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(words, LAST_WORDS_BYTES)
        # A worker must not be able to use it for more.
        fcntl.fcntl(words, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(words)
        raise
    return words


def keep_last_words(descriptor: int) -> None:
    """Let ``leave_last_words`` of this process write to a descriptor, which no process that it starts inherits."""
    global _last_words
    os.set_inheritable(descriptor, False)
    _last_words = descriptor


def leave_last_words(text: str) -> None:
    """Leave why this process fails to the one that has started it, if that one listens. Never raises OSError."""
    if _last_words >= 0:
        with contextlib.suppress(OSError):
            os.pwrite(_last_words, text.encode("utf-8", "replace")[:LAST_WORDS_BYTES], 0)


def read_last_words(descriptor: int) -> str:
    """Return what a worker has left in its ``make_last_words``; "" for nothing."""
    return os.pread(descriptor, LAST_WORDS_BYTES, 0).rstrip(b"\0").decode("utf-8", "replace")


def run_guarded(work: Callable[[], None], folder: Path | None = None) -> int:
    """Run a worker's main function and return the exit code of the process. SIGTERM unwinds it (exit code 143), for at
    most ``STOP_WITHIN_S`` seconds. ``folder`` is where it writes."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        work()
    except WorkerStopped as stop:
        return int(stop.code or 0)
    except Exception as error:
        leave_last_words(describe(error, folder))
        with contextlib.suppress(OSError):  # the log may be on the disk that is full
            traceback.print_exc()
            print(FATAL + describe(error, folder), file=sys.stderr, flush=True)
        return 1
    return 0


def describe(error: BaseException, folder: Path | None = None) -> str:
    """Return the cause of an error in one line, without a traceback. ``folder``: where the process writes, for an error
    that names no file."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "no space left on the device" if error.errno == errno.ENOSPC else "no quota left on the disk"
        return f"{what} of {error.filename or folder or 'fileroot'}; free some, then run again"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port taken: {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    builtin = type(error).__module__ == "builtins"
    speaks = not builtin or type(error) in (ValueError, RuntimeError)
    return lines[0] if speaks else f"{type(error).__name__}: {lines[0]}"


def failure_cause(log: Path, since: int = 0, words: str = "") -> str | None:
    """Return why a worker failed: the line that ``run_guarded`` left in its log from byte ``since`` on, or else its
    last ``words``, or else the last line there; None without any."""
    lines = [line for line in log_tail(log, 400, since) if line.strip()]
    marked = [line.removeprefix(FATAL) for line in lines if line.startswith(FATAL)]
    if marked:
        return marked[-1]
    return words or (lines[-1].strip() if lines else None)


def fatal_line(tail: bytes) -> str:
    """Return why a worker failed, out of the end of its log; "" where ``run_guarded`` left no line there."""
    lines = tail.decode("utf-8", "replace").splitlines()
    return next((line.removeprefix(FATAL) for line in reversed(lines) if line.startswith(FATAL)), "")


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
