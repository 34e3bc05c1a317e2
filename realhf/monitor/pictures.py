"""Draws all pictures of a run from its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from realhf.monitor.headline import Row
from realhf.monitor.plots import plot_async, plot_learning, plot_time_split, staleness_bound
from realhf.monitor.rollout_metrics import is_asynchronous
from realhf.monitor.run_files import Evaluations

LEARNING, TIME, ASYNC, TIMELINE = "learning.png", "time.png", "async.png", "timeline.png"


def draw_pictures(run_dir: Path, rows: Sequence[Row], evaluations: Evaluations) -> None:
    """Write ``learning.png``, ``time.png`` and, for an asynchronous run, ``async.png``, with the steps made so far."""
    last = rows[-1]["step"] if rows else 0
    after = evaluations.at(last) if last else None
    plot_learning(rows, evaluations.at(0), after, run_dir / LEARNING)
    plot_time_split(rows, run_dir / TIME)
    if is_asynchronous(rows):
        plot_async(rows, staleness_bound(run_dir), run_dir / ASYNC)
