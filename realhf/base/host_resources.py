"""Reads how busy a host and its memory are, and what control groups leave this process of them."""

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
OWN = Path("/proc/self/cgroup")


def groups(controller: str, mount: Path = MOUNT, own: Path = OWN) -> Iterator[Path]:
    """Yield the folder of this process's group and those of the groups around it, any of which may
    have the limit, of version 1 (``controller``) and 2. A container sees its own as the last one,
    whatever its path is called."""
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
    """Return the cores that this process is bound to, or fewer where a control group gives it less
    time, as a container with a limit of cores does: threads above that are stopped in the middle of
    their work."""
    cores = len(os.sched_getaffinity(0))
    for group in groups("cpu", mount, own):
        if quota := _quota(group):
            cores = min(cores, max(1, round(quota)))
    return cores


def memory_limit(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """Return the bytes that the groups of this process may take at most; None for no limit."""
    found = (
        number(group, "memory.max", "memory.limit_in_bytes")
        for group in groups("memory", mount, own)
    )
    return min((limit for limit in found if limit is not None), default=None)


def memory_left(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """Return the bytes that the groups of this process may still take; None for no limit. What the
    kernel keeps of files counts as left: it is given up when memory is needed."""
    found: list[int] = []
    for group in groups("memory", mount, own):
        most = number(group, "memory.max", "memory.limit_in_bytes")
        used = number(group, "memory.current", "memory.usage_in_bytes")
        if most is not None and used is not None:
            found.append(max(0, most - max(0, used - _of_files(group))))
    return min(found, default=None)


def number(group: Path, *names: str) -> int | None:
    """Return the number in the first of these files that holds one; None where none does, as for no
    limit."""
    for name in names:
        try:
            return int((group / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return None


def counters(file: Path) -> dict[str, int]:
    """Return the numbers of a file of lines "name number"; {} for none."""
    try:
        rows = (
            line.split(maxsplit=1)
            for line in file.read_text(encoding="ascii").splitlines()
            if " " in line
        )
        return {name: int(text) for name, text in rows}
    except (OSError, ValueError):
        return {}


def _of_files(group: Path) -> int:
    stat = counters(group / "memory.stat")
    return sum(
        stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file")
    )


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


@dataclass(frozen=True)
class HostLoad:
    """Holds one reading of a host: the CPU seconds since its boot in which its cores worked, those
    that there were, and the fraction of its memory that is in use. All of the machine, whoever uses
    it."""

    busy_s: float
    whole_s: float
    memory: float

    @staticmethod
    def read() -> HostLoad:
        """Read the load of this host; about 0.1 ms."""
        times = psutil.cpu_times()
        whole = (
            sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        )  # users' time has them
        idle = times.idle + getattr(times, "iowait", 0.0)
        return HostLoad(whole - idle, whole, psutil.virtual_memory().percent / 100)

    def to_list(self) -> list[float]:
        """Return the reading as plain data."""
        return [self.busy_s, self.whole_s, self.memory]

    @staticmethod
    def from_list(value: Any) -> HostLoad | None:
        """Return what ``to_list`` gave; None for anything else."""
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


class LoadOfSteps:
    """Makes figures of the loads of this host and others: of each step what has happened since the
    step before."""

    def __init__(self) -> None:
        self._names = {host_token(): _fit(os.uname().nodename)}
        self._before: dict[str, HostLoad] = {}
        self._cpu: dict[str, float] = {}

    def figures(self, others: Iterable[tuple[str, str, HostLoad]]) -> dict[str, float]:
        """Return ``host/<name>/cpu``, the mean share of its cores that worked since a reading at an
        earlier step, and ``host/<name>/memory``. ``others``: name, ``host_token`` and a reading of
        other hosts, of which several may be one. A host that was not read anew keeps its share; one
        that was read for the first time, or was started anew, has none yet."""
        loads = {host_token(): HostLoad.read()}
        for host, token, load in others:
            self._names.setdefault(token, self._free(_fit(host)))
            if token not in loads or loads[token].whole_s < load.whole_s:
                loads[token] = load
        found: dict[str, float] = {}
        for token, now in loads.items():
            name = self._names[token]
            before = self._before.get(token)
            passed = now.whole_s - before.whole_s if before else -1.0
            if before and passed > 0:
                self._cpu[token] = min(1.0, max(0.0, (now.busy_s - before.busy_s) / passed))
            elif passed < 0:
                self._cpu.pop(token, None)
            self._before[token] = now
            if token in self._cpu:
                found[f"host/{name}/cpu"] = self._cpu[token]
            found[f"host/{name}/memory"] = now.memory
        return found

    def _free(self, name: str) -> str:
        """Return the name, with a number where another host has it."""
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        return next(
            one for one in itertools.chain([name], numbered) if one not in self._names.values()
        )


def _fit(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", host)[:63] or "host"
