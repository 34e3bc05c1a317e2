"""Computes the success of a set of episodes, overall and by tier, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realhf.api.env import RolloutOutcome
from realhf.base.intervals import wilson_interval


def evaluation_report(outcomes: Sequence[RolloutOutcome]) -> dict[str, dict[str, Any]]:
    """Return {"overall" or tier: {success, low, high, reward, turns, episodes, failed}}.

    Failed episodes (environment errors) are counted in ``failed`` and enter no mean; ``low`` and ``high`` are the 95 %
    Wilson interval of the success rate.
    """
    report = {"overall": _summary(outcomes)}
    for tier in sorted({outcome.tier for outcome in outcomes if outcome.tier}):
        report[tier] = _summary([outcome for outcome in outcomes if outcome.tier == tier])
    return report


def _summary(outcomes: Sequence[RolloutOutcome]) -> dict[str, Any]:
    valid = [outcome for outcome in outcomes if outcome.valid]
    n = len(valid)
    successes = sum(outcome.achieved for outcome in valid)
    low, high = wilson_interval(successes, n)
    return {
        "success": successes / n if n else 0.0,
        "low": low,
        "high": high,
        "reward": sum(outcome.reward or 0.0 for outcome in valid) / n if n else 0.0,
        "turns": sum(len(outcome.turns) for outcome in valid) / n if n else 0.0,
        "episodes": n,
        "failed": len(outcomes) - n,
    }
