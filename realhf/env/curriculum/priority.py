"""Draws weak spots first, group by group, with mastery and spaced repetition: the classic rule.

Source: docs/reference/environment.md 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from realhf.env.curriculum.base import Curriculum, T, TaskSet, TemplateRecord


@dataclass(frozen=True)
class PriorityRule:
    """Holds the constants of the priority strategy. ``promotion``: least episodes and success rate that lead out of
    the first group, the second, ...; the last pair holds for all further ones. ``untried``, ``weak``, ``due`` and
    ``recent``: what they add to a template's score (``weak`` times 1 - rate)."""

    untried: float = 100.0
    weak: float = 50.0
    due: float = 30.0
    recent: float = -20.0
    decay: float = 0.85
    window: int = 10
    mastery_attempts: int = 3
    mastery_rate: float = 0.7
    first_interval: int = 3
    longest_interval: int = 48
    recent_episodes: int = 2
    fast_track_episodes: int = 3
    fast_track_rate: float = 0.9
    promotion: Sequence[tuple[int, float]] = ((5, 0.6), (5, 0.6), (8, 0.65), (10, 0.7))

    def __post_init__(self) -> None:
        if not self.promotion:
            raise ValueError("promotion: at least one pair of episodes and success rate")

    @classmethod
    def of(cls, preset: str = "standard", **changes: Any) -> PriorityRule:
        """Return a preset with some constants changed. Raises ValueError for an unknown preset or constant."""
        if preset not in PRESETS:
            raise ValueError(f"curriculum preset {preset!r} is unknown; known: {', '.join(sorted(PRESETS))}")
        try:
            return replace(PRESETS[preset], **changes)
        except TypeError as error:
            raise ValueError(f"a constant of the priority curriculum: {error}") from None


PRESETS: Mapping[str, PriorityRule] = {
    "standard": PriorityRule(),
    "slow": PriorityRule(promotion=((5, 0.6), (10, 0.65), (15, 0.65), (15, 0.7), (20, 0.7))),
}


def decayed_rate(results: Sequence[float], decay: float) -> float:
    """Return the success rate with weight decay**age, age 0 being the last; 0 without results."""
    weights = [decay**age for age in range(len(results))]
    return sum(w * r for w, r in zip(weights, reversed(results), strict=True)) / sum(weights) if results else 0.0


class PriorityCurriculum(Curriculum[T]):
    """Draws the template with the highest priority, among the current group and what is due from those before it."""

    strategy = "priority"

    def __init__(
        self,
        seed: int,
        tasks: TaskSet[T],
        *,
        rule: PriorityRule | None = None,
        group_success: str = "fraction",
    ) -> None:
        self.rule = rule or PriorityRule()
        super().__init__(seed, tasks, group_success=group_success)

    def reset(self) -> None:
        """See ``Curriculum``; the group is the first again."""
        with self._lock:
            super().reset()
            self._group_index = 0
            self._group_results: list[float] = []
            self._promotions: list[tuple[int, str]] = []

    @property
    def group(self) -> str:
        """Name of the current group."""
        return self._groups[self._group_index]

    def success_rate(self, template_id: Any) -> float:
        """See ``Curriculum``."""
        return decayed_rate(self._records[template_id].results, self.rule.decay)

    def priority(self, template_id: Any) -> float:
        """Return the score of docs/reference/environment.md 8."""
        record = self._records[template_id]
        rule = self.rule
        if not record.attempts:
            return rule.untried
        recent = self._episodes - record.last_episode < rule.recent_episodes
        weakness = 1.0 - self.success_rate(template_id)
        return rule.weak * weakness + rule.due * self._due(record) + rule.recent * recent

    def _due(self, record: TemplateRecord, before: int = 0) -> bool:
        """Return whether a re-test is due now, or was ``before`` the last recorded episodes."""
        return record.graduated and self._episodes - before - record.reference >= record.interval

    def _choose(self, count: int) -> list[Any]:
        earlier = set(self._groups[: self._group_index])
        candidates = [
            template_id
            for template_id, group in self._group_of.items()
            if group == self.group or (group in earlier and self._due(self._records[template_id]))
        ]
        ranked = sorted(candidates, key=lambda template_id: (-self.priority(template_id), self._rng.random()))
        return [ranked[index % len(ranked)] for index in range(count)]

    def _learn(self, template_id: Any, record: TemplateRecord, result: float) -> None:
        rule, due = self.rule, self._due(record, before=1)
        record.results = [*record.results, result][-rule.window :]
        mastered = record.attempts >= rule.mastery_attempts and self.success_rate(template_id) >= rule.mastery_rate
        if not mastered:
            record.interval = 0
        elif not record.graduated:
            record.interval, record.reference = rule.first_interval, self._episodes
        elif due:
            passed = result >= rule.mastery_rate
            record.interval = min(2 * record.interval, rule.longest_interval) if passed else rule.first_interval
            record.reference = self._episodes
        if self._group_of[template_id] == self.group:
            self._group_results.append(result)
            self._promote()

    def _promote(self) -> None:
        """Move to the next group when this one goes well; there is no way back."""
        rule, count = self.rule, len(self._group_results)
        if self._group_index + 1 == len(self._groups):
            return
        rate = decayed_rate(self._group_results, rule.decay)
        stage = list(self._tasks.groups).index(self.group)
        least, wanted = rule.promotion[min(stage, len(rule.promotion) - 1)]
        fast = count >= rule.fast_track_episodes and rate >= rule.fast_track_rate
        if fast or (count >= least and rate >= wanted):
            self._group_index += 1
            self._group_results = []
            self._promotions.append((self._episodes, self.group))

    def get_stats(self) -> dict[str, Any]:
        """See ``Curriculum``; adds the group, its results, re-tests that are due, and promotions."""
        with self._lock:
            return super().get_stats() | {
                "group": self.group,
                "group_episodes": len(self._group_results),
                "group_success_rate": decayed_rate(self._group_results, self.rule.decay),
                "spaced_rep_due": [key for key, record in self._records.items() if self._due(record)],
                "promotions": list(self._promotions),
            }

    def stats(self) -> dict[str, float]:
        """See ``Curriculum``; adds the group's number and episodes, and how many templates are graduated and due."""
        with self._lock:
            records = self._records.values()
            return super().stats() | {
                "group": float(list(self._tasks.groups).index(self.group)),
                "group_episodes": float(len(self._group_results)),
                "graduated": float(sum(record.graduated for record in records)),
                "due": float(sum(self._due(record) for record in records)),
            }

    def state_dict(self) -> dict[str, Any]:
        """See ``Curriculum``; adds the group, its results and the promotions."""
        with self._lock:
            return super().state_dict() | {
                "group": self.group,
                "group_results": list(self._group_results),
                "promotions": [list(promotion) for promotion in self._promotions],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Curriculum``. A group that is not known starts at the first."""
        with self._lock:
            if state.get("strategy") == self.strategy and "group" not in state:
                raise ValueError("the state of this priority curriculum was saved by an earlier release")
            super().load_state_dict(state)
            self._group_index = self._groups.index(state["group"]) if state["group"] in self._groups else 0
            self._group_results = list(state["group_results"])
            self._promotions = [(episode, group) for episode, group in state.get("promotions", [])]
