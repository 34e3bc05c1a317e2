"""Builds ``summary.json`` and the closing table: what a run reached and where its time went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.base.files.whole_file import write_whole
from realhf.base.text import printable
from realhf.monitor.headline import STEP_TIME, Row, call_times, mean, part_seconds, total
from realhf.monitor.rollout_metrics import is_asynchronous, rollout_summary

Report = Mapping[str, Mapping[str, Mapping[str, Any]]]


def build_summary(
    rows: Sequence[Row], before: Report | None, after: Report | None, *, wall_seconds: float, train_calls: Sequence[str]
) -> dict[str, Any]:
    """Build the summary of a run. Times are totals over its steps, in seconds; ``wall_seconds`` covers everything from
    the launch on, including the warm start. ``*_interval``: 95 % intervals [low, high]."""
    generated, took = total(rows, "throughput/tokens"), total(rows, STEP_TIME)
    counted = (after or before or {}).get("sampled", {}).get("overall", {})
    summary: dict[str, Any] = {
        "heldout_success_before": _success(before, "sampled"),
        "heldout_success_after": _success(after, "sampled"),
        "heldout_success_before_greedy": _success(before, "greedy"),
        "heldout_success_after_greedy": _success(after, "greedy"),
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
        for kind in ("sampled", "greedy"):
            suffix = "_greedy" if kind == "greedy" else ""
            summary[f"heldout_interval_{when}{suffix}"] = _intervals(report, kind)
            summary[f"heldout_episodes_{when}{suffix}"] = _episodes(report, kind)
    if is_asynchronous(rows):
        summary["asynchronous"] = rollout_summary(rows)
    return summary


def write_summary(summary: Mapping[str, Any], run_dir: Path) -> None:
    """Write ``summary.json`` into the run folder; the file is replaced only when complete."""
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")


def held_out_table(summary: Mapping[str, Any]) -> Any:
    """Make a rich table of held-out success before and after by group, with intervals and numbers of episodes; None
    when nothing was evaluated."""
    from rich.table import Table
    from rich.text import Text

    if not (summary["heldout_success_before"] or summary["heldout_success_after"]):
        return None
    table = Table(title="Held-out success")
    for heading in ("", "before", "after", "change", "episodes"):
        table.add_column(heading, justify="left" if not heading else "right")
    for suffix, label in (("", "sampled"), ("_greedy", "greedy")):
        before, after = (summary[f"heldout_success_{when}{suffix}"] for when in ("before", "after"))
        episodes = summary[f"heldout_episodes_before{suffix}"] | summary[f"heldout_episodes_after{suffix}"]
        for name in dict.fromkeys([*before, *after]):
            table.add_row(
                Text(f"{printable(name)}, {label}"),  # whoever wrote the environment named the group
                _cell(before.get(name), summary[f"heldout_interval_before{suffix}"].get(name)),
                _cell(after.get(name), summary[f"heldout_interval_after{suffix}"].get(name)),
                f"{100 * (after[name] - before[name]):+.1f}" if name in before and name in after else "",
                str(episodes[name]),
            )
        table.add_section()
    return table


def _cell(success: float | None, interval: Sequence[float] | None) -> str:
    if success is None:
        return ""
    return f"{100 * success:.1f} %" + (f" [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]" if interval else "")


def _success(report: Report | None, kind: str) -> dict[str, float]:
    return {name: entry["success"] for name, entry in (report or {}).get(kind, {}).items()}


def _episodes(report: Report | None, kind: str) -> dict[str, int]:
    return {name: int(entry["episodes"]) for name, entry in (report or {}).get(kind, {}).items()}


def _intervals(report: Report | None, kind: str) -> dict[str, list[float]]:
    return {
        name: [entry["low"], entry["high"]]
        for name, entry in (report or {}).get(kind, {}).items()
        if "low" in entry and "high" in entry
    }
