"""Evaluation of all advisory rules for a run, given its metrics or its folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from realhf.monitor.advisory_rules import RULES, SEVERITIES, Advisory, MetricRow, RunEvidence
from realhf.monitor.provenance import read_config
from realhf.monitor.rollouts.reader import RolloutRow, RolloutStore

OPTION = re.compile(
    r"\b(?:ppo|actor|critic|env|gen|rollout|async_rl|evaluation)\.[a-z_]\w*(?:\.[a-z]\w*)*"
)
"""Pattern of an option's name in the text of an advice."""


def advise(
    rows: Sequence[MetricRow],
    index: Sequence[Mapping[str, Any]] = (),
    *,
    evaluations: Sequence[tuple[int, Mapping[str, Any]]] = (),
    staleness_bound: float | None = None,
    effective: Collection[str] | None = None,
) -> list[Advisory]:
    """Return the advisories for a run, sorted by severity (the most severe first), then by step.

    rows: metric rows in order, as from ``read_metrics``. index: index lines of rollouts
    (``template``, ``failure``, ``step``). evaluations: (number of completed steps, report) pairs.
    staleness_bound: maximum staleness that the run's options allow. effective: options that have an
    effect in the run, if known; an advice notes which of its other options have no effect. Values
    that are not numbers are ignored.
    """
    evidence = RunEvidence(
        rows, index, sorted(evaluations, key=lambda pair: pair[0]), staleness_bound
    )
    advisories = [
        _note_unused_options(advisory, effective) for rule in RULES for advisory in rule(evidence)
    ]
    return sorted(
        advisories,
        key=lambda advisory: (SEVERITIES.index(advisory.severity), advisory.since, advisory.id),
    )


def _note_unused_options(advisory: Advisory, effective: Collection[str] | None) -> Advisory:
    """Append a note to the advice that lists its options without effect in this run. Rules are
    written for all algorithms, so an advice may name such options."""
    unused = (
        [name for name in OPTION.findall(advisory.advice) if name not in effective]
        if effective
        else []
    )
    if not unused:
        return advisory
    return replace(
        advisory, advice=f"{advisory.advice} (Without effect in this run: {', '.join(unused)}.)"
    )


def advise_run(
    run_dir: Path,
    rows: Sequence[MetricRow],
    evaluations: Sequence[tuple[int, Mapping[str, Any]]],
    effective: Collection[str] | None,
) -> list[Advisory]:
    """Return the advisories for the run in a folder, like ``advise``. The folder may contain no
    rollouts."""
    store = RolloutStore(run_dir)
    store.refresh()
    try:
        bound = float(read_config(run_dir)["async_rl"]["max_head_offpolicyness"])
    except (KeyError, TypeError, ValueError):
        bound = None
    return advise(
        rows,
        index_rollouts(store.rows()),
        evaluations=evaluations,
        staleness_bound=bound,
        effective=effective,
    )


def index_rollouts(rollouts: Iterable[RolloutRow]) -> list[dict[str, Any]]:
    """Return the fields that rules use, one entry for each rollout. Further conversations of a
    rollout get no entries."""
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
