"""Curricula, which choose the tasks to train on, and a data source that draws its tasks from one.

Choosing tasks only reads the statistics and advances the seeded generator; only ``record_template``
changes the statistics. Curricula are thread-safe. Three strategies exist:

*priority* follows the rule of docs/reference/environment.md 8. *learnability* mostly draws
templates that succeed sometimes, and each of the others with a small weight
(docs/reference/learning.md 2); it is the default (``dataset.curriculum``). *uniform* draws all
templates equally often, including those that never succeed, from which distillation from a teacher
learns as much as from others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from realhf.api.environment import TRAIN, Task, is_finite
from realhf.api.source import SampleResult, SourceItem
from realhf.env.loader.load import build_environment

STATE_VERSION = 1
"""Version of the format of ``Curriculum.state_dict``."""
GROUP_SUCCESS = ("fraction", "any")
"""Ways to count a group of rollouts, see ``Curriculum``."""
WEAK_RATE = 0.7
"""Success rate below which a template that has not graduated is reported as a weak spot."""
_SEED_BITS = 31
"""Bits of the seeds that are drawn for instances."""
_FAILURES = 3
"""Number of groups without a valid rollout after which a template that has no results is no longer
preferred as untried."""
logger = logging.getLogger(__name__)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class TaskSet(Protocol[T_co]):
    """Templates of a curriculum, identified by name or number, in groups of rising difficulty, and
    their instances. ``realhf.api.environment.TaskSet`` satisfies it."""

    @property
    def group_of(self) -> Mapping[Any, str]:
        """Group of every template that may be drawn."""
        ...

    @property
    def groups(self) -> Sequence[str]:
        """All existing groups, easiest first, including groups of which no template is in this
        set."""
        ...

    def instantiate(self, template_id: Any, seed: int) -> T_co:
        """Return the training instance of a template that ``seed`` draws."""
        ...


@dataclass
class TemplateRecord:
    """Statistics of one template."""

    results: list[float] = field(default_factory=list)
    """Most recent results, oldest first, at most ``PriorityRule.window``; for the priority
    strategy."""
    attempts: int = 0
    """Number of groups with valid rollouts."""
    last_episode: int = -1
    """Number of the episode of the last result; -1 if there is none."""
    successes: float = 0.0
    """Decayed sum of results, for the learnability strategy."""
    weight: float = 0.0
    """Decayed number of results, for the learnability strategy."""
    interval: int = 0
    """Episodes between two re-tests of the spaced repetition; 0 before graduation."""
    reference: int = 0
    """Number of the episode from which ``interval`` counts."""
    failures: int = 0
    """Number of groups without a valid rollout."""

    @property
    def untried(self) -> bool:
        """Whether the template has no result yet and fewer than ``_FAILURES`` failed groups.
        Without this limit, a template whose environment always fails would be in every batch."""
        return not self.attempts and self.failures < _FAILURES

    @property
    def graduated(self) -> bool:
        """Whether the template counts as mastered, so that re-tests are scheduled for it."""
        return self.interval > 0


class Curriculum(Generic[T]):
    """Base class of the strategies: draws tasks, records results, and provides metrics and state.

    Raises ValueError for a task set without templates, and LookupError for results of an unknown
    template.

    Args:
        seed: Seed of the draws.
        tasks: The templates to draw from.
        group_success: Result of a group: the ``fraction`` of its valid rollouts that achieved the
            task, or ``any`` (1 if at least one did).
    """

    strategy = ""
    """Name of the strategy."""

    def __init__(
        self,
        seed: int,
        tasks: TaskSet[T],
        *,
        group_success: str = "fraction",
    ) -> None:
        if group_success not in GROUP_SUCCESS:
            raise ValueError(
                f"group_success is {group_success!r}; allowed: {', '.join(GROUP_SUCCESS)}"
            )
        if not tasks.group_of:
            raise ValueError(
                "the curriculum has no task in the groups and with the tags it was given"
            )
        self._tasks = tasks
        self._group_of = dict(tasks.group_of)
        self._groups = [group for group in tasks.groups if group in self._group_of.values()]
        self._seed = seed
        self._any = group_success == "any"
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Discard all results and start again at the first episode."""
        with self._lock:
            self._rng = random.Random(f"curriculum:{self._seed}")
            self._records = {template_id: TemplateRecord() for template_id in self._group_of}
            self._episodes = 0
            self._invalid_groups = 0
            self._rewards: list[float] = []

    def draw(self, count: int) -> list[tuple[Any, int]]:
        """Return (template, seed) of ``count`` training tasks for one batch, as different as the
        strategy allows."""
        with self._lock:
            return [
                (template_id, self._rng.getrandbits(_SEED_BITS))
                for template_id in self._choose(count)
            ]

    def next_task(self, seed: int | None = None) -> T:
        """Draw one task; a given ``seed`` replaces the drawn seed of the instance."""
        template_id, drawn_seed = self.draw(1)[0]
        return self._tasks.instantiate(template_id, drawn_seed if seed is None else seed)

    def next_tasks(self, count: int) -> list[T]:
        """Draw ``count`` training tasks for one batch, as different as the strategy allows."""
        return [
            self._tasks.instantiate(template_id, seed) for template_id, seed in self.draw(count)
        ]

    def record_result(self, task: Any, achieved: bool | float | None, reward: float = 0.0) -> None:
        """Record a result for the template ``task.task_id``; see ``record_template``."""
        self.record_template(task.task_id, achieved, reward)

    def record_template(
        self, task_id: Any, achieved: bool | float | None, reward: float = 0.0
    ) -> None:
        """Record the result of a group, which counts as one episode.

        Raises LookupError for an unknown template, and ValueError for an invalid ``achieved`` or a
        reward that is not finite.

        Args:
            task_id: Id of the template.
            achieved: Fraction of the valid rollouts that achieved the task; None for a group
                without valid rollouts, which is counted as invalid and is not an episode.
            reward: Mean reward of the valid rollouts.
        """
        self._check_known(task_id)
        with self._lock:
            if achieved is None:
                self._invalid_groups += 1
                self._records[task_id].failures += 1
                return
            if not 0.0 <= float(achieved) <= 1.0:
                raise ValueError(f"achieved is {achieved}, not a fraction")
            if not is_finite(reward):
                raise ValueError(f"reward is {reward}; a failed rollout is not a result")
            self._episodes += 1
            self._rewards = [*self._rewards, float(reward)][-10:]
            record = self._records[task_id]
            record.attempts += 1
            record.last_episode = self._episodes
            self._learn(task_id, record, float(achieved > 0) if self._any else float(achieved))

    def _check_known(self, template_id: Any) -> None:
        if template_id not in self._group_of:
            raise LookupError(f"task {template_id} is not in this curriculum")

    def success_rate(self, template_id: Any) -> float:
        """Return the strategy's running success rate of a template; 0 if it was never tried."""
        raise NotImplementedError

    def _choose(self, count: int) -> list[Any]:
        """Return ``count`` template ids."""
        raise NotImplementedError

    def _learn(self, template_id: Any, record: TemplateRecord, result: float) -> None:
        """Update the strategy's statistics with a result in [0, 1]."""
        raise NotImplementedError

    def get_stats(self) -> dict[str, Any]:
        """Return the state of the curriculum for display.

        Keys: ``episode_count``; ``invalid_groups``; ``avg_reward_last_10``; ``skill_profile`` {task
        id: success rate} of tried templates; the lists of task ids ``graduated_tasks``,
        ``weak_spots`` (below 0.7, not graduated) and ``spaced_rep_due``; and ``group``,
        ``group_episodes``, ``group_success_rate`` and ``promotions`` [(episode, group)], which are
        empty or zero in strategies that draw from all groups at once.
        """
        with self._lock:
            tried = {key: record for key, record in self._records.items() if record.attempts}
            rates = {key: self.success_rate(key) for key in tried}
            return {
                "episode_count": self._episodes,
                "group": None,
                "group_episodes": 0,
                "group_success_rate": 0.0,
                "graduated_tasks": [key for key, record in tried.items() if record.graduated],
                "weak_spots": [
                    key
                    for key, rate in rates.items()
                    if rate < WEAK_RATE and not tried[key].graduated
                ],
                "skill_profile": rates,
                "spaced_rep_due": [],
                "avg_reward_last_10": sum(self._rewards) / len(self._rewards)
                if self._rewards
                else 0.0,
                "invalid_groups": self._invalid_groups,
                "promotions": [],
            }

    def stats(self) -> dict[str, float]:
        """Return metrics for the log of a step: episodes, invalid groups, mean of the last 10
        rewards, number of untried templates, and success rate by group."""
        with self._lock:
            figures = {
                "episodes": float(self._episodes),
                "invalid_groups": float(self._invalid_groups),
                "reward_last_10": sum(self._rewards) / len(self._rewards) if self._rewards else 0.0,
                "untried": float(sum(not record.attempts for record in self._records.values())),
            }
            for group in self._groups:
                rates = [
                    self.success_rate(t)
                    for t, own in self._group_of.items()
                    if own == group and self._records[t].attempts
                ]
                figures[f"success/{group}"] = sum(rates) / len(rates) if rates else 0.0
            return figures

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines later draws, as JSON values."""
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
        """Restore a saved state.

        If the task set has changed, a warning is logged; known templates keep their records, and
        new ones start without results. Raises ValueError if the state's version or strategy
        differs.
        """
        if state.get("version") != STATE_VERSION or state.get("strategy") != self.strategy:
            raise ValueError(
                f"curriculum state is of version {state.get('version')}, strategy "
                f"{state.get('strategy')!r}; "
                f"wanted {STATE_VERSION}, {self.strategy!r}"
            )
        with self._lock:
            if state["tasks"] != self._task_set():
                logger.warning(
                    "the saved curriculum is about another set of tasks; unknown ones start as new"
                )
            version, internal, gauss = state["rng"]
            self._rng.setstate((version, tuple(internal), gauss))
            self._episodes = state["episodes"]
            self._invalid_groups = state["invalid_groups"]
            self._rewards = list(state["rewards"])
            saved = state["records"]
            for key in self._records:
                self._records[key] = (
                    TemplateRecord(**saved[str(key)]) if str(key) in saved else TemplateRecord()
                )

    def _task_set(self) -> str:
        """Return a hash of the templates and their groups."""
        return hashlib.sha256(json.dumps(sorted(self._group_of.items())).encode()).hexdigest()[:16]


class LearnabilityCurriculum(Curriculum[T]):
    """Curriculum that draws templates with weight p(1-p) + ``floor``, where p is the success rate.

    Untried templates come first, but make up at most ``untried_share`` of a batch once others
    succeed sometimes. ``decay`` is the factor by which each new group reduces the weight of older
    ones.
    """

    strategy = "learnability"

    def __init__(
        self,
        seed: int,
        tasks: TaskSet[T],
        *,
        decay: float = 0.8,
        floor: float = 0.02,
        untried_share: float = 1.0,
        group_success: str = "fraction",
    ) -> None:
        self._decay = decay
        self._floor = floor
        self._untried_share = untried_share
        super().__init__(seed, tasks, group_success=group_success)

    def success_rate(self, template_id: Any) -> float:
        """Return the decayed success rate of a template."""
        record = self._records[template_id]
        return record.successes / record.weight if record.weight else 0.0

    def weight(self, template_id: Any) -> float:
        """Return the unnormalized draw weight of a tried template."""
        rate = self.success_rate(template_id)
        return rate * (1.0 - rate) + self._floor

    def _choose(self, count: int) -> list[Any]:
        untried = [template_id for template_id, record in self._records.items() if record.untried]
        tried = [template_id for template_id, record in self._records.items() if not record.untried]
        self._rng.shuffle(untried)
        max_untried = count
        if self._untried_share < 1 and any(
            self.weight(template_id) > self._floor for template_id in tried
        ):
            # Random rounding keeps the share right on average, even for batches of one.
            max_untried = int(self._untried_share * count + self._rng.random())
        chosen = untried[:max_untried]
        if len(chosen) < count:
            templates = self._filter_drawable(tried or untried)
            weights = (
                [self.weight(template_id) for template_id in templates]
                if tried
                else [1.0] * len(untried)
            )
            chosen += _even_draws(self._rng, templates, weights, count - len(chosen))
        return chosen

    def _filter_drawable(self, templates: list[Any]) -> list[Any]:
        return templates

    def _learn(self, template_id: Any, record: TemplateRecord, result: float) -> None:
        record.successes = self._decay * record.successes + result
        record.weight = self._decay * record.weight + 1.0


class UniformCurriculum(LearnabilityCurriculum[T]):
    """Curriculum that draws all templates with equal probability, except those whose environment
    always fails; untried ones come first."""

    strategy = "uniform"

    def weight(self, template_id: Any) -> float:
        """Return 1 for a template with results, else ``floor``."""
        return 1.0 if self._records[template_id].attempts else self._floor

    def _filter_drawable(self, templates: list[Any]) -> list[Any]:
        # Systematic resampling walks the templates in order; in a fixed order, with equal weights,
        # the same ones would always share a batch.
        return self._rng.sample(templates, len(templates))


def _even_draws(
    rng: random.Random, items: Sequence[Any], weights: Sequence[float], count: int
) -> list[Any]:
    """Make ``count`` weighted draws by systematic resampling, in random order.

    The number of draws of each item differs from its expected number by less than one, so that a
    batch follows the weights as closely as possible.
    """
    step = sum(weights) / count
    position = rng.random() * step
    cumulative = weights[0]
    index = 0
    draws = []
    for _ in range(count):
        while position >= cumulative and index + 1 < len(items):
            index += 1
            cumulative += weights[index]
        draws.append(items[index])
        position += step
    rng.shuffle(draws)
    return draws


@dataclass(frozen=True)
class PriorityRule:
    """Constants of the priority strategy."""

    untried: float = 100.0
    """Score of an untried template."""
    weak: float = 50.0
    """Score of weakness, multiplied by 1 - success rate."""
    due: float = 30.0
    """Score added while a re-test is due."""
    recent: float = -20.0
    """Score added (negative) for templates with a result in the last ``recent_episodes``."""
    decay: float = 0.85
    """Decay of the weight of older results, per result."""
    window: int = 10
    """Number of results kept per template."""
    mastery_attempts: int = 3
    """Minimum number of results before a template can graduate."""
    mastery_rate: float = 0.7
    """Minimum success rate to graduate and to pass a re-test."""
    first_interval: int = 3
    """Number of episodes until the first re-test, and until the next one after a failed re-test."""
    longest_interval: int = 48
    """Maximum number of episodes between re-tests; each passed re-test doubles the interval."""
    recent_episodes: int = 2
    """Number of episodes that count as recent."""
    fast_track_episodes: int = 3
    """Minimum number of episodes in a group for early promotion."""
    fast_track_rate: float = 0.9
    """Minimum success rate in a group for early promotion."""
    promotion: Sequence[tuple[int, float]] = ((5, 0.6), (5, 0.6), (8, 0.65), (10, 0.7))
    """(minimum episodes, minimum success rate) required to leave the first group, the second group,
    and so on; the last pair applies to all further groups."""

    def __post_init__(self) -> None:
        if not self.promotion:
            raise ValueError("promotion: at least one pair of episodes and success rate")

    @classmethod
    def of(cls, preset: str = "standard", **changes: Any) -> PriorityRule:
        """Return a preset with some constants replaced. Raises ValueError for an unknown preset or
        constant."""
        if preset not in PRESETS:
            raise ValueError(
                f"curriculum preset {preset!r} is unknown; known: {', '.join(sorted(PRESETS))}"
            )
        try:
            return replace(PRESETS[preset], **changes)
        except TypeError as error:
            raise ValueError(f"a constant of the priority curriculum: {error}") from None


PRESETS: Mapping[str, PriorityRule] = {
    "standard": PriorityRule(),
    "slow": PriorityRule(promotion=((5, 0.6), (10, 0.65), (15, 0.65), (15, 0.7), (20, 0.7))),
}


def decayed_rate(results: Sequence[float], decay: float) -> float:
    """Return the mean of the results with weights decay**age, where the last result has age 0; 0
    without results."""
    weights = [decay**age for age in range(len(results))]
    return (
        sum(w * r for w, r in zip(weights, reversed(results), strict=True)) / sum(weights)
        if results
        else 0.0
    )


class PriorityCurriculum(Curriculum[T]):
    """Curriculum that draws the templates with the highest priority from the current group and from
    those of earlier groups that are due for a re-test."""

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
        """Discard all results and return to the first group."""
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
        """Return the decayed success rate of a template."""
        return decayed_rate(self._records[template_id].results, self.rule.decay)

    def priority(self, template_id: Any) -> float:
        """Return the score of a template according to docs/reference/environment.md 8."""
        record = self._records[template_id]
        rule = self.rule
        if not record.attempts:
            return rule.untried if record.untried else 0.0
        recent = self._episodes - record.last_episode < rule.recent_episodes
        weakness = 1.0 - self.success_rate(template_id)
        return rule.weak * weakness + rule.due * self._due(record) + rule.recent * recent

    def _due(self, record: TemplateRecord, before: int = 0) -> bool:
        """Return whether a re-test is due now, or was due ``before`` episodes ago."""
        return record.graduated and self._episodes - before - record.reference >= record.interval

    def _choose(self, count: int) -> list[Any]:
        earlier = set(self._groups[: self._group_index])
        candidates = [
            template_id
            for template_id, group in self._group_of.items()
            if group == self.group or (group in earlier and self._due(self._records[template_id]))
        ]
        ranked = sorted(
            candidates, key=lambda template_id: (-self.priority(template_id), self._rng.random())
        )
        return [ranked[index % len(ranked)] for index in range(count)]

    def _learn(self, template_id: Any, record: TemplateRecord, result: float) -> None:
        rule = self.rule
        due = self._due(record, before=1)
        record.results = [*record.results, result][-rule.window :]
        mastered = (
            record.attempts >= rule.mastery_attempts
            and self.success_rate(template_id) >= rule.mastery_rate
        )
        if not mastered:
            record.interval = 0
        elif not record.graduated:
            record.interval = rule.first_interval
            record.reference = self._episodes
        elif due:
            has_passed = result >= rule.mastery_rate
            record.interval = (
                min(2 * record.interval, rule.longest_interval)
                if has_passed
                else rule.first_interval
            )
            record.reference = self._episodes
        if self._group_of[template_id] == self.group:
            self._group_results.append(result)
            self._promote()

    def _promote(self) -> None:
        """Advance to the next group if the success rate of the current one is sufficient. The
        curriculum never goes back to an earlier group."""
        rule = self.rule
        count = len(self._group_results)
        if self._group_index + 1 == len(self._groups):
            return
        rate = decayed_rate(self._group_results, rule.decay)
        stage = list(self._tasks.groups).index(self.group)
        min_episodes, min_rate = rule.promotion[min(stage, len(rule.promotion) - 1)]
        fast = count >= rule.fast_track_episodes and rate >= rule.fast_track_rate
        if fast or (count >= min_episodes and rate >= min_rate):
            self._group_index += 1
            self._group_results = []
            self._promotions.append((self._episodes, self.group))

    def get_stats(self) -> dict[str, Any]:
        """Return the state of the curriculum for display, including the group, due re-tests and
        promotions."""
        with self._lock:
            return super().get_stats() | {
                "group": self.group,
                "group_episodes": len(self._group_results),
                "group_success_rate": decayed_rate(self._group_results, self.rule.decay),
                "spaced_rep_due": [
                    key for key, record in self._records.items() if self._due(record)
                ],
                "promotions": list(self._promotions),
            }

    def stats(self) -> dict[str, float]:
        """Return the metrics of ``Curriculum``, and those of this strategy: index of the current
        group, its episodes, and numbers of graduated and of due templates."""
        with self._lock:
            records = self._records.values()
            return super().stats() | {
                "group": float(list(self._tasks.groups).index(self.group)),
                "group_episodes": float(len(self._group_results)),
                "graduated": float(sum(record.graduated for record in records)),
                "due": float(sum(self._due(record) for record in records)),
            }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``Curriculum``, with this strategy's group, its results and the
        promotions added."""
        with self._lock:
            return super().state_dict() | {
                "group": self.group,
                "group_results": list(self._group_results),
                "promotions": [list(promotion) for promotion in self._promotions],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state; with an unknown group, start at the first.

        Raises ValueError for another version or strategy, and for the state of an earlier release.
        """
        with self._lock:
            if state.get("strategy") == self.strategy and "group" not in state:
                raise ValueError(
                    "the state of this priority curriculum was saved by an earlier release"
                )
            super().load_state_dict(state)
            self._group_index = (
                self._groups.index(state["group"]) if state["group"] in self._groups else 0
            )
            self._group_results = list(state["group_results"])
            self._promotions = [(episode, group) for episode, group in state.get("promotions", [])]


STRATEGIES = (
    LearnabilityCurriculum.strategy,
    PriorityCurriculum.strategy,
    UniformCurriculum.strategy,
)
"""Names of the strategies."""


def make_curriculum(
    strategy: str,
    seed: int,
    tasks: TaskSet[T],
    *,
    group_success: str = "fraction",
    untried_share: float = 1.0,
    priority: Mapping[str, Any] | None = None,
) -> Curriculum[T]:
    """Build a curriculum.

    Raises ValueError for an unknown strategy, preset or constant.

    Args:
        strategy: One of ``STRATEGIES``.
        seed: Seed of the draws.
        tasks: The templates to draw from.
        group_success: See ``Curriculum``.
        untried_share: See ``LearnabilityCurriculum``; without effect for ``priority``.
        priority: ``preset`` and constants of ``PriorityRule`` for the strategy ``priority``.
    """
    if strategy == LearnabilityCurriculum.strategy:
        return LearnabilityCurriculum(
            seed, tasks, untried_share=untried_share, group_success=group_success
        )
    if strategy == UniformCurriculum.strategy:
        return UniformCurriculum(
            seed, tasks, untried_share=untried_share, group_success=group_success
        )
    if strategy == PriorityCurriculum.strategy:
        rule = PriorityRule.of(**(priority or {}))
        return PriorityCurriculum(seed, tasks, rule=rule, group_success=group_success)
    raise ValueError(
        f"curriculum strategy {strategy!r} is unknown; known: {', '.join(sorted(STRATEGIES))}"
    )


class CurriculumSource:
    """Infinite data source of tasks of ``tasks``, drawn from a curriculum.

    The id of an item is ``<task id>@<n>`` with n counting from 0. Its metadata holds the task, in
    the format that ``parse_task`` reads, and ``template``, its id in the curriculum. Items have no
    values.

    Args:
        seed: Seed of the draws.
        tasks: The templates to draw from.
        strategy, options: See ``make_curriculum``.
    """

    def __init__(self, seed: int, tasks: TaskSet[Task], strategy: str, **options: Any) -> None:
        self._tasks = tasks
        self._curriculum = make_curriculum(strategy, seed, tasks, **options)
        self._drawn_count = 0

    def next_batch(self, n: int) -> list[SourceItem]:
        """Draw exactly ``n`` tasks."""
        items = [
            _item(template, self._tasks.instantiate(template, seed), self._drawn_count + index)
            for index, (template, seed) in enumerate(self._curriculum.draw(n))
        ]
        self._drawn_count += n
        return items

    def record(self, results: Sequence[SampleResult]) -> None:
        """Report results to the curriculum. Rollouts without a reward do not count, because they
        failed through no fault of the policy."""
        for result in results:
            valid = [i for i, reward in enumerate(result.rewards) if reward is not None]
            achieved = sum(bool(result.achieved[i]) for i in valid) / len(valid) if valid else None
            reward = sum(result.rewards[i] or 0.0 for i in valid) / len(valid) if valid else 0.0
            self._curriculum.record_template(result.metadata["template"], achieved, reward)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of drawn tasks and the curriculum's state."""
        return {"drawn": self._drawn_count, "curriculum": self._curriculum.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from ``state_dict``."""
        self._curriculum.load_state_dict(state["curriculum"])
        self._drawn_count = state["drawn"]

    def stats(self) -> dict[str, float]:
        """Return the curriculum's metrics."""
        return self._curriculum.stats()


class TaskSource(CurriculumSource):
    """Infinite data source of the training tasks of an environment, drawn from a curriculum.

    Args:
        seed: Seed of the draws.
        environment: The environment, as ``load_definition`` takes it.
        options: Options of the environment as plain values.
        strategy, group_success, untried_share, priority: See ``make_curriculum``.
    """

    def __init__(
        self,
        seed: int,
        environment: str,
        options: Mapping[str, Any] | None = None,
        strategy: str = "learnability",
        group_success: str = "fraction",
        untried_share: float = 1.0,
        priority: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            seed,
            build_environment(environment, options or {}).tasks(TRAIN),
            strategy,
            group_success=group_success,
            untried_share=untried_share,
            priority=priority,
        )


def _item(template: str, task: Task, number: int) -> SourceItem:
    of_mixture: dict[str, Any] = (
        {"environment": task.environment, "limits": json.dumps(asdict(task.limits))}
        if task.environment
        else {}
    )
    return SourceItem(
        id=f"{task.id}@{number}",
        metadata={
            "task": json.dumps(dict(task.payload), separators=(",", ":")),
            "task_id": task.id,
            "task_seed": task.seed,
            "template": template,
            "template_name": task.template or template,
            "group": task.group,
            "max_turns": task.max_turns,
            **of_mixture,
        },
    )
