"""Results of held-out evaluations: success rates by group, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from realhf.base.messages import Message

Report = dict[str, dict[str, dict[str, Any]]]
"""Results of an evaluation: {decoding (``sampled`` or ``greedy``): {``overall`` or a group:
metrics}}; see ``evaluation_report``."""


class EpisodeResult(Message, frozen=True):
    """Result of one held-out episode."""

    group: str
    """Group under which the episode is reported; "" to report it only under ``overall``."""
    valid: bool
    """False if the episode failed for a reason other than the policy, so that it is excluded from
    all means."""
    achieved: bool
    """Whether the goal was achieved."""
    reward: float
    """Reward of the episode."""
    turns: int
    """Number of turns."""
    out_of_turns: bool = False
    """Whether ``rollout.max_turns`` ended the episode."""
    environment: str = ""
    """Name of the episode's environment in a mixture; "" in a run with one environment."""


def evaluation_report(results: Sequence[EpisodeResult], version: int) -> dict[str, dict[str, Any]]:
    """Return {"overall", group, or environment of a mixture: {success, low, high, reward, turns,
    out_of_turns, episodes, failed, version}}.

    Failed episodes (environment errors) are counted in ``failed`` and excluded from all means.
    ``low`` and ``high`` are the 95 % Wilson interval of the success rate; ``out_of_turns`` is the
    fraction of episodes that ``rollout.max_turns`` ended; ``version`` is the policy version that
    played all episodes.
    """
    report = {"overall": _summary(results, version)}
    for group in sorted({result.group for result in results if result.group}):
        report[group] = _summary([result for result in results if result.group == group], version)
    # An environment has precedence over a group of the same name, which may be one of several.
    for name in sorted({result.environment for result in results if result.environment}):
        report[name] = _summary([each for each in results if each.environment == name], version)
    return report


def _summary(results: Sequence[EpisodeResult], version: int) -> dict[str, Any]:
    """Return the metrics of ``results``; see ``evaluation_report``."""
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
        "out_of_turns": sum(result.out_of_turns for result in valid) / n if n else 0.0,
        "episodes": n,
        "failed": len(results) - n,
        "version": version,
    }


Z95 = 1.959964
"""Quantile of the normal distribution for a two-sided 95 % interval."""


def wilson_interval(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Return Wilson's score interval (low, high) of a proportion (Wilson 1927); (0, 1) if ``n`` is
    0."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float], z: float = Z95) -> tuple[float, float, float] | None:
    """Return (mean, low, high) with the interval from the standard error of the mean; None if there
    are no values. For a single value, all three equal that value."""
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    half = z * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n) if n > 1 else 0.0
    return mean, mean - half, mean + half
