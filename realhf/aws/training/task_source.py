"""The curriculum as a data source: each sample is one task to be played by a group of rollouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from realhf.api.source import SampleResult, SourceItem
from realhf.aws.tasks.task import Task
from realhf.aws.tasks.task_set import AwsTaskSet
from realhf.env.curriculum.factory import make_curriculum


class TaskCurriculumSource:
    """Draws tasks from a curriculum, without end. Ids are ``<template>-<seed>@<n>`` with n counting from 0; metadata
    holds the task as JSON text and ``task_id``, ``template``, ``tier``, ``task_seed``. There are no values: the task
    travels as metadata."""

    def __init__(
        self,
        seed: int,
        tiers: Sequence[str] | None = None,
        strategy: str = "learnability",
        tags: Sequence[str] = (),
        group_success: str = "fraction",
        priority: Mapping[str, Any] | None = None,
    ) -> None:
        self._curriculum = make_curriculum(
            strategy, seed, AwsTaskSet(tiers, tags), group_success=group_success, priority=priority
        )
        self._drawn = 0

    def next_batch(self, n: int) -> list[SourceItem]:
        """Draw exactly ``n`` tasks."""
        items = [_item(task, self._drawn + index) for index, task in enumerate(self._curriculum.next_tasks(n))]
        self._drawn += n
        return items

    def record(self, results: Sequence[SampleResult]) -> None:
        """Report results to the curriculum; rollouts that failed through no fault of the policy do not count."""
        for result in results:
            valid = [i for i, reward in enumerate(result.rewards) if reward is not None]
            achieved = sum(bool(result.achieved[i]) for i in valid) / len(valid) if valid else None
            reward = sum(result.rewards[i] or 0.0 for i in valid) / len(valid) if valid else 0.0
            self._curriculum.record_template(result.metadata["task_id"], achieved, reward)

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


def _item(task: Task, number: int) -> SourceItem:
    return SourceItem(
        id=f"{task.template}-{task.seed}@{number}",
        metadata={
            "task": json.dumps(task.to_json(), separators=(",", ":")),
            "task_id": task.task_id,
            "template": task.template,
            "tier": task.tier,
            "task_seed": task.seed,
        },
    )
