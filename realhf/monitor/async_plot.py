"""``async.png``: how an asynchronous run went: staleness, occupancy, samples, episodes, failures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from realhf.monitor.headline import Row
from realhf.monitor.plots import draw_curve, new_figure, save_figure


def staleness_bound(run_dir: Path) -> float | None:
    """``async_rl.max_head_offpolicyness`` of the run's configuration."""
    import yaml

    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        return float(config["async_rl"]["max_head_offpolicyness"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return None


def plot_async(rows: Sequence[Row], bound: float | None, path: Path) -> None:
    """Six panels over the steps. ``bound``: the staleness that is never exceeded, if known."""
    fig = new_figure(13, 6.4)
    panels: Sequence[Callable[[Any, Sequence[Row]], None]] = (
        lambda axes, rows: _staleness(axes, rows, bound), _occupancy, _samples, _latency, _length, _failures)
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
    _curves(axes, rows, {"staleness/head_mean": "mean", "staleness/head_max": "max"})
    if bound is not None:
        axes.axhline(bound, color="black", linestyle="--", linewidth=1, label="bound")
    axes.set(title="staleness of the oldest token, versions")


def _occupancy(axes: Any, rows: Sequence[Row]) -> None:
    _curves(axes, rows, {"generation/occupancy": "generation", "training/occupancy": "training"})
    axes.set(title="occupancy", ylim=(0, 1.05))


def _samples(axes: Any, rows: Sequence[Row]) -> None:
    """Counters are drawn as what each step added."""
    steps = [row["step"] for row in rows]
    for name in ("accepted", "rejected"):
        values = [row.get(f"admission/{name}") for row in rows]
        added = [None if now is None or before is None or now < before else now - before
                 for before, now in itertools.pairwise(values)]
        draw_curve(axes, steps[1:], added, f"{name} per step")
    _curves(axes, rows, {"admission/running": "running", "admission/capacity": "capacity"})
    axes.set(title="samples")


def _latency(axes: Any, rows: Sequence[Row]) -> None:
    _curves(axes, rows, {"rollout/episode_s_p50": "median", "rollout/episode_s_p99": "99th percentile"})
    axes.set(title="duration of an episode, seconds")


def _length(axes: Any, rows: Sequence[Row]) -> None:
    _curves(axes, rows, {"rollout/turns": "turns"})
    axes.set(title="length of an episode: turns, tokens (right)")
    right = axes.twinx()
    _curves(right, rows, {"rollout/tokens": "tokens"})
    for line in right.lines:
        line.set_color("tab:orange")
    right.set_ylim(bottom=0)
    right.tick_params(axis="y", colors="tab:orange")


def _failures(axes: Any, rows: Sequence[Row]) -> None:
    names = sorted({name for row in rows for name in row if name.startswith(("rollout/failed/", "rollout/retried/"))})
    _curves(axes, rows, {name: name.removeprefix("rollout/").replace("/", ": ") for name in names})
    axes.set(title="failures since the start, by kind")
