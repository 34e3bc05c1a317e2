"""Reads the trace of a run as it grows: spans as columns, and the moments at which steps ended."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from realhf.api.trace import STEP
from realhf.monitor.run_files import HostLanes
from realhf.monitor.trace import COMPLETE, INSTANT, TAIL_BYTES, TraceEvent, place_of, trace_files
from realhf.view.line_tail import LineTail
from realhf.view.packed import pack

MOST_SPANS = 300_000
"""When a run has more spans than these, the older half of them is forgotten."""
_MOST_NAMES = 60_000
_LATEST = 2**63 - 1
"""A moment after all others."""


class RunSpans:
    """Holds the spans of all processes of a run in the order in which they were read. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._tails: dict[Path, LineTail] = {}
        self._decode = msgspec.json.Decoder(TraceEvent).decode
        self._lock = threading.Lock()
        self._epoch = 0
        self._forget()

    def packed(self, epoch: int, start: int, most: int = MOST_SPANS) -> bytes:
        """Return the spans from number ``start`` on, all of them when files were replaced since ``epoch``: columns
        ``began`` and ``seconds`` (s, counted from ``base``, s since the epoch), ``line``, ``name`` and ``sample``
        (numbers into the tables of the header; 0 in ``sample``: none); of more than ``most`` the last ones. Raises
        OSError."""
        with self._lock:
            self._refresh()
            first = start if epoch == self._epoch and 0 <= start <= len(self._rows) else 0
            rows = self._rows[first:][-most:]
            table = np.array(rows, dtype=np.float64).reshape(len(rows), 5)
            hosts = HostLanes(self._run_dir)
            about = {
                "epoch": self._epoch,
                "start": first,
                "base": self._base / 1e6,
                "processes": _in_order(self._processes, hosts),
                "lines": [{"pid": pid, "name": self._line_names.get((pid, tid), str(tid))} for pid, tid in self._lines],
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

    def _forget(self) -> None:
        self._rows: list[tuple[float, float, int, int, int]] = []
        self._lines: dict[tuple[int, int], int] = {}
        self._names: dict[str, int] = {}
        self._samples: dict[str, int] = {"": 0}
        self._processes: dict[int, str] = {}
        self._line_names: dict[tuple[int, int], str] = {}
        self._steps: list[tuple[float, int]] = []
        self._base = 0

    def _refresh(self) -> None:
        found = trace_files(self._run_dir)
        epochs = {path: tail.epoch for path, tail in self._tails.items()}
        for path in found:
            self._tails.setdefault(path, LineTail(path, tail_bytes=TAIL_BYTES))
        new = {path: self._tails[path].lines() for path in found}
        if set(epochs) - set(found) or any(self._tails[path].epoch != epoch for path, epoch in epochs.items()):
            self._epoch += 1
            self._forget()
            self._tails = {path: LineTail(path, tail_bytes=TAIL_BYTES) for path in found}
            new = {path: self._tails[path].lines() for path in found}
        for lines in new.values():
            for line in lines:
                self._take(line)
        if len(self._rows) > MOST_SPANS:
            self._epoch += 1
            self._rows = self._rows[len(self._rows) // 2 :]

    def _take(self, line: bytes) -> None:
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
            self._steps.append((self._since(event.ts), args["step"]))
        elif event.ph == COMPLETE and len(self._names) < _MOST_NAMES and len(self._lines) < _MOST_NAMES:
            sample = args.get("id")
            self._rows.append(
                (
                    self._since(event.ts),
                    max(0, event.dur or 0) / 1e6,
                    self._lines.setdefault((event.pid, event.tid), len(self._lines)),
                    self._names.setdefault(event.name[:200], len(self._names)),
                    self._samples.setdefault(sample, len(self._samples)) if isinstance(sample, str) else 0,
                )
            )

    def _since(self, ts: int) -> float:
        self._base = self._base or ts
        return (ts - self._base) / 1e6


def _in_order(processes: Mapping[int, str], hosts: HostLanes) -> list[dict[str, Any]]:
    """Return the processes in the order of display; in a run over several hosts by the host that each was on last,
    which stands before its name."""
    rows = [(hosts.at(name, _LATEST), pid, name) for pid, name in processes.items()]
    order = {host: place for place, host in enumerate(hosts.hosts)}
    rows.sort(key=lambda row: (order.get(row[0], -1), place_of(row[2]), row[1]))
    return [{"pid": pid, "name": f"{host} · {name}" if host else name} for host, pid, name in rows]
