"""Trains where there is something to learn: draws by p(1-p), p being the decayed success rate of a template.

Most training goes to what succeeds sometimes, a little to everything. Source: docs/reference/learning.md 2;
docs/reference/environment.md 8.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from realhf.env.curriculum.base import Curriculum, T, TaskSet, TemplateRecord


class LearnabilityCurriculum(Curriculum[T]):
    """Draws templates with weight p(1-p) + ``floor``; untried templates come first. ``decay`` forgets older groups."""

    strategy = "learnability"

    def __init__(
        self,
        seed: int,
        tasks: TaskSet[T],
        *,
        decay: float = 0.8,
        floor: float = 0.02,
        group_success: str = "fraction",
    ) -> None:
        self._decay = decay
        self._floor = floor
        super().__init__(seed, tasks, group_success=group_success)

    def success_rate(self, template_id: Any) -> float:
        """See ``Curriculum``."""
        record = self._records[template_id]
        return record.successes / record.weight if record.weight else 0.0

    def weight(self, template_id: Any) -> float:
        """Return the share of draws, up to a constant, that a tried template gets."""
        rate = self.success_rate(template_id)
        return rate * (1.0 - rate) + self._floor

    def _choose(self, count: int) -> list[Any]:
        untried = [template_id for template_id, record in self._records.items() if not record.attempts]
        self._rng.shuffle(untried)
        chosen = untried[:count]
        tried = [template_id for template_id, record in self._records.items() if record.attempts]
        if len(chosen) < count:
            weights = [self.weight(template_id) for template_id in tried] if tried else [1.0] * len(untried)
            chosen += _even_draws(self._rng, tried or untried, weights, count - len(chosen))
        return chosen

    def _learn(self, template_id: Any, record: TemplateRecord, result: float) -> None:
        record.successes = self._decay * record.successes + result
        record.weight = self._decay * record.weight + 1.0


def _even_draws(rng: random.Random, items: Sequence[Any], weights: Sequence[float], count: int) -> list[Any]:
    """Make ``count`` weighted draws that hit each item within one of its expected number (systematic resampling), in
    random order: a batch then follows the weights as closely as it can."""
    step = sum(weights) / count
    position, cumulative, index, drawn = rng.random() * step, weights[0], 0, []
    for _ in range(count):
        while position >= cumulative and index + 1 < len(items):
            index += 1
            cumulative += weights[index]
        drawn.append(items[index])
        position += step
    rng.shuffle(drawn)
    return drawn
