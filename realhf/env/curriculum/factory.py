"""Builds the curriculum of a training run: two strategies behind one interface decide which task comes next.

*priority* is the classic rule of docs/reference/environment.md 8, *learnability* draws where there is something to
learn. Training uses the one that the learning benchmark shows to be better (``dataset.curriculum``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realhf.env.curriculum.base import Curriculum, T, TaskSet
from realhf.env.curriculum.learnability import LearnabilityCurriculum
from realhf.env.curriculum.priority import PriorityCurriculum, PriorityRule

STRATEGIES = (LearnabilityCurriculum.strategy, PriorityCurriculum.strategy)


def make_curriculum(
    strategy: str,
    seed: int,
    tasks: TaskSet[T],
    *,
    group_success: str = "fraction",
    priority: Mapping[str, Any] | None = None,
) -> Curriculum[T]:
    """Build the curriculum. For ``priority``, ``preset`` and constants of ``PriorityRule`` that differ from it may be
    given. Raises ValueError for an unknown strategy, preset or constant."""
    if strategy == LearnabilityCurriculum.strategy:
        return LearnabilityCurriculum(seed, tasks, group_success=group_success)
    if strategy == PriorityCurriculum.strategy:
        rule = PriorityRule.of(**(priority or {}))
        return PriorityCurriculum(seed, tasks, rule=rule, group_success=group_success)
    raise ValueError(f"curriculum strategy {strategy!r} is unknown; known: {', '.join(sorted(STRATEGIES))}")
