"""Draws the pictures of runs and evaluations as PNG files, without a display (matplotlib's Agg canvas).

``learning.png`` and ``time.png`` belong to every run, ``async.png`` to an asynchronous one, and bars of success
to ``evaluate``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.base.files.whole_file import whole_file
from realhf.monitor.headline import Row, time_split
from realhf.monitor.metrics.renaming import success_by_group

Report = Mapping[str, Mapping[str, Mapping[str, Any]]]


def plot_learning(rows: Sequence[Row], before: Report | None, after: Report | None, path: Path) -> None:
    """Plot reward and success over the steps, and beside them held-out success before and after with 95 % intervals."""
    fig = new_figure(11, 4.2)
    held_out = [
        (label, report["sampled"])
        for label, report in (("before", before), ("after", after))
        if report and "sampled" in report
    ]
    if held_out:
        curves, bars = fig.subplots(1, 2, width_ratios=[1.6, 1])
        _held_out_bars(bars, held_out)
    else:
        curves = fig.subplots()
    steps = [row["step"] for row in rows]
    for name, label in (("reward/mean", "reward"), ("success/overall", "success"), ("policy/loss", "loss")):
        values = [row.get(name) for row in rows]
        if any(value is not None for value in values) and not (label == "loss" and curves.lines):
            draw_curve(curves, steps, values, label)
    for group in sorted({group for row in rows for group in success_by_group(row)}):
        draw_curve(curves, steps, [success_by_group(row).get(group) for row in rows], f"success, {group}", thin=True)
    curves.set(xlabel="step", title="training episodes" if held_out else "training")
    if curves.lines:
        curves.legend(fontsize=8)
    curves.grid(alpha=0.3)
    save_figure(fig, path)


def plot_time_split(rows: Sequence[Row], path: Path) -> None:
    """Plot where the seconds of every step go, stacked."""
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
    """Draw one line over the steps; steps whose value is None are left out."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    axes.plot(
        [step for step, _ in points],
        [value for _, value in points],
        label=label,
        linewidth=1.0 if thin else 2.0,
        alpha=0.6 if thin else 1.0,
    )


def new_figure(width: float, height: float) -> Any:
    """Make an empty matplotlib figure of this size in inches that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(fig)
    return fig


def save_figure(fig: Any, path: Path) -> None:
    """Write the figure as a PNG file; ``path`` is replaced only when the file is complete."""
    with whole_file(path) as partial:
        fig.savefig(partial, dpi=120, format="png")


def staleness_bound(run_dir: Path) -> float | None:
    """Return ``async_rl.max_head_offpolicyness`` of the run's configuration; None if it says nothing."""
    import yaml

    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        return float(config["async_rl"]["max_head_offpolicyness"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return None


def plot_async(rows: Sequence[Row], bound: float | None, path: Path) -> None:
    """Plot six panels about the rollouts over the steps. ``bound``: the staleness that is never exceeded, if known."""
    fig = new_figure(13, 6.4)
    panels: Sequence[Callable[[Any, Sequence[Row]], None]] = (
        lambda axes, rows: _staleness(axes, rows, bound),
        _occupancy,
        _samples,
        _latency,
        _length,
        _failures,
    )
    for axes, draw in zip(fig.subplots(2, 3).flat, panels, strict=True):
        draw(axes, rows)
        axes.grid(alpha=0.3)
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
        if axes.lines:
            axes.legend(fontsize=7)
    save_figure(fig, path)


def _curves(axes: Any, rows: Sequence[Row], names: dict[str, str]) -> None:
    steps = [row["step"] for row in rows]
    for name, label in names.items():
        if any(name in row for row in rows):
            draw_curve(axes, steps, [row.get(name) for row in rows], label)


def _staleness(axes: Any, rows: Sequence[Row], bound: float | None) -> None:
    _curves(axes, rows, {"staleness/mean": "mean", "staleness/max": "max"})
    if bound is not None:
        axes.axhline(bound, color="black", linestyle="--", linewidth=1, label="bound")
    axes.set(title="staleness of the oldest token, versions")


def _occupancy(axes: Any, rows: Sequence[Row]) -> None:
    _curves(axes, rows, {"generation/occupancy": "generation", "training/occupancy": "training"})
    axes.set(title="occupancy", ylim=(0, 1.05))


def _samples(axes: Any, rows: Sequence[Row]) -> None:
    """Plot the sample counters as what each step added."""
    steps = [row["step"] for row in rows]
    for name in ("accepted", "rejected"):
        values = [row.get(f"admission/{name}") for row in rows]
        added = [
            None if now is None or before is None or now < before else now - before
            for before, now in itertools.pairwise(values)
        ]
        draw_curve(axes, steps[1:], added, f"{name} per step")
    _curves(axes, rows, {"admission/running": "running", "admission/capacity": "capacity"})
    axes.set(title="samples")


def _latency(axes: Any, rows: Sequence[Row]) -> None:
    _curves(axes, rows, {"time/episode/p50": "median", "time/episode/p99": "99th percentile"})
    axes.set(title="duration of an episode, seconds")


def _length(axes: Any, rows: Sequence[Row]) -> None:
    _curves(axes, rows, {"length/turns": "turns"})
    axes.set(title="length of an episode: turns, tokens (right)")
    right = axes.twinx()
    _curves(right, rows, {"rollouts/tokens": "tokens"})
    for line in right.lines:
        line.set_color("tab:orange")
    right.set_ylim(bottom=0)
    right.tick_params(axis="y", colors="tab:orange")


def _failures(axes: Any, rows: Sequence[Row]) -> None:
    steps = [row["step"] for row in rows]
    for name in sorted({name for row in rows for name in row if name.startswith(("failures/", "retries/"))}):
        counts = list(itertools.accumulate(row.get(name, 0.0) for row in rows))
        draw_curve(axes, steps, counts, name.replace("/", ": "))
    axes.set(title="failures since the start, by kind")


def plot_success(reports: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """Plot bars of success to a PNG file. ``reports``: agent name to {group: {"success": {value, low, high, n}}}."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(group for report in reports.values() for group in report))
    fig = Figure(figsize=(1.6 + 1.3 * len(groups), 3.6), layout="constrained")
    axes = fig.subplots()
    width = 0.8 / len(reports)
    for number, (agent, report) in enumerate(reports.items()):
        shown = [
            (place, report[group]["success"])
            for place, group in enumerate(groups)
            if report.get(group, {}).get("success")
        ]
        values = [100 * rate["value"] for _, rate in shown]
        errors = [
            [100 * max(0.0, rate["value"] - rate["low"]) for _, rate in shown],
            [100 * max(0.0, rate["high"] - rate["value"]) for _, rate in shown],
        ]
        places = [place + (number - (len(reports) - 1) / 2) * width for place, _ in shown]
        axes.bar(places, values, width * 0.92, yerr=errors, capsize=2, label=agent, error_kw={"lw": 1})
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 105)
    axes.set_ylabel("episodes solved, %")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(reports))
    fig.savefig(path, dpi=130)
