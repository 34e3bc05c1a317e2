"""Offers the tasks of an environment as a data source: each sample is one task, to be played by a group of rollouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from realhf.api.environment import TRAIN, Task
from realhf.api.source import SampleResult, SourceItem
from realhf.env.curriculum.factory import make_curriculum
from realhf.env.doors.load import build_environment


class TaskSource:
    """Draws tasks of the training split from a curriculum, without end.

    Ids are ``<task id>@<n>`` with n counting from 0. Metadata holds what ``task_of`` reads, and ``template``, the
    id in the curriculum. There are no values: the task travels as metadata.
    """

    def __init__(
        self,
        seed: int,
        environment: str,
        options: Mapping[str, Any] | None = None,
        strategy: str = "learnability",
        group_success: str = "fraction",
        priority: Mapping[str, Any] | None = None,
    ) -> None:
        self._tasks = build_environment(environment, options or {}).tasks(TRAIN)
        self._curriculum = make_curriculum(strategy, seed, self._tasks, group_success=group_success, priority=priority)
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
        """Report results to the curriculum; rollouts that failed through no fault of the policy do not count."""
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
        },
    )
