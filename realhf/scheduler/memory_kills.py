"""Recognises processes that the kernel has killed for want of memory: it leaves them nothing to say it with."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from realhf.base.control_groups import MOUNT, counters, groups, memory_limit

WANT_OF_MEMORY = "killed by the kernel for want of memory"
"""Begins the cause of such an end."""
LATELY_S = 5.0
"""A kill and the end of the process that it hit are seen within this time."""
LOOK_S = 1.0
_KILLS = "oom_kill"


class MemoryKills:
    """Watches the kernel's count of such kills in the control group of this process, which its workers share; in a
    group without one, that of the whole machine. ``look`` has to be called every few seconds."""

    def __init__(self, mount: Path = MOUNT, proc: Path = Path("/proc")) -> None:
        self._mount, self._own = mount, proc / "self" / "cgroup"
        names = ("memory.events", "memory.oom_control")
        own = (group / name for group in groups("memory", mount, self._own) for name in names)
        self._counter = next((file for file in own if _KILLS in counters(file)), proc / "vmstat")
        self._count = self._read()
        self._rose_at = float("-inf")
        self._next = 0.0

    def look(self, *, now: bool = False) -> None:
        """Note whether there was a kill; once in ``LOOK_S`` unless ``now``."""
        if now or time.monotonic() >= self._next:
            self._next = time.monotonic() + LOOK_S
            count = self._read()
            if count > self._count:
                self._rose_at = time.monotonic()
            self._count = count

    def cause(self, peak_bytes: int) -> str:
        """Return the cause of a SIGKILL that nobody here has sent, "" where it is not the kernel's. ``peak_bytes`` is
        what the process had at most."""
        self.look(now=True)
        if time.monotonic() - self._rose_at > LATELY_S:
            return ""
        limit = memory_limit(self._mount, self._own)
        whole = psutil.virtual_memory().total
        whose = "its group may take" if limit is not None and limit < whole else "this machine has"
        most = min(whole, limit or whole)
        return f"{WANT_OF_MEMORY}: it had {peak_bytes / 2**30:.1f} GiB at its peak, and {whose} {most / 2**30:.1f}"

    def _read(self) -> int:
        return counters(self._counter).get(_KILLS, 0)
