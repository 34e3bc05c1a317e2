"""Reads the metrics of a run as its file grows, and hands them out column by column.

Runs of earlier versions are read under today's names, as far as these say the same.
"""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

from realhf.monitor.metrics import public_names
from realhf.monitor.run_log import METRICS_FILE
from realhf.view.line_tail import LineTail

Cell = float | str | None
"""A value of a metric: a number, "NaN", "Infinity" or "-Infinity", or None where the step has none."""


class RunMetrics:
    """Holds the rows of ``metrics.jsonl``. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = LineTail(run_dir / METRICS_FILE)
        self._lock = threading.Lock()
        self._epoch = 0
        self.rows: list[dict[str, Any]] = []
        self.unreadable = 0

    def refresh(self) -> None:
        """Read what was added. Raises OSError when the file cannot be read."""
        with self._lock:
            lines = self._tail.lines()
            if self._tail.epoch != self._epoch:
                self._epoch, self.rows, self.unreadable = self._tail.epoch, [], 0
            for line in lines:
                row = _row(line)
                if row is None:
                    self.unreadable += 1
                else:
                    self.rows.append(row)

    @property
    def steps(self) -> int:
        """The number of the last complete step; 0 before the first."""
        return max((row["step"] for row in self.rows), default=0)

    def columns(self, epoch: int, start: int) -> dict[str, Any]:
        """Return the rows from ``start`` on as {epoch, start, steps, columns: {name: values}, unreadable}; all rows
        when the file was replaced since ``epoch``."""
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
    """Return a value as JSON without extensions can hold it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return "Infinity" if value > 0 else "-Infinity"
    if finite:
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return public_names(row) if isinstance(step, int) and not isinstance(step, bool) else None
