"""Tells how busy a host is, and how full its memory."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil

from realhf.base.process_id import host_token


@dataclass(frozen=True)
class HostLoad:
    """Holds one reading of a host: the CPU seconds since its boot in which its cores worked, those that there were, and
    the fraction of its memory that is in use. All of the machine, whoever uses it."""

    busy_s: float
    whole_s: float
    memory: float

    @staticmethod
    def read() -> HostLoad:
        """Read the load of this host; about 0.1 ms."""
        times = psutil.cpu_times()
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # users' time has them
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
        numbers = [float(one) for one in value if isinstance(one, (int, float)) and not isinstance(one, bool)]
        if len(numbers) != 3 or not all(math.isfinite(one) and one >= 0 for one in numbers):
            return None
        return HostLoad(numbers[0], numbers[1], min(1.0, numbers[2]))


class LoadOfSteps:
    """Makes figures of the loads of this host and others: of each step what has happened since the step before."""

    def __init__(self) -> None:
        self._names = {host_token(): _fit(os.uname().nodename)}
        self._before: dict[str, HostLoad] = {}
        self._cpu: dict[str, float] = {}

    def figures(self, others: Iterable[tuple[str, str, HostLoad]]) -> dict[str, float]:
        """Return ``host/<name>/cpu``, the mean share of its cores that worked since a reading at an earlier step, and
        ``host/<name>/memory``. ``others``: name, ``host_token`` and a reading of other hosts, of which several may be
        one. A host that was not read anew keeps its share; one that was read for the first time, or was started anew,
        has none yet."""
        loads = {host_token(): HostLoad.read()}
        for host, token, load in others:
            self._names.setdefault(token, self._free(_fit(host)))
            if token not in loads or loads[token].whole_s < load.whole_s:
                loads[token] = load
        found: dict[str, float] = {}
        for token, now in loads.items():
            name, before = self._names[token], self._before.get(token)
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
        return next(one for one in itertools.chain([name], numbered) if one not in self._names.values())


def _fit(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", host)[:63] or "host"
