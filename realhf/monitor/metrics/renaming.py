"""Gives the numbers of a step their public names, once, where the row of the step is made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from realhf.monitor.metrics.names import CRITIC_CALL, OVERALL, POLICY_CALL, ROLLOUT_CALL, SECTIONS, Metric

_PLACE = re.compile(r"<(\w+)>")
_ONE_PART = ("call", "split", "way", "part", "lag")
"""Placeholders that stand for a word without a slash; a group, a kind or a name may hold slashes."""
REWARD, TRAINED_REWARD = "reward/mean", "reward/trained_mean"


def public_names(
    row: Mapping[str, Any], *, policy_call: str = POLICY_CALL, rollout_call: str = ROLLOUT_CALL
) -> dict[str, Any]:
    """Return the row with the names of ``realhf.monitor.metrics.names``, in the same order.

    ``policy_call`` and ``rollout_call`` are the calls whose statistics are those of the policy and of the rollouts.
    What has no public name keeps the one it has; so a row that was renamed before stays as it is. Where two numbers
    would get one name, the first counts.
    """
    aliases = {policy_call: POLICY_CALL, rollout_call: ROLLOUT_CALL}
    named: dict[str, Any] = {}
    for name, value in row.items():
        call, slash, own = name.partition("/")
        known = public_name(f"{aliases[call]}/{own}" if slash and call in aliases else name)
        if known is None or known.startswith("time/part/"):  # Parts of a call's time are named after the call itself.
            known = public_name(name)
        named.setdefault(known or name, value)
    if REWARD not in named and TRAINED_REWARD in named:
        named[REWARD] = named[TRAINED_REWARD]
    return named


def calls_of(train_calls: Sequence[str], generate_calls: Sequence[str]) -> dict[str, str]:
    """Choose the arguments ``policy_call`` and ``rollout_call`` of ``public_names`` from the calls of a graph: the one
    with the name of the built-in experiments, or else the only one of its kind beside the critic's."""
    return {
        "policy_call": _only([name for name in train_calls if name != CRITIC_CALL], POLICY_CALL),
        "rollout_call": _only(generate_calls, ROLLOUT_CALL),
    }


def _only(calls: Sequence[str], usual: str) -> str:
    return calls[0] if len(calls) == 1 else usual


def public_name(name: str) -> str | None:
    """Return the public name of a number that a part of the run calls ``name``; None if it has none of its own."""
    exact, patterns = _sources()
    if name in exact:
        return exact[name]
    for pattern, public in patterns:
        if found := pattern.fullmatch(name):
            return _PLACE.sub(lambda place: found[place[1]], public)
    return None


def metric_of(name: str) -> Metric | None:
    """Return the entry that describes a public name; None for one that is in no table. An entry with fewer
    placeholders is preferred."""
    exact, patterns = _described()
    return exact.get(name) or next((metric for pattern, metric in patterns if pattern.fullmatch(name)), None)


def evaluation_metrics(report: Mapping[str, Mapping[str, Mapping[str, Any]]], split: str) -> dict[str, float]:
    """Return the numbers of an evaluation report (``realhf.api.evaluation.Report``) under their public names."""
    names = {"success": "success", "low": "success_low", "high": "success_high"}
    names |= {name: name for name in ("reward", "turns", "failed")}
    return {
        f"eval/{split}/{way}/{names[name]}/{group}": float(value)
        for way, groups in report.items()
        for group, entry in groups.items()
        for name, value in entry.items()
        if name in names and isinstance(value, (int, float))
    }


def success_by_group(row: Mapping[str, Any]) -> dict[str, float]:
    """Return {group: success} of the rollouts of a step, without that of all groups together."""
    start = "success/"
    found = {name.removeprefix(start): value for name, value in row.items() if name.startswith(start)}
    return {group: value for group, value in found.items() if group != OVERALL}


def _pattern(name: str) -> re.Pattern[str]:
    words, parts = _PLACE.split(name)[1::2], _PLACE.split(name)[::2]
    inner = [f"(?P<{word}>{'[^/]+' if word in _ONE_PART else '.+'})" for word in words]
    return re.compile(
        "".join(re.escape(part) + (inner[at] if at < len(inner) else "") for at, part in enumerate(parts))
    )


@cache
def _sources() -> tuple[dict[str, str], list[tuple[re.Pattern[str], str]]]:
    pairs = [(source, metric.name) for section in SECTIONS for metric in section.metrics for source in metric.sources]
    exact = {source: name for source, name in pairs if "<" not in source}
    return exact, [(_pattern(source), name) for source, name in pairs if "<" in source]


@cache
def _described() -> tuple[dict[str, Metric], list[tuple[re.Pattern[str], Metric]]]:
    metrics = [metric for section in SECTIONS for metric in section.metrics]
    ordered = sorted(
        (metric for metric in metrics if "<" in metric.name),
        key=lambda metric: (metric.name.startswith("<call>"), metric.name.count("<")),
    )
    exact = {metric.name: metric for metric in metrics if "<" not in metric.name}
    return exact, [(_pattern(metric.name), metric) for metric in ordered]
