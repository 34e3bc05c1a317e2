"""Decides which task comes next: what both strategies share. A training run has one instance.

Choosing reads statistics and draws from the seeded generator; ``record_template`` alone changes them. Thread-safe.
Source: docs/reference/environment.md 8.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

STATE_VERSION = 1
GROUP_SUCCESS = ("fraction", "any")
WEAK_RATE = 0.7
_SEED_BITS = 31

logger = logging.getLogger(__name__)


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class TaskSet(Protocol[T_co]):
    """Offers a curriculum templates, by name or number, in groups of rising difficulty, and instances of them;
    ``realhf.api.environment.TaskSet`` is one."""

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
    """Holds what is known about one template. ``results``: the last ones, oldest first; ``successes``/``weight``: the
    decayed sums of the learnability rate; ``interval`` (0 before graduation) and ``reference``: the spaced repetition
    schedule."""

    results: list[float] = field(default_factory=list)
    attempts: int = 0
    last_episode: int = -1
    successes: float = 0.0
    weight: float = 0.0
    interval: int = 0
    reference: int = 0

    @property
    def graduated(self) -> bool:
        """Whether the template counts as mastered, so that it comes back only for re-tests."""
        return self.interval > 0


class Curriculum(Generic[T]):
    """Draws tasks, records results and keeps metrics and state: what the strategies have in common.

    Raises ValueError for a task set without templates, LookupError for a template that it does not hold.

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
            raise ValueError(f"group_success is {group_success!r}; allowed: {', '.join(GROUP_SUCCESS)}")
        if not tasks.group_of:
            raise ValueError("the curriculum has no task in the groups and with the tags it was given")
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
        """Return template and seed of ``count`` training tasks for one batch, as different as the strategy allows."""
        with self._lock:
            return [(template_id, self._rng.getrandbits(_SEED_BITS)) for template_id in self._choose(count)]

    def next_task(self, seed: int | None = None) -> T:
        """Return the task to play now; ``seed`` fixes the instance instead of drawing it."""
        template_id, drawn = self.draw(1)[0]
        return self._tasks.instantiate(template_id, drawn if seed is None else seed)

    def next_tasks(self, count: int) -> list[T]:
        """Return ``count`` training tasks for one batch, as different as the strategy allows."""
        return [self._tasks.instantiate(template_id, seed) for template_id, seed in self.draw(count)]

    def get_task_by_id(self, task_id: Any, seed: int = 0) -> T:
        """Return an instance of a template of this curriculum."""
        self._check_known(task_id)
        return self._tasks.instantiate(task_id, seed)

    def record_result(self, task: Any, achieved: bool | float | None, reward: float = 0.0) -> None:
        """Record a result for the template of ``task``, its ``task_id``; see ``record_template``."""
        self.record_template(task.task_id, achieved, reward)

    def record_template(self, task_id: Any, achieved: bool | float | None, reward: float = 0.0) -> None:
        """Record a result; there is no other way in. A group counts as one episode; ``achieved`` is the fraction of its
        valid rollouts that achieved the task, None for a group without valid rollouts."""
        self._check_known(task_id)
        with self._lock:
            if achieved is None:
                self._invalid_groups += 1
                return
            if not 0.0 <= float(achieved) <= 1.0:
                raise ValueError(f"achieved is {achieved}, not a fraction")
            if not math.isfinite(reward):
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
        """Return what a person asks for: ``episode_count``, ``invalid_groups``, ``avg_reward_last_10``;
        ``skill_profile`` {task id: success rate} of what was tried; lists of task ids ``graduated_tasks``,
        ``weak_spots`` (below 0.7, not graduated), ``spaced_rep_due``; ``group``, ``group_episodes``,
        ``group_success_rate``, ``promotions`` [(episode, group)], empty in a strategy that takes all groups at once."""
        with self._lock:
            tried = {key: record for key, record in self._records.items() if record.attempts}
            rates = {key: self.success_rate(key) for key in tried}
            return {
                "episode_count": self._episodes,
                "group": None,
                "group_episodes": 0,
                "group_success_rate": 0.0,
                "graduated_tasks": [key for key, record in tried.items() if record.graduated],
                "weak_spots": [key for key, rate in rates.items() if rate < WEAK_RATE and not tried[key].graduated],
                "skill_profile": rates,
                "spaced_rep_due": [],
                "avg_reward_last_10": sum(self._rewards) / len(self._rewards) if self._rewards else 0.0,
                "invalid_groups": self._invalid_groups,
                "promotions": [],
            }

    def stats(self) -> dict[str, float]:
        """Return metrics for the step's log: episodes, invalid groups, mean reward, success rate by group, untried."""
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
        return hashlib.sha256(json.dumps(sorted(self._group_of.items())).encode()).hexdigest()[:16]
