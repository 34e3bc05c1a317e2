"""Judges a run by every rule: what an experienced eye would say about its metrics and its rollouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from realhf.monitor.advisories import learning, policy, running
from realhf.monitor.advisories.evidence import SEVERITIES, Advisory, Evidence, Row

Rule = Callable[[Evidence], Iterator[Advisory]]
OPTION = re.compile(r"\b(?:ppo|actor|critic|env|gen|rollout|async_rl|evaluation)\.[a-z_]\w*(?:\.[a-z]\w*)*")
"""How advice names an option."""
RULES: tuple[Rule, ...] = (*learning.RULES, *policy.RULES, *running.RULES)


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


def as_json(advisory: Advisory) -> dict[str, Any]:
    """Return an advisory as a map that JSON can hold, for the viewer."""
    return {
        "id": advisory.id,
        "severity": advisory.severity,
        "text": advisory.text,
        "since": advisory.since,
        "advice": advisory.advice,
        "filter": dict(advisory.filter),
    }
