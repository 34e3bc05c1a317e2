"""Draws weak spots first, tier by tier, with mastery and spaced repetition: the classic rule.

Source: docs/reference/environment.md 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from realhf.env.curriculum.base import Curriculum, T, TaskSet, TemplateRecord


@dataclass(frozen=True)
class PriorityRule:
    """Holds the constants of the priority strategy. ``promotion``: tier -> (least episodes, success rate). ``untried``,
    ``weak``, ``due`` and ``recent``: what they add to a template's score (``weak`` times 1 - rate)."""

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
    promotion: dict[str, tuple[int, float]] = field(
        default_factory=lambda: {
            "warmup": (5, 0.6),
            "beginner": (5, 0.6),
            "intermediate": (8, 0.65),
            "advanced": (10, 0.7),
        }
    )

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
    "slow": PriorityRule(
        promotion={
            "warmup": (5, 0.6),
            "beginner": (10, 0.65),
            "intermediate": (15, 0.65),
            "advanced": (15, 0.7),
            "expert": (20, 0.7),
        }
    ),
}


def decayed_rate(results: Sequence[float], decay: float) -> float:
    """Return the success rate with weight decay**age, age 0 being the last; 0 without results."""
    weights = [decay**age for age in range(len(results))]
    return sum(w * r for w, r in zip(weights, reversed(results), strict=True)) / sum(weights) if results else 0.0


class PriorityCurriculum(Curriculum[T]):
    """Draws the template with the highest priority, among the current tier and what is due from the tiers before it."""

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
        """See ``Curriculum``; the tier is the first again."""
        with self._lock:
            super().reset()
            self._tier_index = 0
            self._tier_results: list[float] = []
            self._promotions: list[tuple[int, str]] = []

    @property
    def tier(self) -> str:
        """Name of the current tier."""
        return self._tiers[self._tier_index]

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
        earlier = set(self._tiers[: self._tier_index])
        candidates = [
            template_id
            for template_id, tier in self._tier_of.items()
            if tier == self.tier or (tier in earlier and self._due(self._records[template_id]))
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
        if self._tier_of[template_id] == self.tier:
            self._tier_results.append(result)
            self._promote()

    def _promote(self) -> None:
        """Move to the next tier when this one goes well; there is no way back."""
        rule, count = self.rule, len(self._tier_results)
        if self._tier_index + 1 == len(self._tiers):
            return
        rate = decayed_rate(self._tier_results, rule.decay)
        least, wanted = rule.promotion[self.tier]
        fast = count >= rule.fast_track_episodes and rate >= rule.fast_track_rate
        if fast or (count >= least and rate >= wanted):
            self._tier_index += 1
            self._tier_results = []
            self._promotions.append((self._episodes, self.tier))

    def get_stats(self) -> dict[str, Any]:
        """See ``Curriculum``; adds the tier, its results, re-tests that are due, and promotions."""
        with self._lock:
            return super().get_stats() | {
                "tier": self.tier,
                "tier_episodes": len(self._tier_results),
                "tier_success_rate": decayed_rate(self._tier_results, self.rule.decay),
                "spaced_rep_due": [key for key, record in self._records.items() if self._due(record)],
                "promotions": list(self._promotions),
            }

    def stats(self) -> dict[str, float]:
        """See ``Curriculum``; adds the tier's number and episodes, and how many templates are graduated and due."""
        with self._lock:
            records = self._records.values()
            return super().stats() | {
                "tier": float(list(self._tasks.groups).index(self.tier)),
                "tier_episodes": float(len(self._tier_results)),
                "graduated": float(sum(record.graduated for record in records)),
                "due": float(sum(self._due(record) for record in records)),
            }

    def state_dict(self) -> dict[str, Any]:
        """See ``Curriculum``; adds the tier, its results and the promotions."""
        with self._lock:
            return super().state_dict() | {
                "tier": self.tier,
                "tier_results": list(self._tier_results),
                "promotions": [list(promotion) for promotion in self._promotions],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Curriculum``. A tier that is not known starts at the first."""
        with self._lock:
            super().load_state_dict(state)
            self._tier_index = self._tiers.index(state["tier"]) if state["tier"] in self._tiers else 0
            self._tier_results = list(state["tier_results"])
            self._promotions = [(episode, tier) for episode, tier in state.get("promotions", [])]
