"""Identifies a process across reuse of its number, and sets its priority and its garbage
collection.

Linux weighs sessions against each other before it weighs their processes (autogroups, sched(7)). So
the nice value of a process has no effect on processes of other sessions unless its session's value
changes too.

A process that imports torch makes a million objects of which none is garbage; to look through them
again and again is a fifth of its start.
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
    """Return a token that is equal for two processes exactly when they are on one host and can see
    each other's /proc entries: it names the kernel boot and the namespaces of processes and of the
    network. Empty where the system does not provide them."""
    try:
        return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def boot_id() -> str:
    """Return what names the boot of this machine's kernel: equal in all its containers. Raises
    OSError where the system does not provide it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int:
    """Return the start of a running process in clock ticks since boot; 0 when it is gone, dead or
    unreadable."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *rest = stat[stat.rindex(")") + 2 :].split()
    return 0 if state in "ZX" else int(rest[18])


def open_process(pid: int, started: int) -> int | None:
    """Open a descriptor that becomes readable when the process ends; None where the system has no
    such descriptors. Raises ProcessLookupError when the process that started at ``started`` is
    gone."""
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


_REFUSED_S = 2.0
"""How long the kernel is asked again; it accepts one change of a user's sessions per tenth of a
second."""


def step_back(niceness: int) -> None:
    """Let other processes of this machine run before this process, its session and everything it
    starts, unless they gave way as far themselves. ``niceness``: 0 to 19, as in nice(1)."""
    if niceness:
        os.nice(niceness)
        share_niceness(os.getpid())


def share_niceness(pid: int) -> None:
    """Give the session of process ``pid`` the niceness of this process. Does nothing where the
    kernel does not weigh sessions, or when the process has ended."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    deadline = process_clock.now() + _REFUSED_S
    while niceness > 0 and not _taken(pid, niceness) and process_clock.now() < deadline:
        time.sleep(0.02)


def _taken(pid: int, niceness: int) -> bool:
    """Set the niceness of the process's session; return False when the kernel has to be asked
    again."""
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
    except BlockingIOError:
        return False
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return True


_USUAL = gc.get_threshold()
_WHILE_STARTING = (50_000, 20, 100)


def collect_rarely() -> None:
    """Collect garbage less often until ``settle``: before a process imports and loads what it
    keeps."""
    gc.set_threshold(*_WHILE_STARTING)


def settle() -> None:
    """Leave out of every later collection what is there now, and collect as usual from here on."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


def keep_this_process() -> None:
    """Have ``os._exit`` in a thread that runs foreign code end the call it is in, and not the
    process with all episodes. It raises SystemExit there; the main thread and forked children end
    as before."""
    # No closure: a pool of processes pickles the function when it is asked to run it.
    os._exit = partial(_exit_elsewhere, os._exit, os.getpid())  # type: ignore[assignment]


def _exit_elsewhere(leave: Callable[[int], NoReturn], keeper: int, status: int) -> NoReturn:
    if os.getpid() == keeper and threading.current_thread() is not threading.main_thread():
        raise SystemExit(f"os._exit({status}) would end its process with all sessions")
    leave(status)
