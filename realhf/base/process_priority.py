"""Lets a process give way to others where cores are short.

Linux weighs sessions against each other before it weighs their processes (autogroups, sched(7)). So the nice value of a
process has no effect on processes of other sessions unless its session's value changes too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_REFUSED_S = 2.0
"""How long the kernel is asked again; it accepts one change of a user's sessions per tenth of a second."""


def step_back(niceness: int) -> None:
    """Let other processes of this machine run before this process, its session and everything it starts, unless they
    gave way as far themselves. ``niceness``: 0 to 19, as in nice(1)."""
    if niceness:
        os.nice(niceness)
        share_niceness(os.getpid())


def share_niceness(pid: int) -> None:
    """Give the session of process ``pid`` the niceness of this process. Does nothing where the kernel does not weigh
    sessions, or when the process has ended."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    deadline = time.monotonic() + _REFUSED_S
    while niceness > 0 and not _taken(pid, niceness) and time.monotonic() < deadline:
        time.sleep(0.02)


def _taken(pid: int, niceness: int) -> bool:
    """Set the niceness of the process's session; return False when the kernel has to be asked again."""
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
    except BlockingIOError:
        return False
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return True
