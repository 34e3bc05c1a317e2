"""Identification of processes whose ids may be reused, and control of process priority and garbage
collection.

Linux distributes CPU time first among sessions and then among the processes of each session
(autogroups, sched(7)). So a process's nice value does not affect processes of other sessions unless
the nice value of its session is changed too.

Importing torch creates a million objects that never become garbage. Scanning them repeatedly would
take a fifth of the start-up time.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from realhf.base import process_clock


def host_token() -> str:
    """Return a token that is the same for two processes if and only if they run on one host and see
    each other's /proc entries.

    It consists of the boot id and the PID and network namespaces. Returns "" if the system does not
    provide them.
    """
    try:
        return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def boot_id() -> str:
    """Return the id of the kernel's current boot, which is the same in all containers.

    Raises OSError if the system does not provide it.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int:
    """Return the start time of a running process in clock ticks since boot; 0 if it has ended or
    cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *rest = stat[stat.rindex(")") + 2 :].split()
    return 0 if state in "ZX" else int(rest[18])


def open_process(pid: int, started: int) -> int | None:
    """Open a pidfd, which becomes readable when the process ends; return None if the system does
    not support it.

    started: ``start_time`` of the process. Raises ProcessLookupError if that process has ended.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None
    if start_time(pid) != started:
        os.close(descriptor)
        raise ProcessLookupError(pid)
    return descriptor


_RETRY_TIMEOUT_S = 2.0
"""Seconds for which a refused change is retried. The kernel accepts only one change by a user per
tenth of a second."""


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process, of its session and of the processes that it starts.

    niceness: 0 to 19, as in nice(1).
    """
    if niceness:
        os.nice(niceness)
        share_niceness(os.getpid())


def share_niceness(pid: int) -> None:
    """Set the niceness of the session to which the process ``pid`` belongs to the niceness of this
    process.

    Does nothing if the kernel does not schedule by session, or if the process has ended.
    """
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    deadline = process_clock.now() + _RETRY_TIMEOUT_S
    while (
        niceness > 0 and not _set_session_niceness(pid, niceness) and process_clock.now() < deadline
    ):
        time.sleep(0.02)


def _set_session_niceness(pid: int, niceness: int) -> bool:
    """Set the niceness of the session to which the process ``pid`` belongs; return False if the
    kernel requires a retry."""
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
    except BlockingIOError:
        return False
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return True


_DEFAULT_THRESHOLDS = gc.get_threshold()
"""Default thresholds of the garbage collector."""
_STARTUP_THRESHOLDS = (50_000, 20, 100)
"""Thresholds of the garbage collector during start-up."""


def collect_garbage_rarely() -> None:
    """Collect garbage less often until ``collect_garbage_normally`` is called. Call this before
    importing modules and loading models."""
    gc.set_threshold(*_STARTUP_THRESHOLDS)


def collect_garbage_normally() -> None:
    """Exclude all current objects from garbage collection and restore the default thresholds."""
    gc.freeze()
    gc.set_threshold(*_DEFAULT_THRESHOLDS)


def block_exit_in_threads() -> None:
    """Make ``os._exit`` in a thread of this process raise SystemExit instead of ending the process.

    A user's code in a thread can then end only its own call, not all episodes. In the main thread
    and in forked children ``os._exit`` still exits.
    """
    # This is not a closure, because a process pool that runs ``os._exit`` pickles it.
    os._exit = partial(_exit_or_raise, os._exit, os.getpid())  # type: ignore[assignment]


def _exit_or_raise(leave: Callable[[int], NoReturn], keeper: int, status: int) -> NoReturn:
    """Raise SystemExit if called in the process ``keeper`` outside of its main thread; otherwise
    call ``leave``."""
    if os.getpid() == keeper and threading.current_thread() is not threading.main_thread():
        raise SystemExit(f"os._exit({status}) would end its process with all sessions")
    leave(status)
