"""Makes the records and index lines of the rows of a train step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from realhf.api.trace import TrainedRows
from realhf.monitor.rollouts.format import TrainLine, encode_record, readable
from realhf.monitor.rollouts.selection import Selection

_DIGITS = 5
Array = np.ndarray[Any, Any]


def train_records(rows: TrainedRows, selection: Selection) -> Iterator[tuple[bytes | None, TrainLine]]:
    """Yield record (None where the tokens are not kept) and line of every row whose sample is chosen."""
    ends = np.cumsum(np.asarray(rows.lengths, dtype=np.int64))
    number, now = 0, round(time.time(), 3)
    for sample, count in zip(rows.ids, rows.rows, strict=True):
        chosen = selection.chooses(sample)
        with_tokens = chosen and selection.with_tokens(sample)
        for row in range(int(count)):
            if chosen:
                part = slice(int(ends[number] - rows.lengths[number]), int(ends[number]))
                line = _line(rows, part, f"{readable(sample, len(sample))}/{row}", now)
                line.has_tokens = with_tokens and line.n_tokens > 0
                yield encode_record(_record(rows, part, line)) if line.has_tokens else None, line
            number += 1


def _line(rows: TrainedRows, part: slice, name: str, now: float) -> TrainLine:
    mask = rows.mask[part]
    line = TrainLine(id=name, time=now, step=rows.step + 1, version=rows.step, n_tokens=int(mask.sum()))
    if not line.n_tokens:
        return line
    line.advantage = _number(rows.advantages[part][mask].mean())
    current, before = rows.current[part][mask], rows.before[part][mask]
    if not np.isnan(current).all():
        line.ratio_max = _number(rows.ratio[part][mask].max())
        line.clip_fraction = _number(rows.clipped[part][mask].mean())
    if not np.isnan(before).all():
        line.mismatch = _number(np.abs(before - rows.behaviour[part][mask]).mean())
    if rows.versions is not None:
        known = rows.versions[part][mask]
        known = known[known >= 0]
        line.staleness = int(rows.step - known.min()) if len(known) else None
    return line


def _record(rows: TrainedRows, part: slice, line: TrainLine) -> dict[str, Any]:
    """Return the columns of a row from its first trained token on. Entry k is about token ``first_token + k`` of the
    row, counted from the first token of its prompt."""
    first = int(np.flatnonzero(rows.mask[part])[0])
    inner = slice(part.start + first, part.stop)
    return {
        "id": line.id,
        "step": line.step,
        "version": line.version,
        "first_token": first + 1,
        "mask": rows.mask[inner].astype(np.int8).tolist(),
        "old": _column(rows.behaviour[inner], rows.mask[inner]),
        "before": _column(rows.before[inner], rows.mask[inner]),
        "new": _column(rows.current[inner], rows.mask[inner]),
        "ratio": _column(rows.ratio[inner], rows.mask[inner]),
        "advantage": _column(rows.advantages[inner], rows.mask[inner]),
        "clipped": rows.clipped[inner].astype(np.int8).tolist(),
    }


def _column(values: Array, mask: Array) -> list[float | None] | None:
    """Return rounded numbers, 0 where nothing trains; None for a column of which nothing is known."""
    if np.isnan(values[mask]).all():
        return None
    return np.where(mask, values, 0.0).astype(np.float64).round(_DIGITS).tolist()


def _number(value: Any) -> float | None:
    number = float(value)
    return round(number, 6) if np.isfinite(number) else None
