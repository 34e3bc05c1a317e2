"""How a process steps back where cores are short.

Linux weighs sessions against each other before it weighs their processes (autogroups, sched(7)): without its session's,
the nice value of a process says nothing to processes of other sessions.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_REFUSED_S = 2.0
"""So long the kernel is asked again; it takes one change of a user's sessions in a tenth of a second."""


def step_back(niceness: int) -> None:
    """Let processes of this machine that did not step back so far go first: this one, its session and what it starts
    come after them. ``niceness``: 0 to 19, as in nice(1)."""
    if niceness:
        os.nice(niceness)
        share_niceness(os.getpid())


def share_niceness(pid: int) -> None:
    """Let the session of a process step back as far as this process did. Without effect where sessions are not
    weighed, or when the process has ended."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    deadline = time.monotonic() + _REFUSED_S
    while niceness > 0 and not _taken(pid, niceness) and time.monotonic() < deadline:
        time.sleep(0.02)


def _taken(pid: int, niceness: int) -> bool:
    """False when the kernel wants to be asked again."""
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
    except BlockingIOError:
        return False
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return True
