"""Decides which task comes next, by priority, learnability or neither, and offers the tasks as a
data source.

Choosing reads statistics and draws from the seeded generator; ``record_template`` alone changes
them. Thread-safe.

*priority* is the classic rule of docs/reference/environment.md 8. *learnability* draws where there is something to
learn: most training goes to what succeeds sometimes, a little to everything (docs/reference/learning.md 2). Training
uses the one that the learning benchmark shows to be better (``dataset.curriculum``). *uniform* draws all
alike, also what never succeeds, about which a teacher has as much to say as about all else.
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
GROUP_SUCCESS = ("fraction", "any")
WEAK_RATE = 0.7
_SEED_BITS = 31
_FAILURES = 3
"""After so many groups without a valid rollout a template that was never tried comes first no
longer."""
logger = logging.getLogger(__name__)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class TaskSet(Protocol[T_co]):
    """Offers a curriculum templates, by name or number, in groups of rising difficulty, and
    instances of them; ``realhf.api.environment.TaskSet`` is one."""

    @property
    def group_of(self) -> Mapping[Any, str]:
        """The group of every template that may be drawn."""
        ...

    @property
    def groups(self) -> Sequence[str]:
        """All groups there are, the easiest first, including those without a template here."""
        ...

    def instantiate(self, template_id: Any, seed: int) -> T_co:
        """Return the instance that ``seed`` draws for training."""
        ...


@dataclass
class TemplateRecord:
    """Holds what is known about one template. ``results``: the last ones, oldest first;
    ``failures``: groups without a valid rollout; ``successes``/``weight``: the decayed sums of the
    learnability rate; ``interval`` (0 before graduation) and ``reference``: the spaced repetition
    schedule."""

    results: list[float] = field(default_factory=list)
    attempts: int = 0
    last_episode: int = -1
    successes: float = 0.0
    weight: float = 0.0
    interval: int = 0
    reference: int = 0
    failures: int = 0

    @property
    def untried(self) -> bool:
        """Whether the template has no result yet and can be expected to have one. One whose
        environment always fails would else take a place in every batch."""
        return not self.attempts and self.failures < _FAILURES

    @property
    def graduated(self) -> bool:
        """Whether the template counts as mastered, so that it comes back only for re-tests."""
        return self.interval > 0


class Curriculum(Generic[T]):
    """Draws tasks, records results and keeps metrics and state: what the strategies have in common.

    Raises ValueError for a task set without templates, LookupError for a template that it does not
    hold.

    Args:
        seed: of the draws.
        tasks: what is drawn from.
        group_success: what a group counts as: the ``fraction`` of its valid rollouts that achieved the task, or
            ``any`` (1 when at least one did).
    """

    strategy = ""

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
        """Go back to the first episode: forget all results."""
        with self._lock:
            self._rng = random.Random(f"curriculum:{self._seed}")
            self._records = {template_id: TemplateRecord() for template_id in self._group_of}
            self._episodes = 0
            self._invalid_groups = 0
            self._rewards: list[float] = []

    def draw(self, count: int) -> list[tuple[Any, int]]:
        """Return template and seed of ``count`` training tasks for one batch, as different as the
        strategy allows."""
        with self._lock:
            return [
                (template_id, self._rng.getrandbits(_SEED_BITS))
                for template_id in self._choose(count)
            ]

    def next_task(self, seed: int | None = None) -> T:
        """Return the task to play now; ``seed`` fixes the instance instead of drawing it."""
        template_id, drawn = self.draw(1)[0]
        return self._tasks.instantiate(template_id, drawn if seed is None else seed)

    def next_tasks(self, count: int) -> list[T]:
        """Return ``count`` training tasks for one batch, as different as the strategy allows."""
        return [
            self._tasks.instantiate(template_id, seed) for template_id, seed in self.draw(count)
        ]

    def record_result(self, task: Any, achieved: bool | float | None, reward: float = 0.0) -> None:
        """Record a result for the template of ``task``, its ``task_id``; see
        ``record_template``."""
        self.record_template(task.task_id, achieved, reward)

    def record_template(
        self, task_id: Any, achieved: bool | float | None, reward: float = 0.0
    ) -> None:
        """Record a result; there is no other way in. A group counts as one episode; ``achieved`` is
        the fraction of its valid rollouts that achieved the task, None for a group without valid
        rollouts."""
        self._check_known(task_id)
        with self._lock:
            if achieved is None:
                self._invalid_groups += 1
                self._records[task_id].failures += 1
                return
            if not 0.0 <= float(achieved) <= 1.0:
                raise ValueError(f"achieved is {achieved}, not a fraction")
            if not is_finite(reward):
                raise ValueError(f"reward is {reward}; a failed rollout is no result")
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
        """Return the strategy's running success rate of a template, 0 if it was never tried."""
        raise NotImplementedError

    def _choose(self, count: int) -> list[Any]:
        raise NotImplementedError

    def _learn(self, template_id: Any, record: TemplateRecord, result: float) -> None:
        raise NotImplementedError

    def get_stats(self) -> dict[str, Any]:
        """Return what a person asks for: ``episode_count``, ``invalid_groups``,
        ``avg_reward_last_10``; ``skill_profile`` {task id: success rate} of what was tried; lists
        of task ids ``graduated_tasks``, ``weak_spots`` (below 0.7, not graduated),
        ``spaced_rep_due``; ``group``, ``group_episodes``, ``group_success_rate``, ``promotions``
        [(episode, group)], empty in a strategy that takes all groups at once."""
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
        """Return metrics for the step's log: episodes, invalid groups, mean reward, success rate by
        group, untried."""
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
        """Return everything that decides later draws, as JSON can hold it."""
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
        """Continue from a saved state. Another task set is a warning: known templates keep their
        records, others start as new. Raises ValueError for another version or strategy."""
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
        return hashlib.sha256(json.dumps(sorted(self._group_of.items())).encode()).hexdigest()[:16]


class LearnabilityCurriculum(Curriculum[T]):
    """Draws templates with weight p(1-p) + ``floor``; untried templates come first, but are no more
    than ``untried_share`` of a batch once others succeed sometimes. ``decay`` forgets older
    groups."""

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
        """See ``Curriculum``."""
        record = self._records[template_id]
        return record.successes / record.weight if record.weight else 0.0

    def weight(self, template_id: Any) -> float:
        """Return the share of draws, up to a constant, that a tried template gets."""
        rate = self.success_rate(template_id)
        return rate * (1.0 - rate) + self._floor

    def _choose(self, count: int) -> list[Any]:
        untried = [template_id for template_id, record in self._records.items() if record.untried]
        tried = [template_id for template_id, record in self._records.items() if not record.untried]
        self._rng.shuffle(untried)
        most = count
        if self._untried_share < 1 and any(
            self.weight(template_id) > self._floor for template_id in tried
        ):
            most = int(
                self._untried_share * count + self._rng.random()
            )  # random rounding keeps the share on average, even for batches of one
        chosen = untried[:most]
        if len(chosen) < count:
            templates = self._drawn_from(tried or untried)
            weights = (
                [self.weight(template_id) for template_id in templates]
                if tried
                else [1.0] * len(untried)
            )
            chosen += _even_draws(self._rng, templates, weights, count - len(chosen))
        return chosen

    def _drawn_from(self, templates: list[Any]) -> list[Any]:
        return templates

    def _learn(self, template_id: Any, record: TemplateRecord, result: float) -> None:
        record.successes = self._decay * record.successes + result
        record.weight = self._decay * record.weight + 1.0


class UniformCurriculum(LearnabilityCurriculum[T]):
    """Draws all templates alike, but for those whose environment always fails; untried ones come
    first."""

    strategy = "uniform"

    def weight(self, template_id: Any) -> float:
        """See ``LearnabilityCurriculum``."""
        return 1.0 if self._records[template_id].attempts else self._floor

    def _drawn_from(self, templates: list[Any]) -> list[Any]:
        # Even draws walk through them in their order: with equal weights always the same ones would
        # come together.
        return self._rng.sample(templates, len(templates))


def _even_draws(
    rng: random.Random, items: Sequence[Any], weights: Sequence[float], count: int
) -> list[Any]:
    """Make ``count`` weighted draws that hit each item within one of its expected number
    (systematic resampling), in random order: a batch then follows the weights as closely as it
    can."""
    step = sum(weights) / count
    position = rng.random() * step
    cumulative = weights[0]
    index = 0
    drawn = []
    for _ in range(count):
        while position >= cumulative and index + 1 < len(items):
            index += 1
            cumulative += weights[index]
        drawn.append(items[index])
        position += step
    rng.shuffle(drawn)
    return drawn


@dataclass(frozen=True)
class PriorityRule:
    """Holds the constants of the priority strategy. ``promotion``: least episodes and success rate
    that lead out of the first group, the second, ...; the last pair holds for all further ones.
    ``untried``, ``weak``, ``due`` and ``recent``: what they add to a template's score (``weak``
    times 1 - rate)."""

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
        """Return a preset with some constants changed. Raises ValueError for an unknown preset or
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
    """Return the success rate with weight decay**age, age 0 being the last; 0 without results."""
    weights = [decay**age for age in range(len(results))]
    return (
        sum(w * r for w, r in zip(weights, reversed(results), strict=True)) / sum(weights)
        if results
        else 0.0
    )


class PriorityCurriculum(Curriculum[T]):
    """Draws the template with the highest priority, among the current group and what is due from
    those before it."""

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
            return rule.untried if record.untried else 0.0
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
            passed = result >= rule.mastery_rate
            record.interval = (
                min(2 * record.interval, rule.longest_interval) if passed else rule.first_interval
            )
            record.reference = self._episodes
        if self._group_of[template_id] == self.group:
            self._group_results.append(result)
            self._promote()

    def _promote(self) -> None:
        """Move to the next group when this one goes well; there is no way back."""
        rule = self.rule
        count = len(self._group_results)
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
        """See ``Curriculum``; adds the group, its results, re-tests that are due, and
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
        """See ``Curriculum``; adds the group's number and episodes, and how many templates are
        graduated and due."""
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


def make_curriculum(
    strategy: str,
    seed: int,
    tasks: TaskSet[T],
    *,
    group_success: str = "fraction",
    untried_share: float = 1.0,
    priority: Mapping[str, Any] | None = None,
) -> Curriculum[T]:
    """Build the curriculum; ``untried_share`` is for all but ``priority``. For this, ``preset`` and
    constants of ``PriorityRule`` that differ from it may be given. Raises ValueError for an unknown
    strategy, preset or constant."""
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


class TaskSource:
    """Draws tasks of the training split from a curriculum, without end.

    Ids are ``<task id>@<n>`` with n counting from 0. Metadata holds what ``parse_task`` reads, and
    ``template``, the id in the curriculum. There are no values: the task travels as metadata.
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
        self._tasks = build_environment(environment, options or {}).tasks(TRAIN)
        self._curriculum = make_curriculum(
            strategy,
            seed,
            self._tasks,
            group_success=group_success,
            untried_share=untried_share,
            priority=priority,
        )
        self._drawn = 0

    def next_batch(self, n: int) -> list[SourceItem]:
        """Draw exactly ``n`` tasks."""
        items = [
            _item(template, self._tasks.instantiate(template, seed), self._drawn + index)
            for index, (template, seed) in enumerate(self._curriculum.draw(n))
        ]
        self._drawn += n
        return items

    def record(self, results: Sequence[SampleResult]) -> None:
        """Report results to the curriculum; rollouts that failed through no fault of the policy do
        not count."""
        for result in results:
            valid = [i for i, reward in enumerate(result.rewards) if reward is not None]
            achieved = sum(bool(result.achieved[i]) for i in valid) / len(valid) if valid else None
            reward = sum(result.rewards[i] or 0.0 for i in valid) / len(valid) if valid else 0.0
            self._curriculum.record_template(result.metadata["template"], achieved, reward)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of tasks drawn and the curriculum's state."""
        return {"drawn": self._drawn, "curriculum": self._curriculum.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self._curriculum.load_state_dict(state["curriculum"])
        self._drawn = state["drawn"]

    def stats(self) -> dict[str, float]:
        """Return the curriculum's metrics."""
        return self._curriculum.stats()


def _item(template: str, task: Task, number: int) -> SourceItem:
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
        },
    )
