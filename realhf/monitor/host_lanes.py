"""Keeps which host every process of a run was on and when, so that a timeline can show the hosts.

``placements.jsonl`` in the run folder has a line for each start of a process on a host, and for each host that was
lost. Only schedulers that know several hosts write it. Times are those of the launcher's clock.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path

import msgspec

from realhf.monitor.rollouts.plain_file import open_plain

PLACEMENTS_FILE = "placements.jsonl"
LAUNCHER = "launcher"
"""The launcher's own machine; what was not started by a scheduler runs there."""
_MOST_BYTES = 16 << 20


class Placement(msgspec.Struct, omit_defaults=True):
    """Says that ``process`` was started on ``host`` at ``at`` (s since the epoch); without a process, that the host was
    lost then, and why; or what it is made of: a digest of this package's files there, and versions."""

    at: float
    host: str
    process: str = ""
    lost: str = ""
    made_of: Mapping[str, str] = {}


def note_placement(
    run_dir: Path, host: str, process: str = "", *, lost: str = "", made_of: Mapping[str, str] = {}
) -> None:
    """Append one line. Raises OSError when it cannot be written."""
    line = msgspec.json.encode(Placement(time.time(), host, process, lost, made_of)) + b"\n"
    path = run_dir / PLACEMENTS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


class HostLanes:
    """Answers where a process was. ``hosts`` are the names of all hosts that had a process, the launcher's machine
    first; ``lost`` the moments (us since the epoch, host, reason) at which hosts were lost. Both are empty for a run on
    one machine."""

    def __init__(self, run_dir: Path) -> None:
        self._starts: dict[str, list[tuple[int, str]]] = {}
        self.lost: list[tuple[int, str, str]] = []
        for row in _rows(run_dir / PLACEMENTS_FILE):
            moment = round(row.at * 1e6)
            if row.process:
                self._starts.setdefault(row.process, []).append((moment, row.host))
            elif not row.made_of:
                self.lost.append((moment, row.host, row.lost))
        for starts in self._starts.values():
            starts.sort()
        names = {host for starts in self._starts.values() for _, host in starts}
        self.hosts = sorted(names, key=lambda name: (name != LAUNCHER, name))

    def at(self, process: str, moment: int) -> str:
        """Return the host of a process at a moment (us since the epoch): where it was last started before that, or
        first, if the clocks differ; "" for a run on one machine."""
        starts = self._starts.get(process)
        if not starts:
            return LAUNCHER if self.hosts else ""
        return starts[max(0, bisect_right(starts, moment, key=lambda start: start[0]) - 1)][1]

    def processes(self, host: str) -> list[str]:
        """Return the names of all processes that were on a host, in order."""
        return sorted(process for process, starts in self._starts.items() if any(at == host for _, at in starts))


def _rows(path: Path) -> list[Placement]:
    """Read what can be read: a kill may have cut off the last line."""
    try:
        with open_plain(path) as file:
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return []
    decode, found = msgspec.json.Decoder(Placement).decode, []
    for line in lines:
        try:
            found.append(decode(line))
        except (msgspec.MsgspecError, RecursionError):
            continue
    return found
