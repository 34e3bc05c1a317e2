"""Reports a group's rewards to the curriculum exactly once, and computes its statistics.

Source: docs/reference/environment.md 9 (``record_group_result``).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class ResultSink(Protocol):
    """Takes results for a curriculum: all that a pool needs of one."""

    def record_result(self, task: Any, achieved: bool | float | None, reward: float = 0.0) -> None:
        """Take the result of a group: ``achieved`` is the share of its valid rollouts that solved the task, None
        without valid ones; ``reward`` is their mean reward."""
        ...


@dataclass(frozen=True)
class GroupSummary:
    """Summarises a group: ``mean`` and ``std`` (population) of the rewards of the ``valid`` ones of ``size`` rollouts,
    0.0 without any; ``achieved`` is the share of them that solved the task; ``failures`` counts the others by status.
    """

    size: int
    valid: int
    achieved: float
    mean: float
    std: float
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def trainable(self) -> bool:
        """Whether advantages mean something: at least two rollouts are valid."""
        return self.valid >= 2


def record_group(
    curriculum: ResultSink | None, task: Any, results: Sequence[Any], success_threshold: float = 0.99
) -> GroupSummary:
    """Report a group to the curriculum (if any), once, and return its statistics.

    ``results`` are rewards, or outcomes with ``valid``, ``reward``, ``achieved`` and ``status``. None, NaN and failed
    outcomes are excluded, never zeros; a bare reward is a success from ``success_threshold`` on.
    """
    entries = [_entry(result, success_threshold) for result in results]
    valid = [(reward, achieved) for reward, achieved, _ in entries if reward is not None]
    rewards = [reward for reward, _ in valid]
    achieved = sum(achieved for _, achieved in valid) / len(valid) if valid else None
    mean = statistics.fmean(rewards) if rewards else 0.0
    if curriculum is not None:
        curriculum.record_result(task, achieved, mean)
    return GroupSummary(
        size=len(entries),
        valid=len(valid),
        achieved=achieved or 0.0,
        mean=mean,
        std=statistics.pstdev(rewards) if rewards else 0.0,
        failures=dict(Counter(status for reward, _, status in entries if reward is None)),
    )


def _entry(result: Any, threshold: float) -> tuple[float | None, bool, str]:
    """Return (reward or None, achieved, status of a failure)."""
    if result is None:
        return None, False, "missing"
    if isinstance(result, int | float):
        reward = float(result)
        return (None, False, "not_finite") if not math.isfinite(reward) else (reward, reward >= threshold, "")
    if not result.valid or result.reward is None or not math.isfinite(result.reward):
        return None, False, result.status
    return float(result.reward), bool(result.achieved), ""


def episode_return(rewards: Sequence[float], reward_mode: str) -> float:
    """Return the score of an episode from its step rewards: their sum, or in ``level`` mode the last one."""
    return (rewards[-1] if rewards else 0.0) if reward_mode == "level" else float(sum(rewards))
