"""Sums up the metrics of a run: the few figures that a person looks for, ``summary.json`` and the closing table.

Names as in ``metrics.jsonl``: ``staleness/..``, ``admission/..``, ``generation/..``, ``training/..``.
``admission/accepted`` counts since the start of the run, the other counters of admission since the start or the last
resumption; ``failures/<kind>`` and ``retries/<kind>`` are those of one step, with ``_total`` those since then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.base.files import write_whole
from realhf.base.text import printable

Row = Mapping[str, Any]
STEP_TIME, CALL_TIME, PART_TIME = "time/step", "time/", "time/part/"
_NO_CALLS = ("step", "episode", "fetch", "queue", "part")
"""What stands behind ``time/`` and is no call."""


def call_times(row: Row) -> dict[str, float]:
    """Return the seconds that each model function call of a step computed."""
    found = {name.removeprefix(CALL_TIME): value for name, value in row.items() if name.startswith(CALL_TIME)}
    return {call: value for call, value in found.items() if call.partition("/")[0] not in _NO_CALLS}


def part_seconds(row: Row, part: str) -> float:
    """Return the seconds of a step that all calls together spent with ``part``: generation, environment, rollouts."""
    return sum(value for name, value in row.items() if name.startswith(PART_TIME) and name.endswith(f"/{part}"))


def time_split(row: Row) -> dict[str, float]:
    """Return the seconds of a step by what took them: environment, generation, every other call by its name, and the
    rest."""
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


def total(rows: Sequence[Row], name: str) -> float:
    """Sum a metric over the steps; a step without it counts as 0."""
    return sum(row.get(name, 0.0) for row in rows)


def mean(rows: Sequence[Row], name: str) -> float | None:
    """Average a metric over the steps that have it; None if no step has it."""
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None


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
    return f"{before}{row[name]:{'.3g' if row[name] < 1000 else '.0f'}}{after}" if name in row else ""


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


Report = Mapping[str, Mapping[str, Mapping[str, Any]]]


def build_summary(
    rows: Sequence[Row], before: Report | None, after: Report | None, *, wall_seconds: float, train_calls: Sequence[str]
) -> dict[str, Any]:
    """Build the summary of a run. Times are totals over its steps, in seconds; ``wall_seconds`` covers everything from
    the launch on, including the warm start. ``*_interval``: 95 % intervals [low, high]."""
    generated, took = total(rows, "throughput/tokens"), total(rows, STEP_TIME)
    counted = (after or before or {}).get("sampled", {}).get("overall", {})
    summary: dict[str, Any] = {
        "heldout_episodes": int(counted.get("episodes", 0)),
        "steps": max((int(row["step"]) for row in rows), default=0),
        "wall_seconds": wall_seconds,
        "tokens_per_second": generated / took if took else 0.0,
        "env_seconds": sum(part_seconds(row, "environment") for row in rows),
        "generation_seconds": sum(part_seconds(row, "generation") for row in rows),
        "train_seconds": sum(call_times(row).get(call, 0.0) for row in rows for call in train_calls),
        "mismatch_kl": mean(rows, "mismatch/kl"),
    }
    for when, report in (("before", before), ("after", after)):
        for kind, suffix in (("sampled", ""), ("greedy", "_greedy")):
            # Of a group whose episodes have all failed nothing is known.
            groups = {name: entry for name, entry in (report or {}).get(kind, {}).items() if entry["episodes"]}
            summary |= {
                f"heldout_success_{when}{suffix}": {name: entry["success"] for name, entry in groups.items()},
                f"heldout_interval_{when}{suffix}": {
                    name: [entry["low"], entry["high"]]
                    for name, entry in groups.items()
                    if "low" in entry and "high" in entry
                },
                f"heldout_episodes_{when}{suffix}": {name: int(entry["episodes"]) for name, entry in groups.items()},
            }
    if is_asynchronous(rows):
        summary["asynchronous"] = rollout_summary(rows)
    return summary


def write_summary(summary: Mapping[str, Any], run_dir: Path) -> None:
    """Write ``summary.json`` into the run folder; the file is replaced only when complete."""
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")


def held_out_table(summary: Mapping[str, Any]) -> Any:
    """Make a rich table of held-out success before and after by group, with intervals and numbers of episodes (``117,
    468`` where they differ); None when nothing was evaluated."""
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
                Text(f"{printable(name)}, {label}"),  # whoever wrote the environment named the group
                _cell(before.get(name), summary[f"heldout_interval_before{suffix}"].get(name)),
                _cell(after.get(name), summary[f"heldout_interval_after{suffix}"].get(name)),
                f"{100 * (after[name] - before[name]):+.1f}" if name in before and name in after else "",
                ", ".join(dict.fromkeys(str(counted[name]) for counted in episodes if name in counted)),
            )
        table.add_section()
    return table


def _cell(success: float | None, interval: Sequence[float] | None) -> str:
    if success is None:
        return ""
    return f"{100 * success:.1f} %" + (f" [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]" if interval else "")
