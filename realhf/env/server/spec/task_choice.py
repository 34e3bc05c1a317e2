"""Chooses the task that a reset asks for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realhf.api.environment import SPLITS, TRAIN, EnvironmentSpec, Task, TaskSet
from realhf.base.text import shorten
from realhf.env.server.wire import VALIDATION_ERROR, WireError


@dataclass(frozen=True)
class ChosenTask:
    """A task to play. ``template`` and ``split`` are "" for a task that the client sent whole."""

    task: Task
    template: str = ""
    split: str = ""


class TaskChoice:
    """Knows the tasks of an environment. The task of seed n in a split is its template number n, counted round, drawn
    with the seed n; a reset that names nothing plays the next n of the training split.

    Raises ValueError when the environment has no training tasks. A held-out split that cannot be made is refused when
    somebody asks for it.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._sets: dict[str, TaskSet] = {}
        self._templates: dict[str, list[str]] = {}
        self._missing: dict[str, str] = {}
        self._next = itertools.count()
        for split in SPLITS:
            try:
                tasks = spec.tasks(split)
                self._sets[split], self._templates[split] = tasks, [*tasks.group_of]
                if not self._templates[split]:
                    raise ValueError(f"there are no tasks in the split {split}")
            except Exception as error:
                if split == TRAIN:
                    raise ValueError(f"no tasks to play: {type(error).__name__}: {error}") from error
                self._missing[split] = f"the split {split} cannot be played ({type(error).__name__}: {error})"

    def counts(self) -> dict[str, int]:
        """Return how many templates each split has; 0 for one that cannot be played."""
        return {split: 0 if split in self._missing else len(self._templates[split]) for split in SPLITS}

    def groups(self) -> list[str]:
        """Return the groups of the training split, the easiest first."""
        return [str(group) for group in self._sets[TRAIN].groups]

    def check(self, data: Mapping[str, Any]) -> None:
        """Raise WireError for a task that is not there."""
        split = data.get("split", TRAIN)
        if "task" in data:
            return
        if split in self._missing:
            raise WireError(VALIDATION_ERROR, shorten(self._missing[split], 300), field="data.split")
        if "task_id" in data and str(data["task_id"]) not in self._sets[split].group_of:
            text = f"no task {str(data['task_id'])[:64]!a} in the split {split}"
            raise WireError(VALIDATION_ERROR, text, field="data.task_id")

    def choose(self, data: Mapping[str, Any]) -> ChosenTask:
        """Return the task that checked reset data mean. It runs the environment's own code, whatever that raises."""
        if "task" in data:
            return ChosenTask(Task("", payload=data["task"], seed=data.get("seed", 0)))
        split = data.get("split", TRAIN)
        names_nothing = "seed" not in data and "task_id" not in data
        seed = data.get("seed", next(self._next) if names_nothing else 0)
        templates = self._templates[split]
        template = str(data["task_id"]) if "task_id" in data else templates[seed % len(templates)]
        return ChosenTask(self._sets[split].instantiate(template, seed), template, split)
