"""Sets two Linux process attributes: end with the parent, and adopt orphaned descendants (prctl(2))."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

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
