"""Collects what every rule says about a run, of its rows or of its folder, the gravest first."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from realhf.monitor.advisory_rules import RULES, SEVERITIES, Advisory, Evidence, Row
from realhf.monitor.provenance import read_config
from realhf.monitor.rollouts.reader import RolloutStore
from realhf.monitor.rollouts.reader import Row as RolloutRow

OPTION = re.compile(r"\b(?:ppo|actor|critic|env|gen|rollout|async_rl|evaluation)\.[a-z_]\w*(?:\.[a-z]\w*)*")
"""How advice names an option."""


def advise(
    rows: Sequence[Row],
    index: Sequence[Mapping[str, Any]] = (),
    *,
    evaluations: Sequence[tuple[int, Mapping[str, Any]]] = (),
    staleness_bound: float | None = None,
    effective: Collection[str] | None = None,
) -> list[Advisory]:
    """Return what is to be said about a run, the gravest first, else by step.

    ``rows`` are those of ``read_metrics``, in order; ``index`` lines of rollouts as mappings (``template``,
    ``failure``, ``step``); ``evaluations`` reports by completed steps; ``staleness_bound`` that of the run's
    configuration. ``effective`` are the options that do something in the run, if that is known: where advice names
    another one, it says so. Values that are no numbers are passed over.
    """
    evidence = Evidence(rows, index, sorted(evaluations, key=lambda pair: pair[0]), staleness_bound)
    found = [_fitting(advisory, effective) for rule in RULES for advisory in rule(evidence)]
    return sorted(found, key=lambda advisory: (SEVERITIES.index(advisory.severity), advisory.since, advisory.id))


def _fitting(advisory: Advisory, effective: Collection[str] | None) -> Advisory:
    """Say which options of the advice do nothing in this run: one rule serves every algorithm and environment."""
    idle = [name for name in OPTION.findall(advisory.advice) if name not in effective] if effective else []
    if not idle:
        return advisory
    return replace(advisory, advice=f"{advisory.advice} (Without effect in this run: {', '.join(idle)}.)")


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
    try:
        bound = float(read_config(run_dir)["async_rl"]["max_head_offpolicyness"])
    except (KeyError, TypeError, ValueError):
        bound = None
    return advise(rows, index_of(store.rows()), evaluations=evaluations, staleness_bound=bound, effective=effective)


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
