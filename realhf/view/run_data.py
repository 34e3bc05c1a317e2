"""Metrics and trace of a run, read while their files grow, as columns for the page.

In runs of earlier versions, values whose meaning is the same are given their present names.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from realhf.api.trace import STEP
from realhf.base.files import LineTail
from realhf.monitor.metrics import public_names
from realhf.monitor.run_files import HostLanes
from realhf.monitor.run_log import METRICS_FILE
from realhf.monitor.trace import (
    COMPLETE,
    INSTANT,
    TAIL_BYTES,
    TraceEvent,
    display_rank,
    trace_files,
)

_ALIGNED = 8
"""Alignment of the arrays, in bytes."""
_KINDS = {
    "float64": "f64",
    "float32": "f32",
    "int32": "i32",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
}
"""Names of the element types for the page, by the name of the dtype."""
MEDIA_TYPE = "application/octet-stream"
"""Media type of a packed answer."""


def pack(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return arrays as bytes: ``u32 length of the header | header as JSON | arrays``,
    little-endian. Every array begins at a multiple of eight bytes.

    The header is ``about`` with the additional entry ``arrays``: {name: {kind, length, offset}},
    where offsets count from the end of the header. Raises KeyError for a dtype that the page does
    not support.
    """
    places: dict[str, dict[str, Any]] = {}
    parts: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        places[name] = {
            "kind": _KINDS[array.dtype.name],
            "length": int(array.size),
            "offset": offset,
        }
        padded = data + bytes(-len(data) % _ALIGNED)
        parts.append(padded)
        offset += len(padded)
    header = json.dumps({**about, "arrays": places}).encode()
    header += b" " * (-(len(header) + 4) % _ALIGNED)
    return struct.pack("<I", len(header)) + header + b"".join(parts)


Cell = float | str | None
"""Value of a metric: a number, "NaN", "Infinity" or "-Infinity"; None if the step has no value."""


class RunMetrics:
    """Rows of ``metrics.jsonl``. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = LineTail(run_dir / METRICS_FILE)
        self._lock = threading.Lock()
        self._epoch = 0
        self.rows: list[dict[str, Any]] = []
        self.unreadable = 0

    def refresh(self) -> None:
        """Read the lines that were added. Raises OSError if the file cannot be read."""
        with self._lock:
            lines = [*self._tail.lines()]
            if self._tail.epoch != self._epoch:
                self._epoch = self._tail.epoch
                self.rows = []
                self.unreadable = 0
            for line in lines:
                row = _row(line)
                if row is None:
                    self.unreadable += 1
                else:
                    self.rows.append(row)

    @property
    def steps(self) -> int:
        """Number of the last complete step; 0 if there is none yet."""
        return max((row["step"] for row in self.rows), default=0)

    def columns(self, epoch: int, start: int) -> dict[str, Any]:
        """Return {epoch, start, steps, columns: {name: values}, unreadable} with the rows from
        ``start`` on, or with all rows if the file was replaced since ``epoch``."""
        with self._lock:
            first = start if epoch == self._epoch and 0 <= start <= len(self.rows) else 0
            rows = self.rows[first:]
            names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
            return {
                "epoch": self._epoch,
                "start": first,
                "steps": [row["step"] for row in rows],
                "columns": {name: [cell(row.get(name)) for row in rows] for name in names},
                "unreadable": self.unreadable,
            }


def cell(value: Any) -> Cell:
    """Return a value in a form that standard JSON can represent."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return "Infinity" if value > 0 else "-Infinity"
    if finite:
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the metrics in a line; None if it is invalid."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return public_names(row) if isinstance(step, int) and not isinstance(step, bool) else None


MAX_SPANS = 300_000
"""Maximum number of spans in memory; if there are more, the older half is dropped."""
_MAX_NAMES = 60_000
"""Maximum number of different names and of lanes, which are sent as 16-bit numbers."""
_LATEST = 2**63 - 1
"""A time in microseconds that is later than any other."""


class RunSpans:
    """Spans of all processes of a run, in the order in which they were read. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._tails: dict[Path, LineTail] = {}
        self._decode = msgspec.json.Decoder(TraceEvent).decode
        self._lock = threading.Lock()
        self._epoch = 0
        self._reset()

    def pack(self, epoch: int, start: int, max_spans: int = MAX_SPANS) -> bytes:
        """Return the spans from index ``start`` on, packed by the function ``pack``, or all spans
        if files were replaced since ``epoch``. If there are more than ``max_spans``, only the last
        ones are returned. Raises OSError.

        Columns: ``began`` and ``seconds``, both in seconds, where ``began`` counts from ``base``,
        which is in seconds since the epoch; ``line``, ``name`` and ``sample``, which are indices
        into the tables of the header (in ``sample``, 0 means no sample).
        """
        with self._lock:
            self._refresh()
            first = start if epoch == self._epoch and 0 <= start <= len(self._rows) else 0
            rows = self._rows[first:][-max_spans:]
            table = np.array(rows, dtype=np.float64).reshape(len(rows), 5)
            hosts = HostLanes(self._run_dir)
            about = {
                "epoch": self._epoch,
                "start": first,
                "base": self._base / 1e6,
                "processes": _sort_processes(self._processes, hosts),
                "lines": [
                    {"pid": pid, "name": self._line_names.get((pid, tid), str(tid))}
                    for pid, tid in self._lines
                ],
                "names": list(self._names),
                "samples": list(self._samples),
                "steps": self._steps,
            }
            return pack(
                about,
                {
                    "began": table[:, 0],
                    "seconds": table[:, 1].astype(np.float32),
                    "line": table[:, 2].astype(np.uint16),
                    "name": table[:, 3].astype(np.uint16),
                    "sample": table[:, 4].astype(np.uint32),
                },
            )

    def _reset(self) -> None:
        """Drop everything that was read."""
        self._rows: list[tuple[float, float, int, int, int]] = []
        self._lines: dict[tuple[int, int], int] = {}
        self._names: dict[str, int] = {}
        self._samples: dict[str, int] = {"": 0}
        self._processes: dict[int, str] = {}
        self._line_names: dict[tuple[int, int], str] = {}
        self._steps: list[tuple[float, int]] = []
        self._base = 0

    def _refresh(self) -> None:
        """Read the lines that were added; start from the beginning if a file was removed or
        replaced."""
        files = trace_files(self._run_dir)
        new = self._read(files)
        if set(self._tails) - set(files) or any(tail.epoch for tail in self._tails.values()):
            self._epoch += 1
            self._reset()
            self._tails = {}
            new = self._read(files)
        for line in new:
            self._store_event(line)
        if len(self._rows) > MAX_SPANS:
            self._epoch += 1
            self._rows = self._rows[len(self._rows) // 2 :]

    def _read(self, files: Sequence[Path]) -> list[bytes]:
        for path in files:
            self._tails.setdefault(path, LineTail(path, tail_bytes=TAIL_BYTES))
        return [line for path in files for line in self._tails[path].lines()]

    def _store_event(self, line: bytes) -> None:
        """Store the event in a line; ignore an invalid line."""
        try:
            event = self._decode(line)
        except (msgspec.MsgspecError, RecursionError):
            return
        args = event.args or {}
        if event.name == "process_name":
            self._processes[event.pid] = str(args.get("name"))[:200]
        elif event.name == "thread_name":
            self._line_names[event.pid, event.tid] = str(args.get("name"))[:200]
        elif event.ph == INSTANT and event.name == STEP and isinstance(args.get("step"), int):
            self._steps.append((self._seconds_since_start(event.ts), args["step"]))
        elif (
            event.ph == COMPLETE and len(self._names) < _MAX_NAMES and len(self._lines) < _MAX_NAMES
        ):
            sample = args.get("id")
            self._rows.append(
                (
                    self._seconds_since_start(event.ts),
                    max(0, event.dur or 0) / 1e6,
                    self._lines.setdefault((event.pid, event.tid), len(self._lines)),
                    self._names.setdefault(event.name[:200], len(self._names)),
                    self._samples.setdefault(sample, len(self._samples))
                    if isinstance(sample, str)
                    else 0,
                )
            )

    def _seconds_since_start(self, ts: int) -> float:
        """Return a time in seconds since the first event."""
        self._base = self._base or ts
        return (ts - self._base) / 1e6


def _sort_processes(processes: Mapping[int, str], hosts: HostLanes) -> list[dict[str, Any]]:
    """Return the processes in the order of display. In a run on several hosts they are grouped by
    the host on which each ran last, and the host is put before the name."""
    rows = [(hosts.host_at(name, _LATEST), pid, name) for pid, name in processes.items()]
    order = {host: place for place, host in enumerate(hosts.hosts)}
    rows.sort(key=lambda row: (order.get(row[0], -1), display_rank(row[2]), row[1]))
    return [{"pid": pid, "name": f"{host} · {name}" if host else name} for host, pid, name in rows]
