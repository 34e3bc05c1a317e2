"""Puts the metrics of asynchronous rollouts in few words, for the display: staleness, occupancy, admission, failures.

Names as in ``metrics.jsonl``: ``staleness/..``, ``admission/..``, ``generation/..``, ``training/..``.
``admission/accepted`` counts since the start of the run, the other counters of admission since the start or the last
resumption; ``failures/<kind>`` and ``retries/<kind>`` are those of one step, with ``_total`` those since then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realhf.monitor.headline import Row, mean, total

SHOWN = (
    "staleness/",
    "admission/",
    "generation/",
    "training/",
    "failures_total/",
    "retries_total/",
    "time/episode/",
    "length/turns",
)
TROUBLE = ("failures", "retries")


def is_asynchronous(rows: Sequence[Row]) -> bool:
    """Return whether these steps were fed by admission control."""
    return any("admission/accepted" in row for row in rows)


def rollout_metrics(row: Row) -> dict[str, Any]:
    """Select those of a step's metrics that are about asynchronous rollouts."""
    return {name: value for name, value in row.items() if name.startswith(SHOWN)}


def flatten_rollouts(event: Mapping[str, Any]) -> dict[str, float]:
    """Give the values of an event ``rollouts`` {group: {name: number or {..}}} their names in ``metrics.jsonl``."""
    found: dict[str, float] = {}
    for name, value in event.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in flatten_rollouts(value).items()}
        elif isinstance(value, (int, float)):
            found[name] = float(value)
    return found


def by_kind(row: Row, counter: str) -> dict[str, float]:
    """Return the values of ``<counter>/<kind>`` that are not 0 as {kind: count}."""
    start = f"{counter}/"
    return {name.removeprefix(start): value for name, value in row.items() if name.startswith(start) and value}


def rollout_labels(row: Row) -> list[tuple[str, str]]:
    """Return the metrics that are known as (label, text), in the order in which they are read."""
    shown = [
        ("staleness", _joined(_number(row, "staleness/mean"), _number(row, "staleness/max", "max "))),
        ("generation", _percent(row, "generation/occupancy")),
        ("training", _percent(row, "training/occupancy")),
        ("in play", _number(row, "admission/running")),
        ("capacity", _number(row, "admission/capacity")),
        ("accepted", _number(row, "admission/accepted")),
        ("rejected", _nonzero(row, "admission/rejected")),
        ("dropped", _nonzero(row, "admission/dropped")),
        ("episode", _joined(_seconds(row, "time/episode/p50"), _seconds(row, "time/episode/p99", "p99 "))),
        ("turns", _number(row, "length/turns")),
        ("new weights stop", _number(row, "generation/weight_pause_ms", after=" ms")),
        ("failed", _counts(row, "failures_total") or _counts(row, "failures")),
        ("retried", _counts(row, "retries_total") or _counts(row, "retries")),
    ]
    return [(label, text) for label, text in shown if text]


def rollout_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarise the metrics of the rollouts over a whole run."""
    kinds = {counter: sorted({kind for row in rows for kind in by_kind(row, counter)}) for counter in TROUBLE}
    return {
        "staleness_head_mean": mean(rows, "staleness/mean"),
        "staleness_head_max": max((row["staleness/max"] for row in rows if "staleness/max" in row), default=None),
        "generation_occupancy": mean(rows, "generation/occupancy"),
        "training_occupancy": mean(rows, "training/occupancy"),
        "accepted": next((row["admission/accepted"] for row in reversed(rows) if "admission/accepted" in row), 0.0),
        **{name: total_counted(rows, f"admission/{name}") for name in ("rejected", "dropped")},
        "failed": {kind: total(rows, f"failures/{kind}") for kind in kinds["failures"]},
        "retried": {kind: total(rows, f"retries/{kind}") for kind in kinds["retries"]},
    }


def total_counted(rows: Sequence[Row], name: str) -> float:
    """Return how far a counter went over all steps, also across resumptions that began it anew."""
    whole, before = 0.0, 0.0
    for row in rows:
        now = row.get(name, before)
        whole += now - before if now >= before else now
        before = now
    return whole


def _number(row: Row, name: str, before: str = "", after: str = "") -> str:
    return (
        f"{before}{row[name]:.3g}{after}"
        if name in row and row[name] < 1000
        else (f"{before}{row[name]:.0f}{after}" if name in row else "")
    )


def _nonzero(row: Row, name: str) -> str:
    return _number(row, name) if row.get(name) else ""


def _percent(row: Row, name: str) -> str:
    return f"{row[name]:.0%}" if name in row else ""


def _seconds(row: Row, name: str, before: str = "") -> str:
    return f"{before}{row[name]:.1f} s" if name in row else ""


def _counts(row: Row, counter: str) -> str:
    return ", ".join(f"{kind} {value:.0f}" for kind, value in sorted(by_kind(row, counter).items()))


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
