"""Judges a run by its folder: with the rollouts that it kept, beside its metrics and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.monitor.advisories.advise import advise
from realhf.monitor.advisories.evidence import Advisory, Row
from realhf.monitor.rollouts.reader import RolloutStore


def advise_run(
    run_dir: Path,
    rows: Sequence[Row],
    evaluations: Sequence[tuple[int, Mapping[str, Any]]],
    staleness_bound: float | None,
) -> list[Advisory]:
    """Return what is to be said about the run in a folder; see ``advise``. A run that kept no rollouts is judged
    without them."""
    store = RolloutStore(run_dir)
    store.refresh()
    return advise(rows, index_of(store), evaluations=evaluations, staleness_bound=staleness_bound)


def index_of(store: RolloutStore) -> list[dict[str, Any]]:
    """Return the lines that rules judge of the rollouts that a store has read."""
    return [
        {"task": row.play.task, "group": row.play.group, "failure": row.play.failure, "step": row.step}
        for row in store.rows()
    ]
