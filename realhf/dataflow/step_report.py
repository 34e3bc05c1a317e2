"""What a step reports: one ``CallReport`` per call, merged into a ``StepReport``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realhf.api.source import SampleResult


@dataclass(frozen=True)
class CallReport:
    """One call of a model function call: times in seconds. ``queue_s``: waiting for its batch; ``call_s``: from
    sending to the last reply; ``compute_s`` and ``fetch_s``: the longest among its workers."""

    mfc: str
    ids: tuple[str, ...]
    stats: Mapping[str, Any]
    queue_s: float
    call_s: float
    compute_s: float
    fetch_s: float
    n_tokens: int


@dataclass(frozen=True)
class StepReport:
    """One executed step. ``stats[mfc]`` are the interface's statistics, ``times[mfc]`` the sums over its calls
    of ``queue_s``, ``call_s``, ``compute_s``, ``fetch_s``; ``results`` in the order of drawing."""

    step: int
    wall_s: float
    calls: tuple[CallReport, ...]
    results: tuple[SampleResult, ...]
    stats: Mapping[str, Mapping[str, Any]]
    times: Mapping[str, Mapping[str, float]]
    buffer: Mapping[str, Any]
    source: Mapping[str, float] = field(default_factory=dict)

    @property
    def n_samples(self) -> int:
        """Samples (groups) that the step trained."""
        return len(self.results)


def step_report(
    step: int,
    wall_s: float,
    calls: Sequence[CallReport],
    results: Sequence[SampleResult],
    buffer: Mapping[str, Any],
    source: Mapping[str, float],
) -> StepReport:
    """Group the calls by model function call."""
    by_mfc: dict[str, list[CallReport]] = {}
    for call in calls:
        by_mfc.setdefault(call.mfc, []).append(call)
    stats = {
        mfc: merge_stats([c.stats for c in group], [len(c.ids) for c in group], parallel=False)
        for mfc, group in by_mfc.items()
    }
    times = {
        mfc: {name: sum(getattr(c, name) for c in group) for name in ("queue_s", "call_s", "compute_s", "fetch_s")}
        for mfc, group in by_mfc.items()
    }
    return StepReport(step, wall_s, tuple(calls), tuple(results), stats, times, buffer, source)


def merge_stats(parts: Sequence[Mapping[str, Any]], weights: Sequence[int], *, parallel: bool) -> dict[str, Any]:
    """Statistics of several shards (``parallel``) or of several calls after one another.

    Names ending in ``_seconds`` or ``_s`` are durations: the longest of shards, the sum of calls. Names ending
    in ``_tokens`` or ``rollouts``, beginning with ``n_``, ``failed/`` or ``retried/``, and ``skipped`` are counts:
    summed. Other numbers are means weighted by samples; lists are joined; of anything else the first is kept.
    """
    if len(parts) == 1:
        return dict(parts[0])
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        found = [(part[name], weight) for part, weight in zip(parts, weights, strict=True) if name in part]
        merged[name] = _merge(name, found, parallel)
    return merged


def _merge(name: str, found: Sequence[tuple[Any, int]], parallel: bool) -> Any:
    values = [value for value, _ in found]
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if not all(isinstance(value, (int, float)) for value in values):
        return values[0]
    if name.endswith(("_seconds", "_s")):
        return max(values) if parallel else sum(values)
    if name.endswith(("_tokens", "rollouts")) or name.startswith(("n_", "failed/", "retried/")) or name == "skipped":
        return sum(values)
    return sum(value * weight for value, weight in found) / sum(weight for _, weight in found)
