"""Counts the cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores(mount: Path = MOUNT, own: Path = OWN) -> int:
    """Return the cores that this process is bound to, or fewer where a control group gives it less time, as a container
    with a limit of cores does: threads above that are stopped in the middle of their work."""
    cores = len(os.sched_getaffinity(0))
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return cores
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = mount / "cpu" if controllers else mount
        folder = top / path.lstrip("/")
        # Any group above may be the one with the limit. A container sees its own as the top.
        for group in (folder, *folder.parents):
            if group.is_relative_to(top) and (quota := _quota(group)):
                cores = min(cores, max(1, round(quota)))
    return cores


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
