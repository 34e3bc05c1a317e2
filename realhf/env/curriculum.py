"""Which task next: one instance per training run, two strategies behind one interface.

*priority* is the classic rule of environment spec section 8: weak spots first, tier by tier, with mastery and
spaced repetition. *learnability* draws with weight p(1-p) + 0.02, where p is the decayed success rate of a
template: most training on what succeeds sometimes, a little on everything. Choosing reads statistics and draws
from the seeded generator; ``record_result`` alone changes them. Thread-safe.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from realhf.env.task import TIERS, Task, TaskError
from realhf.env.tasks.loader import instantiate, load_templates

STATE_VERSION = 1
_SEED_BITS = 31

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PriorityRule:
    """Constants of the priority strategy. ``promotion``: tier -> (least episodes, success rate)."""

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


@dataclass
class TemplateRecord:
    """What is known about one template. ``results``: the last ones, oldest first; ``successes``/``weight``: the
    decayed sums of the learnability rate; ``interval`` 0 and ``reference``: the spaced repetition schedule."""

    results: list[float] = field(default_factory=list)
    attempts: int = 0
    last_episode: int = -1
    successes: float = 0.0
    weight: float = 0.0
    interval: int = 0
    reference: int = 0

    @property
    def graduated(self) -> bool:
        return self.interval > 0


def decayed_rate(results: Sequence[float], decay: float) -> float:
    """Success rate with weight decay**age, age 0 being the last; 0 without results."""
    weights = [decay**age for age in range(len(results))]
    return sum(w * r for w, r in zip(weights, reversed(results), strict=True)) / sum(weights) if results else 0.0


class Curriculum:
    """Common part of the strategies: draws, records, figures, persistence. ``tiers`` None: all there are; ``tags``:
    templates with any of them. Held-out templates are never served."""

    strategy = ""

    def __init__(self, seed: int = 0, tiers: Iterable[str] | None = None, tags: Iterable[str] = ()) -> None:
        templates = load_templates(tiers, tags=tags, split="train")
        if not templates:
            raise TaskError("the curriculum has no task in the tiers and with the tags it was given")
        self._tier_of = {template.task_id: template.tier for template in templates}
        self._tiers = [tier for tier in TIERS if tier in self._tier_of.values()]
        self._seed = seed
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Back to the first episode."""
        with self._lock:
            self._rng = random.Random(f"curriculum:{self._seed}")
            self._records = {template_id: TemplateRecord() for template_id in self._tier_of}
            self._episodes = 0
            self._invalid_groups = 0
            self._rewards: list[float] = []

    def next_task(self, seed: int | None = None) -> Task:
        """The task to play now; ``seed`` fixes the instance instead of drawing it."""
        task = self.next_tasks(1)[0]
        return task if seed is None else instantiate(task.task_id, seed)

    def next_tasks(self, count: int) -> list[Task]:
        """``count`` training tasks for one batch, as different as the strategy allows."""
        with self._lock:
            chosen = self._choose(count)
            return [instantiate(template_id, self._rng.getrandbits(_SEED_BITS)) for template_id in chosen]

    def record_result(self, task: Task, achieved: bool | float | None, reward: float = 0.0) -> None:
        """The one way in for results: a group counts as one episode, ``achieved`` is the fraction of its valid
        rollouts that achieved the task, None a group without valid rollouts. Raises TaskError for a task that
        is not in this curriculum."""
        if task.task_id not in self._tier_of:
            raise TaskError(f"task {task.task_id} is not in this curriculum")
        with self._lock:
            if achieved is None:
                self._invalid_groups += 1
                return
            if not 0.0 <= float(achieved) <= 1.0:
                raise ValueError(f"achieved is {achieved}, not a fraction")
            self._episodes += 1
            self._rewards = [*self._rewards, float(reward)][-10:]
            record = self._records[task.task_id]
            record.attempts += 1
            record.last_episode = self._episodes
            self._learn(task.task_id, record, float(achieved))

    def success_rate(self, template_id: int) -> float:
        """The strategy's running success rate of a template, 0 if it was never tried."""
        raise NotImplementedError

    def _choose(self, count: int) -> list[int]:
        raise NotImplementedError

    def _learn(self, template_id: int, record: TemplateRecord, result: float) -> None:
        raise NotImplementedError

    def stats(self) -> dict[str, float]:
        """Figures for the step's log: episodes, invalid groups, mean reward, success rate by tier, untried."""
        with self._lock:
            figures = {
                "episodes": float(self._episodes),
                "invalid_groups": float(self._invalid_groups),
                "reward_last_10": sum(self._rewards) / len(self._rewards) if self._rewards else 0.0,
                "untried": float(sum(not record.attempts for record in self._records.values())),
            }
            for tier in self._tiers:
                rates = [
                    self.success_rate(t)
                    for t, own in self._tier_of.items()
                    if own == tier and self._records[t].attempts
                ]
                figures[f"success/{tier}"] = sum(rates) / len(rates) if rates else 0.0
            return figures

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides later draws, as JSON-able data."""
        with self._lock:
            version, internal, gauss = self._rng.getstate()
            return {
                "version": STATE_VERSION,
                "strategy": self.strategy,
                "tasks": self._task_set(),
                "rng": [version, list(internal), gauss],
                "episodes": self._episodes,
                "invalid_groups": self._invalid_groups,
                "rewards": list(self._rewards),
                "records": {str(key): asdict(record) for key, record in self._records.items()},
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Another task set is a warning: known templates keep their records, others
        start as new. Raises ValueError for another version or strategy."""
        if state.get("version") != STATE_VERSION or state.get("strategy") != self.strategy:
            raise ValueError(
                f"curriculum state is of version {state.get('version')}, strategy {state.get('strategy')!r}; "
                f"wanted {STATE_VERSION}, {self.strategy!r}"
            )
        with self._lock:
            if state["tasks"] != self._task_set():
                logger.warning("the saved curriculum is about another set of tasks; unknown ones start as new")
            version, internal, gauss = state["rng"]
            self._rng.setstate((version, tuple(internal), gauss))
            self._episodes = state["episodes"]
            self._invalid_groups = state["invalid_groups"]
            self._rewards = list(state["rewards"])
            saved = state["records"]
            for key in self._records:
                self._records[key] = TemplateRecord(**saved[str(key)]) if str(key) in saved else TemplateRecord()

    def _task_set(self) -> str:
        return hashlib.sha256(json.dumps(sorted(self._tier_of.items())).encode()).hexdigest()[:16]


class LearnabilityCurriculum(Curriculum):
    """Weight p(1-p) + ``floor``; untried templates come first. ``decay`` forgets older groups."""

    strategy = "learnability"

    def __init__(
        self,
        seed: int = 0,
        tiers: Iterable[str] | None = None,
        tags: Iterable[str] = (),
        *,
        decay: float = 0.8,
        floor: float = 0.02,
    ) -> None:
        self._decay = decay
        self._floor = floor
        super().__init__(seed, tiers, tags)

    def success_rate(self, template_id: int) -> float:
        record = self._records[template_id]
        return record.successes / record.weight if record.weight else 0.0

    def weight(self, template_id: int) -> float:
        """Share of draws, up to a constant, that a tried template gets."""
        rate = self.success_rate(template_id)
        return rate * (1.0 - rate) + self._floor

    def _choose(self, count: int) -> list[int]:
        untried = [template_id for template_id, record in self._records.items() if not record.attempts]
        self._rng.shuffle(untried)
        chosen = untried[:count]
        tried = [template_id for template_id, record in self._records.items() if record.attempts]
        if len(chosen) < count:
            weights = [self.weight(template_id) for template_id in tried] if tried else [1.0] * len(untried)
            chosen += _even_draws(self._rng, tried or untried, weights, count - len(chosen))
        return chosen

    def _learn(self, template_id: int, record: TemplateRecord, result: float) -> None:
        record.successes = self._decay * record.successes + result
        record.weight = self._decay * record.weight + 1.0


class PriorityCurriculum(Curriculum):
    """Highest priority first, among the current tier and what is due from the tiers before it."""

    strategy = "priority"

    def __init__(
        self,
        seed: int = 0,
        tiers: Iterable[str] | None = None,
        tags: Iterable[str] = (),
        *,
        rule: PriorityRule | None = None,
    ) -> None:
        self.rule = rule or PriorityRule()
        super().__init__(seed, tiers, tags)

    def reset(self) -> None:
        super().reset()
        self._tier_index = 0
        self._tier_results: list[float] = []

    @property
    def tier(self) -> str:
        return self._tiers[self._tier_index]

    def success_rate(self, template_id: int) -> float:
        return decayed_rate(self._records[template_id].results, self.rule.decay)

    def priority(self, template_id: int) -> float:
        """The score of spec section 8."""
        record = self._records[template_id]
        if not record.attempts:
            return 100.0
        recent = self._episodes - record.last_episode < self.rule.recent_episodes
        return 50.0 * (1.0 - self.success_rate(template_id)) + 30.0 * self._due(record) - 20.0 * recent

    def _due(self, record: TemplateRecord) -> bool:
        return record.graduated and self._episodes - record.reference >= record.interval

    def _choose(self, count: int) -> list[int]:
        earlier = set(self._tiers[: self._tier_index])
        candidates = [
            template_id
            for template_id, tier in self._tier_of.items()
            if tier == self.tier or (tier in earlier and self._due(self._records[template_id]))
        ]
        ranked = sorted(candidates, key=lambda template_id: (-self.priority(template_id), self._rng.random()))
        return [ranked[index % len(ranked)] for index in range(count)]

    def _learn(self, template_id: int, record: TemplateRecord, result: float) -> None:
        rule, due = self.rule, self._due(record)
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

    def stats(self) -> dict[str, float]:
        with self._lock:
            records = self._records.values()
            return super().stats() | {
                "tier": float(TIERS.index(self.tier)),
                "tier_episodes": float(len(self._tier_results)),
                "graduated": float(sum(record.graduated for record in records)),
                "due": float(sum(self._due(record) for record in records)),
            }

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return super().state_dict() | {"tier": self.tier, "tier_results": list(self._tier_results)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            super().load_state_dict(state)
            self._tier_index = self._tiers.index(state["tier"]) if state["tier"] in self._tiers else 0
            self._tier_results = list(state["tier_results"])


def make_curriculum(
    strategy: str, seed: int, tiers: Iterable[str] | None = None, tags: Iterable[str] = ()
) -> Curriculum:
    """Raises ValueError for an unknown strategy."""
    kinds = {kind.strategy: kind for kind in (LearnabilityCurriculum, PriorityCurriculum)}
    if strategy not in kinds:
        raise ValueError(f"curriculum strategy {strategy!r} is unknown; known: {', '.join(sorted(kinds))}")
    return kinds[strategy](seed, tiers, tags)


def _even_draws(rng: random.Random, items: Sequence[int], weights: Sequence[float], count: int) -> list[int]:
    """``count`` weighted draws that hit each item within one of its expected number (systematic resampling), in
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
