"""Life cycle of worker processes: ending with the parent, adoption of orphans, and one-line failure
reports."""

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
    """Make the kernel send SIGTERM to this process when the thread that started it ends.

    Raises SystemExit if the parent has already ended. On systems other than Linux, only this check
    is made.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        raise SystemExit("the process that started this worker has ended")


@contextlib.contextmanager
def adopt_orphans() -> Iterator[None]:
    """Context manager within which this process becomes the parent of its orphaned descendants, so
    that it can end all of them.

    The previous setting is restored afterwards, because a program that embeds the launcher might
    not reap orphans.
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
"""Prefix of the log line that states why a worker failed."""
STOP_WITHIN_S = 5
"""Seconds for clean-up after SIGTERM. After that the kernel ends the process with SIGALRM, because
there may be no other process left that would kill it."""


class WorkerStopped(SystemExit):
    """Raised when SIGTERM arrives, so that the process runs every ``finally`` block."""


LAST_WORDS = "REALHF_LAST_WORDS"
"""Environment variable through which a started process gets the descriptor from
``create_last_words``."""
LAST_WORDS_BYTES = 4096
"""Maximum length of the last words in bytes."""
_last_words = -1
"""Descriptor to which this process writes its last words; -1 if there is none."""


def create_last_words() -> int:
    """Create a memory file of ``LAST_WORDS_BYTES`` bytes for a worker's failure message, and return
    its descriptor.

    It is used in addition to the log, whose disk may be full. Raises OSError.
    """
    descriptor = os.memfd_create("last-words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(descriptor, LAST_WORDS_BYTES)
        # Fix the size, so that a worker cannot allocate memory through it.
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
        )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def set_last_words_descriptor(descriptor: int) -> None:
    """Set the descriptor to which ``write_last_words`` writes. Child processes do not inherit
    it."""
    global _last_words
    os.set_inheritable(descriptor, False)
    _last_words = descriptor


def write_last_words(text: str) -> None:
    """Write the cause of this process's failure for its parent, if the parent has provided a
    descriptor. Never raises OSError."""
    if _last_words >= 0:
        with contextlib.suppress(OSError):
            os.pwrite(_last_words, text.encode("utf-8", "replace")[:LAST_WORDS_BYTES], 0)


def read_last_words(descriptor: int) -> str:
    """Return the text that a worker has written to a descriptor from ``create_last_words``; "" if
    none."""
    return os.pread(descriptor, LAST_WORDS_BYTES, 0).rstrip(b"\0").decode("utf-8", "replace")


def run_guarded(work: Callable[[], None], folder: Path | None = None) -> int:
    """Run a worker's main function ``work`` and return the exit code for the process.

    SIGTERM raises WorkerStopped in ``work``, which then has ``STOP_WITHIN_S`` seconds to clean up;
    the exit code is 143. ``folder``, into which ``work`` writes its files, is named if the disk is
    full.
    """
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        work()
    except WorkerStopped as stop:
        return int(stop.code or 0)
    except Exception as error:
        write_last_words(describe_failure(error, folder))
        with contextlib.suppress(OSError):  # the log may be on the full disk
            traceback.print_exc()
            print(FATAL + describe_failure(error, folder), file=sys.stderr, flush=True)
        return 1
    return 0


def describe_failure(error: BaseException, folder: Path | None = None) -> str:
    """Describe an error in one line, without a traceback.

    ``folder`` is the folder into which the process writes files. It is named if the disk is full
    and the error does not name a file.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = (
            "no space left on the device"
            if error.errno == errno.ENOSPC
            else "no quota left on the disk"
        )
        return f"{what} of {error.filename or folder or 'fileroot'}; free space, then run again"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port in use: {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    builtin = type(error).__module__ == "builtins"
    is_own_message = not builtin or type(error) in (ValueError, RuntimeError)
    return lines[0] if is_own_message else f"{type(error).__name__}: {lines[0]}"


def find_failure_cause(log: Path, since: int = 0, last_words: str = "") -> str | None:
    """Return why a worker failed, or None if the cause is not known.

    The cause is, in order of preference, the line that ``run_guarded`` has written to the log after
    byte ``since``, the worker's ``last_words``, or the last line of the log.
    """
    lines = [line for line in read_log_lines(log, 400, since) if line.strip()]
    marked = [line.removeprefix(FATAL) for line in lines if line.startswith(FATAL)]
    if marked:
        return marked[-1]
    return last_words or (lines[-1].strip() if lines else None)


def find_fatal_line(tail: bytes) -> str:
    """Return the cause that ``run_guarded`` has written, from the end of a log; "" if there is
    none."""
    lines = tail.decode("utf-8", "replace").splitlines()
    return next(
        (line.removeprefix(FATAL) for line in reversed(lines) if line.startswith(FATAL)), ""
    )


def read_log_lines(log: Path, n_lines: int, since: int = 0) -> list[str]:
    """Return the last lines of a log file: at most ``n_lines``, after byte ``since``, and within
    the last 64 KiB."""
    return read_log_end(log, since).decode("utf-8", "replace").splitlines()[-n_lines:]


def read_log_end(log: Path, since: int = 0, max_bytes: int = 1 << 16) -> bytes:
    """Return the content of a log file from byte ``since`` on, but at most the last ``max_bytes``
    bytes; b"" if the file cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(since, file.tell() - max_bytes))
            return file.read(max_bytes)
    except OSError:
        return b""


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    """Signal handler for SIGTERM that raises WorkerStopped. SIGALRM ends the process if it does not
    exit in time."""
    del frame
    signal.alarm(STOP_WITHIN_S)
    raise WorkerStopped(128 + signum)
