"""Pictures of a run as PNG files, drawn without a display (matplotlib's Agg canvas, no global state)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.monitor.headline import Row, figure, success_by_tier, time_split

Report = Mapping[str, Mapping[str, Mapping[str, Any]]]


def plot_learning(rows: Sequence[Row], before: Report | None, after: Report | None, path: Path) -> None:
    """Reward and success over the steps; beside it held-out success before and after, with 95 % intervals."""
    fig = new_figure(11, 4.2)
    held_out = [(label, report["sampled"]) for label, report in (("before", before), ("after", after))
                if report and "sampled" in report]
    if held_out:
        curves, bars = fig.subplots(1, 2, width_ratios=[1.6, 1])
        _held_out_bars(bars, held_out)
    else:
        curves = fig.subplots()
    steps = [row["step"] for row in rows]
    for name in ("reward", "success", "loss"):
        values = [figure(row, name) for row in rows]
        if any(value is not None for value in values) and not (name == "loss" and curves.lines):
            draw_curve(curves, steps, values, name)
    for tier in sorted({tier for row in rows for tier in success_by_tier(row)}):
        draw_curve(curves, steps, [success_by_tier(row).get(tier) for row in rows], f"success, {tier}", thin=True)
    curves.set(xlabel="step", title="training episodes" if held_out else "training")
    if curves.lines:
        curves.legend(fontsize=8)
    curves.grid(alpha=0.3)
    save_figure(fig, path)


def plot_time_split(rows: Sequence[Row], path: Path) -> None:
    """Where the seconds of every step go, stacked."""
    fig = new_figure(9, 3.8)
    axes = fig.subplots()
    splits = [time_split(row) for row in rows]
    steps = [row["step"] for row in rows]
    names = list(dict.fromkeys(name for split in splits for name in split))
    bottom = [0.0] * len(rows)
    for name in names:
        seconds = [split.get(name, 0.0) for split in splits]
        axes.bar(steps, seconds, bottom=bottom, width=0.9, label=name)
        bottom = [low + high for low, high in zip(bottom, seconds, strict=True)]
    axes.set(xlabel="step", ylabel="seconds", title="where the time goes")
    if names:
        axes.legend(fontsize=8)
    save_figure(fig, path)


def _held_out_bars(axes: Any, reports: Sequence[tuple[str, Mapping[str, Mapping[str, Any]]]]) -> None:
    groups = list(dict.fromkeys(name for _, report in reports for name in report))
    width = 0.8 / len(reports)
    for index, (label, report) in enumerate(reports):
        known = [(position, report[name]) for position, name in enumerate(groups) if name in report]
        heights = [100 * entry["success"] for _, entry in known]
        below = [max(0.0, 100 * (entry["success"] - entry.get("low", entry["success"]))) for _, entry in known]
        above = [max(0.0, 100 * (entry.get("high", entry["success"]) - entry["success"])) for _, entry in known]
        places = [position + (index - (len(reports) - 1) / 2) * width for position, _ in known]
        bars = axes.bar(places, heights, width, yerr=[below, above], capsize=3, label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=7, label_type="center", color="white")
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set(ylim=(0, 105), ylabel="%", title="held-out success (95 % intervals)")
    axes.legend(fontsize=8, loc="lower right")


def draw_curve(axes: Any, steps: Sequence[int], values: Sequence[float | None], label: str, thin: bool = False) -> None:
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    axes.plot([step for step, _ in points], [value for _, value in points], label=label,
              linewidth=1.0 if thin else 2.0, alpha=0.6 if thin else 1.0)


def new_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(fig)
    return fig


def save_figure(fig: Any, path: Path) -> None:
    partial = path.with_name(f"{path.stem}.tmp.png")
    fig.savefig(partial, dpi=120)
    os.replace(partial, path)
