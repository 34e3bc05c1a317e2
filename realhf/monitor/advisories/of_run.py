"""Judges a run by its folder: with the rollouts that it kept, beside its metrics and evaluations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.monitor.advisories.advise import advise
from realhf.monitor.advisories.evidence import Advisory, Row
from realhf.monitor.rollouts.reader import RolloutStore
from realhf.monitor.rollouts.reader import Row as RolloutRow


def staleness_bound(run_dir: Path) -> float | None:
    """Return ``async_rl.max_head_offpolicyness`` of the run's configuration; None if it says nothing."""
    import yaml

    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        return float(config["async_rl"]["max_head_offpolicyness"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return None


def advise_run(
    run_dir: Path,
    rows: Sequence[Row],
    evaluations: Sequence[tuple[int, Mapping[str, Any]]],
    effective: Collection[str] | None,
) -> list[Advisory]:
    """Return what is to be said about the run in a folder; see ``advise``. A run that kept no rollouts is judged
    without them."""
    store = RolloutStore(run_dir)
    store.refresh()
    return advise(
        rows,
        index_of(store.rows()),
        evaluations=evaluations,
        staleness_bound=staleness_bound(run_dir),
        effective=effective,
    )


def index_of(rollouts: Iterable[RolloutRow]) -> list[dict[str, Any]]:
    """Return what rules judge of the lines of rollouts. Each counts once, however many conversations it had."""
    return [
        {
            "template": row.play.template or row.play.task,
            "group": row.play.group,
            "failure": row.play.failure,
            "step": row.step,
        }
        for row in rollouts
        if row.play.branch is None
    ]
