"""Processes seen from outside: each may end between two looks at it, and a zombie that nobody collects has ended."""

from __future__ import annotations

import time
from collections.abc import Iterable

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
    alive, end = list(processes), time.monotonic() + within_s
    while alive := [process for process in alive if lives(process)]:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


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
