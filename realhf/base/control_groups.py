"""Reads what control groups leave this process of cores and memory: those of a container, a batch job, a service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def groups(controller: str, mount: Path = MOUNT, own: Path = OWN) -> Iterator[Path]:
    """Yield the folder of this process's group and those of the groups around it, any of which may have the limit, of
    version 1 (``controller``) and 2. A container sees its own as the last one, whatever its path is called."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        folder = top / path.lstrip("/")
        yield from (group for group in (folder, *folder.parents) if group.is_relative_to(top))


def usable_cores(mount: Path = MOUNT, own: Path = OWN) -> int:
    """Return the cores that this process is bound to, or fewer where a control group gives it less time, as a container
    with a limit of cores does: threads above that are stopped in the middle of their work."""
    cores = len(os.sched_getaffinity(0))
    for group in groups("cpu", mount, own):
        if quota := _quota(group):
            cores = min(cores, max(1, round(quota)))
    return cores


def memory_limit(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """Return the bytes that the groups of this process may take at most; None for no limit."""
    found = (number(group, "memory.max", "memory.limit_in_bytes") for group in groups("memory", mount, own))
    return min((limit for limit in found if limit is not None), default=None)


def memory_left(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """Return the bytes that the groups of this process may still take; None for no limit. What the kernel keeps of
    files counts as left: it is given up when memory is needed."""
    found: list[int] = []
    for group in groups("memory", mount, own):
        most = number(group, "memory.max", "memory.limit_in_bytes")
        used = number(group, "memory.current", "memory.usage_in_bytes")
        if most is not None and used is not None:
            found.append(max(0, most - max(0, used - _of_files(group))))
    return min(found, default=None)


def number(group: Path, *names: str) -> int | None:
    """Return the number in the first of these files that holds one; None where none does, as for no limit."""
    for name in names:
        try:
            return int((group / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return None


def counters(file: Path) -> dict[str, int]:
    """Return the numbers of a file of lines "name number"; {} for none."""
    try:
        rows = (line.split(maxsplit=1) for line in file.read_text(encoding="ascii").splitlines() if " " in line)
        return {name: int(text) for name, text in rows}
    except (OSError, ValueError):
        return {}


def _of_files(group: Path) -> int:
    stat = counters(group / "memory.stat")
    return sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))


def _quota(group: Path) -> float:
    """Return of how many cores a group may use the time; 0.0 for all."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii")
        return float(quota) / float(period) if quota not in ("max", "-1") else 0.0
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0
