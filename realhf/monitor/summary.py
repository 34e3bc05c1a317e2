"""Summaries of a run's metrics: labels for the display, ``summary.json``, and the final table.

Names are those of ``metrics.jsonl``: ``staleness/..``, ``admission/..``, ``generation/..``,
``training/..``. ``admission/accepted`` is counted from the start of the run, and the other
admission counters from the start or the last resumption. ``failures/<kind>`` and ``retries/<kind>``
are counts of one step; with the suffix ``_total`` they are counted from the start or the last
resumption.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.base.files import write_atomic
from realhf.base.text import escape_controls

MetricRow = Mapping[str, Any]
STEP_TIME = "time/step"
CALL_TIME = "time/"
PART_TIME = "time/part/"
_NO_CALLS = ("step", "episode", "fetch", "queue", "part")
"""Names after the prefix ``time/`` that are not calls."""


def call_times(row: MetricRow) -> dict[str, float]:
    """Return the computing time in seconds of each model function call of a step, by call."""
    times = {
        name.removeprefix(CALL_TIME): value
        for name, value in row.items()
        if name.startswith(CALL_TIME)
    }
    return {call: value for call, value in times.items() if call.partition("/")[0] not in _NO_CALLS}


def part_seconds(row: MetricRow, part: str) -> float:
    """Return the total seconds that a step's calls spent in ``part``: generation, environment or
    rollouts."""
    return sum(
        value
        for name, value in row.items()
        if name.startswith(PART_TIME) and name.endswith(f"/{part}")
    )


def time_split(row: MetricRow) -> dict[str, float]:
    """Return the division of a step's time in seconds: environment, generation, each other call by
    name, and other."""
    split: dict[str, float] = {}
    for name, seconds in call_times(row).items():
        environment = row.get(f"{PART_TIME}{name}/environment")
        generation = row.get(f"{PART_TIME}{name}/generation")
        if environment is None or generation is None:
            split[name] = seconds
        else:
            split |= {"environment": environment, "generation": generation}
    split["other"] = max(0.0, row.get(STEP_TIME, 0.0) - sum(split.values()))
    return split


def total(rows: Sequence[MetricRow], name: str) -> float:
    """Return the sum of a metric over the steps. Steps without the metric count as 0."""
    return sum(row.get(name, 0.0) for row in rows)


def mean(rows: Sequence[MetricRow], name: str) -> float | None:
    """Return the mean of a metric over the steps that have it; None if no step has it."""
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None


ROLLOUT_PREFIXES = (
    "staleness/",
    "admission/",
    "generation/",
    "training/",
    "failures_total/",
    "retries_total/",
    "time/episode/",
    "length/turns",
)
FAILURE_COUNTERS = ("failures", "retries")


def is_asynchronous(rows: Sequence[MetricRow]) -> bool:
    """Return whether the steps belong to an asynchronous run, which is recognised by its admission
    counters."""
    return any("admission/accepted" in row for row in rows)


def rollout_metrics(row: MetricRow) -> dict[str, Any]:
    """Return those metrics of a step that are about asynchronous rollouts."""
    return {name: value for name, value in row.items() if name.startswith(ROLLOUT_PREFIXES)}


def flatten_rollouts(event: Mapping[str, Any]) -> dict[str, float]:
    """Flatten an event ``rollouts``, {group: {name: number or {..}}}, to {name in
    ``metrics.jsonl``: number}."""
    metrics: dict[str, float] = {}
    for name, value in event.items():
        if isinstance(value, Mapping):
            metrics |= {
                f"{name}/{inner}": number for inner, number in flatten_rollouts(value).items()
            }
        elif isinstance(value, (int, float)):
            metrics[name] = float(value)
    return metrics


def count_by_kind(row: MetricRow, counter: str) -> dict[str, float]:
    """Return the nonzero values of the metrics ``<counter>/<kind>`` as {kind: count}."""
    start = f"{counter}/"
    return {
        name.removeprefix(start): value
        for name, value in row.items()
        if name.startswith(start) and value
    }


def rollout_labels(row: MetricRow) -> list[tuple[str, str]]:
    """Return (label, text) for each available rollout metric, in the order of display."""
    labels = [
        ("staleness", _join(_number(row, "staleness/mean"), _number(row, "staleness/max", "max "))),
        ("generation", _percent(row, "generation/occupancy")),
        ("training", _percent(row, "training/occupancy")),
        ("in play", _number(row, "admission/running")),
        ("capacity", _number(row, "admission/capacity")),
        ("accepted", _number(row, "admission/accepted")),
        ("rejected", _nonzero(row, "admission/rejected")),
        ("dropped", _nonzero(row, "admission/dropped")),
        (
            "episode",
            _join(_seconds(row, "time/episode/p50"), _seconds(row, "time/episode/p99", "p99 ")),
        ),
        ("turns", _number(row, "length/turns")),
        ("new weights stop", _number(row, "generation/weight_pause_ms", after=" ms")),
        ("failed", _counts(row, "failures_total") or _counts(row, "failures")),
        ("retried", _counts(row, "retries_total") or _counts(row, "retries")),
    ]
    return [(label, text) for label, text in labels if text]


def rollout_summary(rows: Sequence[MetricRow]) -> dict[str, Any]:
    """Return a summary of the rollout metrics of a whole run."""
    kinds = {
        counter: sorted({kind for row in rows for kind in count_by_kind(row, counter)})
        for counter in FAILURE_COUNTERS
    }
    return {
        "staleness_head_mean": mean(rows, "staleness/mean"),
        "staleness_head_max": max(
            (row["staleness/max"] for row in rows if "staleness/max" in row), default=None
        ),
        "generation_occupancy": mean(rows, "generation/occupancy"),
        "training_occupancy": mean(rows, "training/occupancy"),
        "accepted": next(
            (row["admission/accepted"] for row in reversed(rows) if "admission/accepted" in row),
            0.0,
        ),
        **{name: counter_increase(rows, f"admission/{name}") for name in ("rejected", "dropped")},
        "failed": {kind: total(rows, f"failures/{kind}") for kind in kinds["failures"]},
        "retried": {kind: total(rows, f"retries/{kind}") for kind in kinds["retries"]},
    }


def counter_increase(rows: Sequence[MetricRow], name: str) -> float:
    """Return the total increase of a counter over all steps. Resumptions, which reset the counter,
    are taken into account."""
    increase = 0.0
    before = 0.0
    for row in rows:
        now = row.get(name, before)
        increase += now - before if now >= before else now
        before = now
    return increase


def _number(row: MetricRow, name: str, before: str = "", after: str = "") -> str:
    return (
        f"{before}{row[name]:{'.3g' if row[name] < 1000 else '.0f'}}{after}" if name in row else ""
    )


def _nonzero(row: MetricRow, name: str) -> str:
    return _number(row, name) if row.get(name) else ""


def _percent(row: MetricRow, name: str) -> str:
    return f"{row[name]:.0%}" if name in row else ""


def _seconds(row: MetricRow, name: str, before: str = "") -> str:
    return f"{before}{row[name]:.1f} s" if name in row else ""


def _counts(row: MetricRow, counter: str) -> str:
    return ", ".join(
        f"{kind} {value:.0f}" for kind, value in sorted(count_by_kind(row, counter).items())
    )


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


EvaluationReports = Mapping[str, Mapping[str, Mapping[str, Any]]]


def build_summary(
    rows: Sequence[MetricRow],
    before: EvaluationReports | None,
    after: EvaluationReports | None,
    *,
    wall_seconds: float,
    train_calls: Sequence[str],
) -> dict[str, Any]:
    """Return the summary of a run.

    before, after: evaluations before and after training. wall_seconds: seconds since the launch,
    including the warm start. Other times in the summary are totals over the steps, in seconds. Keys
    that end in ``_interval`` are 95 % intervals [low, high].
    """
    generated = total(rows, "throughput/tokens")
    step_seconds = total(rows, STEP_TIME)
    overall = (after or before or {}).get("sampled", {}).get("overall", {})
    summary: dict[str, Any] = {
        "heldout_episodes": int(overall.get("episodes", 0)),
        "steps": max((int(row["step"]) for row in rows), default=0),
        "wall_seconds": wall_seconds,
        "tokens_per_second": generated / step_seconds if step_seconds else 0.0,
        "env_seconds": sum(part_seconds(row, "environment") for row in rows),
        "generation_seconds": sum(part_seconds(row, "generation") for row in rows),
        "train_seconds": sum(
            call_times(row).get(call, 0.0) for row in rows for call in train_calls
        ),
        "mismatch_kl": mean(rows, "mismatch/kl"),
    }
    for when, report in (("before", before), ("after", after)):
        for kind, suffix in (("sampled", ""), ("greedy", "_greedy")):
            # A group without any valid episode has no result.
            groups = {
                name: entry
                for name, entry in (report or {}).get(kind, {}).items()
                if entry["episodes"]
            }
            summary |= {
                f"heldout_success_{when}{suffix}": {
                    name: entry["success"] for name, entry in groups.items()
                },
                f"heldout_interval_{when}{suffix}": {
                    name: [entry["low"], entry["high"]]
                    for name, entry in groups.items()
                    if "low" in entry and "high" in entry
                },
                f"heldout_episodes_{when}{suffix}": {
                    name: int(entry["episodes"]) for name, entry in groups.items()
                },
            }
        if results := (report or {}).get(HELD_OUT_ROWS, {}).get("overall"):
            summary[f"heldout_rows_{when}"] = dict(results)
    if is_asynchronous(rows):
        summary["asynchronous"] = rollout_summary(rows)
    return summary


HELD_OUT_ROWS = "rows"
"""Name of the results on held-out rows of a file in an evaluation report."""


def describe_rows(results: Mapping[str, Any]) -> str:
    """Format the results of an evaluation on held-out rows, such as ``loss 1.2340, token accuracy
    61.5% (20 rows)``."""
    parts = [
        f"{name.replace('_', ' ')} {value:.1%}"
        if name.endswith("accuracy")
        else f"{name.replace('_', ' ')} {value:.4f}"
        for name, value in results.items()
        if isinstance(value, float)
    ]
    return f"{', '.join(parts)} ({results['rows']} rows)"


def write_summary(summary: Mapping[str, Any], run_dir: Path) -> None:
    """Write ``summary.json`` atomically into the run folder."""
    write_atomic(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")


def build_held_out_table(summary: Mapping[str, Any]) -> Any:
    """Build a rich table of the held-out success of each group before and after training.

    It contains intervals and numbers of episodes (``117, 468`` if they differ before and after
    training). Returns None if there was no evaluation.
    """
    from rich.table import Table
    from rich.text import Text

    if not (summary["heldout_success_before"] or summary["heldout_success_after"]):
        return None
    table = Table(title="Held-out success")
    for heading in ("", "before", "after", "change", "episodes"):
        table.add_column(heading, justify="left" if not heading else "right")
    for suffix, label in (("", "sampled"), ("_greedy", "greedy")):
        before, after = (summary[f"heldout_success_{when}{suffix}"] for when in ("before", "after"))
        episodes = [summary[f"heldout_episodes_{when}{suffix}"] for when in ("before", "after")]
        for name in dict.fromkeys([*before, *after]):
            table.add_row(
                Text(
                    f"{escape_controls(name)}, {label}"
                ),  # the environment's author chose the name of the group
                _cell(before.get(name), summary[f"heldout_interval_before{suffix}"].get(name)),
                _cell(after.get(name), summary[f"heldout_interval_after{suffix}"].get(name)),
                f"{100 * (after[name] - before[name]):+.1f}"
                if name in before and name in after
                else "",
                ", ".join(
                    dict.fromkeys(str(counts[name]) for counts in episodes if name in counts)
                ),
            )
        table.add_section()
    return table


def _cell(success: float | None, interval: Sequence[float] | None) -> str:
    if success is None:
        return ""
    return f"{100 * success:.1f} %" + (
        f" [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]" if interval else ""
    )
