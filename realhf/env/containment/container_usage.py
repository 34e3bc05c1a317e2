"""What the processes of a stage of a container hold in memory, see ``container_stage``.

The kernel limits the memory of a whole stage only with a cgroup, which an ordinary user seldom may
make. So it is counted here, from what a process cannot hide: the counters of its memory, and bounds
for what has no counter. The system call filter refuses the rest (``seccomp``).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from realhf.env.containment.seccomp import SHARED_MAP_BYTES

_MAX_MAPS = 1 << 20
"""Maximum bytes of the list of a process's maps. It holds some ten thousand of them; reading longer
ones takes too long."""
_BYTES_PER_CHARACTER = 5
"""The kernel's memory for a map, by the length of its line in the list."""
_DESCRIPTOR_BYTES = 8 << 10
"""Bound of the kernel's memory for an open descriptor: half of a pipe whose user has many."""
_FORKED = 0x40
"""Flag of a process that runs the program of its parent since it was forked."""
_COUNTERS = (b"RssAnon", b"VmPTE")
"""Private memory, and page tables. Shared memory of files is limited by their file system."""
UNKNOWN = sys.maxsize
"""Memory of a process that cannot be counted."""


class Usage(NamedTuple):
    """What a process holds."""

    memory: int
    """Bytes, or ``UNKNOWN``."""
    descriptors: int
    """Number of open descriptors."""


class Accountant:
    """Counter of what the other processes of this PID namespace hold."""

    def __init__(self) -> None:
        self._shared = find_shared_device()

    def measure(self, starting: int = 0) -> dict[int, Usage]:
        """Return what each process but the first holds. ``starting``: a child of this process that
        may not have become its program yet, and is then as hidden as this process."""
        shared: set[bytes] = set()
        usages: dict[int, Usage] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and name != "1":
                # A process may end while it is looked at.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    usages[int(name)] = self._measure(name, shared, int(name) == starting)
        return usages

    def _measure(self, pid: str, shared: set[bytes], may_start: bool) -> Usage:
        """Return what a process holds; shared maps count if they are not in ``shared`` yet."""
        for folder in _list_threads(pid):
            counters = _read_counters(folder)
            if counters is not None:
                break
        else:
            return Usage(0, 0)
        try:
            with open(f"{folder}/maps", "rb") as file:
                maps = file.read(_MAX_MAPS)
            descriptors = len(os.listdir(f"{folder}/fd"))
        except PermissionError:
            if not may_start:
                return Usage(UNKNOWN, 0)
            if _is_forked(folder):
                return Usage(counters, 0)
            # It has become its program since it was refused, so now its maps can be read.
            return self._measure(pid, shared, may_start=False)
        if len(maps) == _MAX_MAPS:
            return Usage(UNKNOWN, descriptors)
        found = {
            fields[4]
            for line in maps.split(b"\n")
            if self._shared in line and (fields := line.split(None, 5))[3] == self._shared.strip()
        }
        memory = counters + _BYTES_PER_CHARACTER * len(maps) + _DESCRIPTOR_BYTES * descriptors
        memory += SHARED_MAP_BYTES * len(found - shared)
        shared |= found
        return Usage(memory, descriptors)


def count_sockets() -> int:
    """Return the number of sockets of this network namespace, those in messages included."""
    with open("/proc/self/net/sockstat", "rb") as file:
        return int(file.readline().split()[2])


def find_shared_device() -> bytes:
    """Return the device of shared anonymous maps, as a list of maps shows it between blanks. Their
    names do not tell: a process can set them."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        del view  # which would keep the map from being closed
        with open("/proc/self/maps", "rb") as file:
            for line in file:
                addresses, _, _, device, *_ = line.split()
                start, end = (int(each, 16) for each in addresses.split(b"-"))
                if start <= address < end:
                    return b" " + device + b" "
    raise OSError(0, "a shared map is not in the list of maps")


def _list_threads(pid: str) -> Iterator[str]:
    """Yield the folder of a process in /proc, then those of its threads: the memory of a process
    whose first thread has ended is shown by the others only."""
    yield f"/proc/{pid}"
    for name in os.listdir(f"/proc/{pid}/task"):
        yield f"/proc/{pid}/task/{name}"


def _read_counters(folder: str) -> int | None:
    """Return the bytes of a thread's counters; None for one that has ended."""
    with open(f"{folder}/status", "rb") as file:
        lines = dict(line.split(b":", 1) for line in file.read().split(b"\n") if b":" in line)
    if _COUNTERS[0] not in lines:
        return None
    return sum(int(lines[name].split()[0]) << 10 for name in _COUNTERS)


def _is_forked(folder: str) -> bool:
    with open(f"{folder}/stat", "rb") as file:
        return bool(int(file.read().rpartition(b")")[2].split()[6]) & _FORKED)
