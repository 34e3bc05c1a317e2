"""Defines what an evaluation reports: the results of held-out episodes, and their success by group with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realhf.base.intervals import wilson_interval
from realhf.base.messages import Message

Report = dict[str, dict[str, dict[str, Any]]]
"""Way of sampling (``sampled``, ``greedy``) -> ``overall`` or a group -> figures, see ``evaluation_report``."""


class EpisodeResult(Message, frozen=True):
    """Says how one held-out episode ended. One that is not ``valid`` failed: it says nothing about the policy."""

    group: str
    valid: bool
    achieved: bool
    reward: float
    turns: int


def evaluation_report(results: Sequence[EpisodeResult], version: int) -> dict[str, dict[str, Any]]:
    """Return {"overall" or group: {success, low, high, reward, turns, episodes, failed, version}}.

    Failed episodes (environment errors) are counted in ``failed`` and enter no mean; ``low`` and ``high`` are the 95 %
    Wilson interval of the success rate; ``version`` is that of the policy that played all of them.
    """
    report = {"overall": _summary(results, version)}
    for group in sorted({result.group for result in results if result.group}):
        report[group] = _summary([result for result in results if result.group == group], version)
    return report


def _summary(results: Sequence[EpisodeResult], version: int) -> dict[str, Any]:
    valid = [result for result in results if result.valid]
    n = len(valid)
    successes = sum(result.achieved for result in valid)
    low, high = wilson_interval(successes, n)
    return {
        "success": successes / n if n else 0.0,
        "low": low,
        "high": high,
        "reward": sum(result.reward for result in valid) / n if n else 0.0,
        "turns": sum(result.turns for result in valid) / n if n else 0.0,
        "episodes": n,
        "failed": len(results) - n,
        "version": version,
    }
