"""Judges task sets: ids that are unique and stable, groups that hold something, splits that share no instance."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from realhf.api.environment import HELD_OUT, SPLITS, TRAIN, EnvironmentSpec, Task, TaskSet
from realhf.env.check.calls import described
from realhf.env.check.finding import Finding, counted, quoted
from realhf.env.check.shapes import not_json
from realhf.env.check.user_code import UserCode

CHECK = "tasks"
_MOST_TEMPLATES = 2000
_SEEDS = (0, 1, 2, 12_345, 2**31 - 1)
_FEW_SEEDS = _SEEDS[:2]
_MOST_TWINS = 4
_MANY = 200
"""From this number of templates on, fewer seeds are tried of each."""


class Sampled(NamedTuple):
    """A task that a check plays, with where it comes from."""

    split: str
    template: str
    task: Task


class TaskSetJudge:
    """Judges the task sets of ``spec``; ``add`` takes what is wrong."""

    def __init__(self, spec: EnvironmentSpec, code: UserCode, add: Callable[[Finding], None]) -> None:
        self._spec = spec
        self._code = code
        self._add = add
        self.sets: dict[str, TaskSet] = {}
        self.instances: dict[str, list[Sampled]] = {}
        self.twins: list[tuple[Sampled, Sampled]] = []
        """Tasks of one id and payload and two seeds: they must be the same episode."""

    def judge(self) -> None:
        """Look at both splits and at the two together."""
        for split in SPLITS:
            try:
                found = self._spec.tasks(split)
                self.sets[split] = found
                self._judge_groups(split, found)
                self.instances[split] = [*self._instances(split, found)]
            except (Exception, SystemExit) as error:
                self.sets.pop(split, None)
                what = str(error) if isinstance(error, ValueError) else described(error)
                mend = "tasks(split) and instantiate(template, seed) return for every split, template and seed"
                place, kind = self._code.of_exception(error), type(error).__name__
                what = f"the split {split!r} cannot be made: {quoted(what)}"
                self._add(Finding(CHECK, what, mend, place, kind=kind))
        self._judge_overlap()

    def groups(self) -> dict[str, dict[str, int]]:
        """Return for each split its groups, each with its number of templates."""
        found = {split: [*tasks.group_of.values()] for split, tasks in self.sets.items()}
        return {split: {group: of.count(group) for group in dict.fromkeys(of)} for split, of in found.items()}

    def remark(self) -> str:
        """Return one line about the sizes of the splits."""
        return ", ".join(
            f"{split}: {counted(sum(of.values()), 'template')} in {counted(len(of), 'group')}"
            for split, of in self.groups().items()
        )

    def _fault(self, what: str, mend: str, *, where: str = "", task: str = "") -> None:
        self._add(Finding(CHECK, what, mend, where, task))

    def _judge_groups(self, split: str, tasks: TaskSet) -> None:
        group_of, groups = dict(tasks.group_of), [*tasks.groups]
        mend = "group_of maps every template to one of groups, and groups are listed once each, the easiest first"
        if not group_of:
            self._fault(f"the split {split!r} has no task", "Give it at least one; a fifth of all is usual")
            return
        if not_text := [key for pair in group_of.items() for key in pair if not isinstance(key, str)]:
            self._fault(f"split {split!r}: group_of holds {quoted(repr(not_text[0]), 60)}, which is no text", mend)
        if len({*groups}) < len(groups):
            self._fault(f"split {split!r}: a group is listed twice in groups", mend)
        if unknown := [group for group in group_of.values() if group not in groups]:
            self._fault(f"split {split!r}: the group {unknown[0]!r} of a template is not in groups", mend)
        if empty := [group for group in groups if group not in {*group_of.values()}]:
            self._fault(f"split {split!r}: the group {empty[0]!r} has no template", mend)
        if [*self._spec.tasks(split).group_of.items()] != [*group_of.items()]:
            self._fault(f"split {split!r}: a second call of tasks lists other templates or another order", mend)

    def _instances(self, split: str, tasks: TaskSet) -> Iterator[Sampled]:
        templates = spread([*tasks.group_of], _MOST_TEMPLATES)
        seeds = _SEEDS if len(templates) < _MANY else _FEW_SEEDS
        owner: dict[str, Sampled] = {}
        for template in templates:
            for seed in seeds:
                task, again = tasks.instantiate(template, seed), tasks.instantiate(template, seed)
                if wrong := _task_problem(task):
                    self._fault(
                        f"instantiate({template!r}, {seed}) returns a task whose {wrong}",
                        "See Task in realhf/api/environment.py",
                    )
                    return
                if task != again:
                    self._fault(
                        f"instantiate({template!r}, {seed}) returns another task the second time",
                        "Draw from random.Random(seed) alone, not from the clock or a generator that is shared",
                        task=task.id,
                    )
                    return
                sampled = Sampled(split, template, task)
                other = owner.setdefault(task.id, sampled)
                if other.template != template or other.task.payload != task.payload:
                    self._fault(
                        f"an id names two tasks: that of {other.template!r} and that of {template!r}",
                        "Make the template and whatever else tells instances apart part of the id",
                        task=task.id,
                    )
                    return
                if other.task.seed != task.seed and len(self.twins) < _MOST_TWINS:
                    self.twins.append((other, sampled))
                yield sampled

    def _judge_overlap(self) -> None:
        seen = {instance_key(found.task): found for found in self.instances.get(TRAIN, ())}
        for found in self.instances.get(HELD_OUT, ()):
            if twin := seen.get(instance_key(found.task)):
                same = f"train {twin.task.id!r} and held-out {found.task.id!r}"
                self._fault(
                    f"the splits share an instance: {same}",
                    "Hold out rows or seeds that training never draws, else evaluation measures memory",
                    task=found.task.id,
                )
                return


def instance_key(task: Task) -> str:
    """Return a text that two tasks share when the same episode is played for both."""
    return json.dumps([task.payload, task.seed], sort_keys=True, default=repr)


def _task_problem(task: object) -> str:
    if not isinstance(task, Task):
        return f"type is {type(task).__name__} and not Task"
    if not isinstance(task.id, str) or not task.id:
        return f"id is {quoted(repr(task.id), 60)}"
    if not isinstance(task.seed, int) or isinstance(task.seed, bool):
        return f"seed is of the type {type(task.seed).__name__}"
    if not isinstance(task.payload, Mapping):
        return f"payload is of the type {type(task.payload).__name__} and not a map"
    return not_json(task.payload, "payload") and f"payload is no JSON: {not_json(task.payload, 'payload')}"


def spread(items: Sequence[str], most: int) -> list[str]:
    """Return at most ``most`` items, evenly spread over all."""
    step = max(1, -(-len(items) // most))
    return [*items[::step]]


def choose(instances: Mapping[str, Sequence[Sampled]], sets: Mapping[str, TaskSet], most: int) -> list[Sampled]:
    """Return the tasks that are played: one of every group of both splits in turns, up to ``most``."""
    rng = random.Random(0)
    by_group: dict[tuple[str, str], list[Sampled]] = {}
    for split, found in instances.items():
        for sampled in found:
            by_group.setdefault((split, sets[split].group_of[sampled.template]), []).append(sampled)
    for found in by_group.values():
        rng.shuffle(found)
    chosen: dict[str, Sampled] = {}
    while len(chosen) < most and any(by_group.values()):
        for found in by_group.values():
            if found and len(chosen) < most:
                sampled = found.pop()
                chosen.setdefault(sampled.task.id, sampled)
    return [*chosen.values()]
