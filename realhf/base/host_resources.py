"""CPU and memory limits of this process from control groups (cgroups), and the load of the host."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from realhf.base.process import host_token

MOUNT = Path("/sys/fs/cgroup")
"""Mount point of the control groups."""
OWN_GROUPS = Path("/proc/self/cgroup")
"""File that lists the control groups of this process."""


def control_groups(controller: str, mount: Path = MOUNT, own: Path = OWN_GROUPS) -> Iterator[Path]:
    """Yield the folders of this process's control group and of its parent groups, each of which may
    set a limit.

    Supports cgroup version 1 (with ``controller``) and version 2. In a container the last folder
    belongs to the container's own group, regardless of the path in ``own``.
    """
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


def usable_cores(mount: Path = MOUNT, own: Path = OWN_GROUPS) -> int:
    """Return the number of cores that this process can use: the cores to which it is bound, or
    fewer if a control group has a CPU quota.

    A container whose cores are limited has such a quota. A process with more threads than that is
    throttled in the middle of its work.
    """
    cores = len(os.sched_getaffinity(0))
    for group in control_groups("cpu", mount, own):
        if quota := _cpu_quota(group):
            cores = min(cores, max(1, round(quota)))
    return cores


def memory_limit(mount: Path = MOUNT, own: Path = OWN_GROUPS) -> int | None:
    """Return the smallest memory limit of this process's control groups in bytes; None if there is
    no limit."""
    limits = (
        read_number(group, "memory.max", "memory.limit_in_bytes")
        for group in control_groups("memory", mount, own)
    )
    return min((limit for limit in limits if limit is not None), default=None)


def memory_left(mount: Path = MOUNT, own: Path = OWN_GROUPS) -> int | None:
    """Return the bytes that this process's control groups may still allocate; None if there is no
    limit.

    The page cache counts as free, because the kernel evicts it when memory is needed.
    """
    free: list[int] = []
    for group in control_groups("memory", mount, own):
        limit = read_number(group, "memory.max", "memory.limit_in_bytes")
        used = read_number(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free.append(max(0, limit - max(0, used - _page_cache_bytes(group))))
    return min(free, default=None)


def read_number(group: Path, *names: str) -> int | None:
    """Return the number in the first of the files ``names`` that contains one; None if no file
    does, which means that there is no limit."""
    for name in names:
        try:
            return int((group / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return None


def read_counters(file: Path) -> dict[str, int]:
    """Return the counters in a file with lines of the form "name number"; {} if it cannot be
    read."""
    try:
        rows = (
            line.split(maxsplit=1)
            for line in file.read_text(encoding="ascii").splitlines()
            if " " in line
        )
        return {name: int(text) for name, text in rows}
    except (OSError, ValueError):
        return {}


def _page_cache_bytes(group: Path) -> int:
    """Return the bytes of page cache that are charged to a control group."""
    stat = read_counters(group / "memory.stat")
    return sum(
        stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file")
    )


def _cpu_quota(group: Path) -> float:
    """Return the CPU quota of a control group as a number of cores; 0.0 if it is not limited."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii")
        return float(quota) / float(period) if quota not in ("max", "-1") else 0.0
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


@dataclass(frozen=True)
class HostLoad:
    """One reading of the load of the whole host, by all processes."""

    busy_s: float
    """CPU seconds since boot in which cores were busy, summed over all cores."""
    whole_s: float
    """CPU seconds since boot, busy or idle, summed over all cores."""
    memory: float
    """Fraction of the memory in use, from 0 to 1."""

    @staticmethod
    def read() -> HostLoad:
        """Read the load of this host; takes about 0.1 ms."""
        times = psutil.cpu_times()
        # the two guest times are also included in the user times
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        return HostLoad(whole - idle, whole, psutil.virtual_memory().percent / 100)

    def to_list(self) -> list[float]:
        """Return the reading as plain data."""
        return [self.busy_s, self.whole_s, self.memory]

    @staticmethod
    def from_list(value: Any) -> HostLoad | None:
        """Rebuild a reading from the output of ``to_list``; return None for any other value."""
        if not isinstance(value, list) or len(value) != 3:
            return None
        numbers = [
            float(one)
            for one in value
            if isinstance(one, (int, float)) and not isinstance(one, bool)
        ]
        if len(numbers) != 3 or not all(math.isfinite(one) and one >= 0 for one in numbers):
            return None
        return HostLoad(numbers[0], numbers[1], min(1.0, numbers[2]))


class HostLoadMetrics:
    """Metrics of the load of this host and of other hosts, measured from step to step."""

    def __init__(self) -> None:
        self._names = {host_token(): _as_metric_label(os.uname().nodename)}
        self._before: dict[str, HostLoad] = {}
        self._cpu: dict[str, float] = {}

    def measure(self, others: Iterable[tuple[str, str, HostLoad]]) -> dict[str, float]:
        """Return the metrics ``host/<name>/cpu``, which is the mean fraction of busy cores since
        the previous reading, and ``host/<name>/memory``.

        others: (name, ``host_token``, reading) of other hosts; a host may occur several times. A
        host without a new reading keeps its CPU value. A host that was read for the first time, or
        has rebooted, has no CPU value yet.
        """
        loads = {host_token(): HostLoad.read()}
        for host, token, load in others:
            self._names.setdefault(token, self._unique_name(_as_metric_label(host)))
            if token not in loads or loads[token].whole_s < load.whole_s:
                loads[token] = load
        metrics: dict[str, float] = {}
        for token, now in loads.items():
            name = self._names[token]
            before = self._before.get(token)
            elapsed_s = now.whole_s - before.whole_s if before else -1.0
            if before and elapsed_s > 0:
                self._cpu[token] = min(1.0, max(0.0, (now.busy_s - before.busy_s) / elapsed_s))
            elif elapsed_s < 0:
                self._cpu.pop(token, None)
            self._before[token] = now
            if token in self._cpu:
                metrics[f"host/{name}/cpu"] = self._cpu[token]
            metrics[f"host/{name}/memory"] = now.memory
        return metrics

    def _unique_name(self, name: str) -> str:
        """Return ``name``, with a number appended if another host already has that name."""
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        return next(
            one for one in itertools.chain([name], numbered) if one not in self._names.values()
        )


def _as_metric_label(host: str) -> str:
    """Return a host name with only the characters that metric names allow."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", host)[:63] or "host"
