"""Judges a run by every rule: what an experienced eye would say about its metrics and its rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from realhf.monitor.advisories import learning, policy, running
from realhf.monitor.advisories.evidence import SEVERITIES, Advisory, Evidence, Row

Rule = Callable[[Evidence], Iterator[Advisory]]
RULES: tuple[Rule, ...] = (*learning.RULES, *policy.RULES, *running.RULES)


def advise(
    rows: Sequence[Row],
    index: Sequence[Mapping[str, Any]] = (),
    *,
    evaluations: Sequence[tuple[int, Mapping[str, Any]]] = (),
    staleness_bound: float | None = None,
) -> list[Advisory]:
    """Return what is to be said about a run, the gravest first, else by step.

    ``rows`` are those of ``read_metrics``, in order; ``index`` lines of rollouts as mappings (``task``, ``failure``,
    ``step``); ``evaluations`` reports by completed steps; ``staleness_bound`` that of the run's configuration. Values
    that are no numbers are passed over.
    """
    evidence = Evidence(rows, index, sorted(evaluations, key=lambda pair: pair[0]), staleness_bound)
    found = [advisory for rule in RULES for advisory in rule(evidence)]
    return sorted(found, key=lambda advisory: (SEVERITIES.index(advisory.severity), advisory.since, advisory.id))


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
