"""Recognises processes that the kernel has killed for want of memory: it leaves them nothing to say it with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

WANT_OF_MEMORY = "killed by the kernel for want of memory"
"""Begins the cause of such an end."""
LATELY_S = 5.0
"""A kill and the end of the process that it hit are seen within this time."""
LOOK_S = 1.0


class MemoryKills:
    """Watches the kernel's count of such kills in the control group of this process, which its workers share; in a
    group without one, that of the whole machine. ``look`` has to be called every few seconds."""

    def __init__(self, groups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> None:
        self._groups, self._proc = groups, proc
        self._counter = next((file for file in self._counters() if _value(file, "oom_kill") is not None), None)
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
        limit = self._limit()
        whole = psutil.virtual_memory().total
        whose = "its group may take" if limit is not None and limit < whole else "this machine has"
        most = min(whole, limit or whole)
        return f"{WANT_OF_MEMORY}: it had {peak_bytes / 2**30:.1f} GiB at its peak, and {whose} {most / 2**30:.1f}"

    def _read(self) -> int:
        return (_value(self._counter, "oom_kill") if self._counter is not None else None) or 0

    def _folders(self) -> Iterator[tuple[Path, bool]]:
        """Yield where the control group may be and whether it is of version 2; a container sees its own as the root."""
        try:
            lines = (self._proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
        except OSError:
            return
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                second = controllers == ""
                root = self._groups if second else self._groups / "memory"
                for folder in dict.fromkeys((root / path.lstrip("/"), root)):
                    yield folder, second

    def _counters(self) -> Iterator[Path]:
        for folder, second in self._folders():
            yield folder / ("memory.events" if second else "memory.oom_control")
        yield self._proc / "vmstat"

    def _limit(self) -> int | None:
        """Return the lowest limit of the group and those around it, in bytes; None where there is none."""
        found: list[int] = []
        for folder, second in self._folders():
            name = "memory.max" if second else "memory.limit_in_bytes"
            for group in (folder, *folder.parents):
                if group.is_relative_to(self._groups):
                    with contextlib.suppress(OSError, ValueError):
                        found.append(int((group / name).read_text(encoding="ascii")))
        return min(found, default=None)


def _value(file: Path, name: str) -> int | None:
    """Return a number from a file of lines "name number"."""
    try:
        rows = dict(line.split(maxsplit=1) for line in file.read_text(encoding="ascii").splitlines() if " " in line)
        return int(rows[name])
    except (OSError, KeyError, ValueError):
        return None
