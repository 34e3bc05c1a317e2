"""Resources used by a process and its descendants: memory, descriptors, processes. For the
environment benchmarks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Footprint:
    """Resources of a process tree. ``pss_mb``: proportional set size in MiB, in which shared pages
    count once in total. ``files``: number of open descriptors."""

    pss_mb: float
    files: int
    processes: int


def footprint(pid: int) -> Footprint:
    """Return the resources of ``pid`` and its descendants. Processes that end during the call are
    not counted."""
    root = psutil.Process(pid)
    pss = files = processes = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            opened = len(os.listdir(f"/proc/{process.pid}/fd"))
        except OSError:
            continue
        pss += next(
            (int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0
        )
        files += opened
        processes += 1
    return Footprint(pss / 1024, files, processes)


def named(pid: int, module: str) -> list[int]:
    """Return the descendants of ``pid`` whose command line contains ``module`` and that were forked
    from a process with ``module`` in its command line."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            parent = process.parent()
            if (
                module in process.cmdline()
                and parent is not None
                and module in parent.cmdline()[:8]
            ):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
