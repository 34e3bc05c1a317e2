"""Processes seen from outside: each may end between two looks at it, and a zombie that nobody
collects has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil


def lives(process: psutil.Process | int) -> bool:
    """Of a process or of its id."""
    try:
        seen = psutil.Process(process) if isinstance(process, int) else process
        return seen.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(processes: Iterable[psutil.Process | int], within_s: float) -> bool:
    """Whether all of them end within this time."""
    alive = list(processes)
    end = time.monotonic() + within_s
    while alive := [process for process in alive if lives(process)]:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def until(holds: Callable[[], object], within_s: float = 60.0) -> bool:
    """Whether something becomes so within this time."""
    end = time.monotonic() + within_s
    while not (found := bool(holds())) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def family(pid: int) -> dict[psutil.Process, list[str]]:
    """The living descendants of a process and their command lines; empty if it has ended."""
    found = {}
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    for process in descendants:
        try:
            found[process] = process.cmdline()
        except psutil.Error:
            continue
    return {process: line for process, line in found.items() if line}


def kill_all(pid: int) -> list[psutil.Process]:
    """Kill a process and all its descendants at once, as a machine that loses its power does;
    returns them."""
    try:
        processes = [psutil.Process(pid), *family(pid)]
    except psutil.NoSuchProcess:
        return []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    return processes


def freeze(pid: int, within_s: float = 60.0) -> None:
    """Stop a process by SIGSTOP and wait for it: each of its threads goes on until it is next
    scheduled. Raises TimeoutError."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + within_s
    while not _stopped(Path(f"/proc/{pid}/task")):
        if time.monotonic() > end:
            raise TimeoutError(f"process {pid} did not stop within {within_s:g} s")
        time.sleep(0.001)


def _stopped(threads: Path) -> bool:
    """All of them, or the process has ended."""
    try:
        return all(
            (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TZ"
            for thread in threads.iterdir()
        )
    except (FileNotFoundError, ProcessLookupError):
        return not threads.exists()
