"""Defines a trace file: one Chrome trace event per line (the "Trace Event Format" of Chrome and Perfetto).

Numbers of processes and lines are made from their names, so that a restarted worker continues its old line and files
can be joined without being parsed. Trace viewers drop spans of one line that overlap without one lying within the
other, as those of concurrent coroutines do. ``Lanes`` moves the later one to a further lane.
"""

from __future__ import annotations

import zlib
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

TRACE_FOLDER = "trace"
TRACE_FILE = "trace.json"

COMPLETE, INSTANT, COUNTER, METADATA = "X", "i", "C", "M"
_ORDER = ("launch", "master", "model_worker", "rollout_worker", "generation", "env")


class TraceEvent(msgspec.Struct, omit_defaults=True, gc=False):
    """Is one event of a trace file. Times are whole microseconds: ``ts`` since the epoch, ``dur`` of a COMPLETE event.
    ``s`` is the scope of an instant."""

    name: str
    ph: str
    ts: int
    pid: int
    tid: int
    dur: int | None = None
    s: str | None = None
    args: dict[str, Any] | None = None


def process_number(process: str) -> int:
    """Number the process ``kind/index``: thousands for the kind, plus the index."""
    kind, _, index = process.partition("/")
    if kind in _ORDER and (not index or (index.isdecimal() and int(index) < 1000)):
        return 1000 * (1 + place_of(process)) + int(index or 0)
    return 1_000_000 + zlib.crc32(process.encode()) % 2**30


def line_number(process: str, line: str) -> int:
    """Number a line of a process: a positive number of 31 bits, made so that lines of two processes differ."""
    return zlib.crc32(f"{process}\n{line}".encode(errors="replace")) & 0x7FFFFFFF


def file_of(run_dir: Path, process: str) -> Path:
    """Return the path of the trace file of the process ``kind/index``."""
    return run_dir / TRACE_FOLDER / f"{process.replace('/', '-')}.jsonl"


def place_of(process: str) -> int:
    """Return the place of a process in the order of display."""
    kind = process.partition("/")[0]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def process_events(process: str) -> list[TraceEvent]:
    """Make the events that name a process and give its place."""
    pid = process_number(process)
    return [
        TraceEvent("process_name", METADATA, 0, pid, 0, args={"name": process}),
        TraceEvent("process_sort_index", METADATA, 0, pid, 0, args={"sort_index": place_of(process)}),
    ]


def line_event(process: str, line: str) -> TraceEvent:
    """Make the event that names a line within a process."""
    return TraceEvent(
        "thread_name", METADATA, 0, process_number(process), line_number(process, line), args={"name": line}
    )


MAX_LANES = 64
"""Number of lanes of a line at most; further overlapping spans go to the last one."""
REMEMBERED = 256
"""Number of spans of a lane that are remembered because a longer one may still enclose them."""


class Lanes:
    """Assigns spans to lanes; spans arrive in the order of their ends, or nearly so."""

    def __init__(self) -> None:
        self._lanes: dict[str, list[deque[tuple[int, int]]]] = {}

    def place(self, line: str, began: int, ended: int) -> str:
        """Return the lane of a span: the line itself, or the name of its second, third, .. lane."""
        lanes = self._lanes.setdefault(line, [])
        number = next(
            (number for number, lane in enumerate(lanes, start=1) if _fits(lane, began, ended)),
            min(len(lanes) + 1, MAX_LANES),
        )
        if number > len(lanes):
            lanes.append(deque(maxlen=REMEMBERED))
        lane = lanes[number - 1]
        while lane and lane[-1][0] >= began and lane[-1][1] <= ended:
            lane.pop()
        lane.append((began, ended))
        return line if number == 1 else f"{line} ({number})"


def _fits(lane: deque[tuple[int, int]], began: int, ended: int) -> bool:
    """Return whether a span encloses the last ones of a lane, or lies apart from them."""
    for first, last in reversed(lane):
        if last <= began:
            return True
        if not (began <= first and last <= ended):
            return False
    return True
