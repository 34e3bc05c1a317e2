"""Checks of an environment's task sets, and selection of the tasks that a check plays."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from realhf.api.environment import HELD_OUT, SPLITS, TRAIN, EnvironmentSpec, Task, TaskSet
from realhf.env.check.calls import UserCode, describe_error
from realhf.env.check.report import Finding, format_count, quote
from realhf.env.loader.tasks import GROUP_COLUMN
from realhf.env.loader.validation import json_problem

_MAX_TEMPLATES = 2000
"""Maximum number of templates that are checked."""
_SEEDS = (0, 1, 2, 12_345, 2**31 - 1)
"""Seeds of the instances that are checked."""
_MANY_TEMPLATES = 200
_FEW_SEEDS = 2
"""Number of seeds that are checked per template if there are at least _MANY_TEMPLATES templates."""
_MAX_TWINS = 4
"""Maximum number of pairs in ``TaskSetChecker.twins``."""


class TaskSetChecker:
    """Checker of the task sets of ``spec``; ``add`` is called with each finding."""

    def __init__(
        self, spec: EnvironmentSpec, code: UserCode, add: Callable[[Finding], None]
    ) -> None:
        self._spec = spec
        self._code = code
        self._add = add
        self.groups: dict[str, Counter[str]] = {}
        """Number of templates by group and split."""
        self.twins: list[tuple[Task, Task]] = []
        """Pairs of tasks with the same id and payload but different seeds, which must give the same
        episode."""
        self._by_group: dict[tuple[str, str], list[Task]] = {}

    def check(self) -> None:
        """Check each split, and check that the two splits have no instance in common."""
        instances: dict[str, dict[str, Task]] = {}
        for split in SPLITS:
            try:
                tasks = self._spec.tasks(split)
                self.groups[split] = Counter(tasks.group_of.values())
                self._check_groups(split, tasks)
                checked = [*self._check_instances(split, tasks)]
            except (Exception, SystemExit) as error:
                self.groups.pop(split, None)
                what = str(error) if isinstance(error, ValueError) else describe_error(error)
                what = f"the split {split!r} cannot be made: {quote(what)}"
                mend = (
                    "tasks(split) and instantiate(template, seed) return for every split, template "
                    "and seed"
                )
                place = self._code.find_in_exception(error)
                kind = type(error).__name__
                self._add(Finding("tasks", what, mend, place, kind=kind))
                continue
            instances[split] = {instance_key(task): task for _, task in checked}
            for template, task in checked:
                self._by_group.setdefault((split, tasks.group_of[template]), []).append(task)
        for key, task in instances.get(HELD_OUT, {}).items():
            if twin := instances.get(TRAIN, {}).get(key):
                self._report_fault(
                    f"the splits share an instance: train {twin.id!r} and held-out {task.id!r}",
                    "Hold out rows or seeds that training never draws, else evaluation measures "
                    "memory",
                    task.id,
                )
                return

    def summary(self) -> str:
        """Return the sizes of the splits as text."""
        return ", ".join(
            f"{split}: {format_count(of.total(), 'template')} in {format_count(len(of), 'group')}"
            for split, of in self.groups.items()
        )

    def choose_tasks(self, count: int) -> list[Task]:
        """Return at most ``count`` tasks to play, taken in turn from every group of both splits."""
        rng = random.Random(0)
        by_group = [[*tasks] for tasks in self._by_group.values()]
        for tasks in by_group:
            rng.shuffle(tasks)
        chosen: dict[str, Task] = {}
        while len(chosen) < count and any(by_group):
            for tasks in by_group:
                if tasks and len(chosen) < count:
                    task = tasks.pop()
                    chosen.setdefault(task.id, task)
        return [*chosen.values()]

    def _report_fault(self, what: str, mend: str, task: str = "") -> None:
        self._add(Finding("tasks", what, mend, task=task))

    def _check_groups(self, split: str, tasks: TaskSet) -> None:
        group_of = dict(tasks.group_of)
        groups = [*tasks.groups]
        mend = (
            "group_of maps every template to one of groups, and groups are listed once each, the "
            "easiest first"
        )
        if not group_of:
            self._report_fault(
                f"the split {split!r} has no task", "Give it at least one; a fifth of all is usual"
            )
            return
        if not_text := [
            key for pair in group_of.items() for key in pair if not isinstance(key, str)
        ]:
            self._report_fault(
                f"split {split!r}: group_of holds {quote(repr(not_text[0]), 60)}, which is not a string",
                mend,
            )
        if len({*groups}) < len(groups):
            self._report_fault(f"split {split!r}: a group is listed twice in groups", mend)
        if unknown := [group for group in group_of.values() if group not in groups]:
            self._report_fault(
                f"split {split!r}: the group {unknown[0]!r} of a template is not in groups", mend
            )
        if empty := [group for group in groups if group not in {*group_of.values()}]:
            self._report_fault(f"split {split!r}: the group {empty[0]!r} has no template", mend)
        if [*self._spec.tasks(split).group_of.items()] != [*group_of.items()]:
            self._report_fault(
                f"split {split!r}: a second call of tasks lists other templates or another order",
                mend,
            )

    def _check_instances(self, split: str, tasks: TaskSet) -> Iterator[tuple[str, Task]]:
        """Yield (template, task) for a few instances of every template, up to the first invalid
        one, which is reported."""
        templates = spread_evenly([*tasks.group_of], _MAX_TEMPLATES)
        seeds = _SEEDS if len(templates) < _MANY_TEMPLATES else _SEEDS[:_FEW_SEEDS]
        first_uses: dict[str, tuple[str, Task]] = {}
        for template, seed in ((template, seed) for template in templates for seed in seeds):
            task = tasks.instantiate(template, seed)
            again = tasks.instantiate(template, seed)
            if wrong := _find_task_problem(task):
                what = f"instantiate({template!r}, {seed}) returns a task whose {wrong}"
                self._report_fault(what, "See Task in realhf/api/environment.py")
                return
            if task != again:
                what = f"instantiate({template!r}, {seed}) returns another task the second time"
                mend = (
                    "Draw from random.Random(seed) alone, not from the clock or a generator that "
                    "is shared"
                )
                self._report_fault(what, mend, task.id)
                return
            owner_template, twin = first_uses.setdefault(task.id, (template, task))
            if owner_template != template or twin.payload != task.payload:
                what = f"an id names two tasks: that of {owner_template!r} and that of {template!r}"
                self._report_fault(
                    what,
                    "Make the template and whatever else tells instances apart part of the id",
                    task.id,
                )
                return
            if twin.seed != task.seed and len(self.twins) < _MAX_TWINS:
                self.twins.append((twin, task))
            yield template, task


_LABELS = ("id", GROUP_COLUMN)
"""Columns of a row that label its task and do not affect the episode."""


def instance_key(task: Task) -> str:
    """Return a string that is equal for tasks with the same episode.

    Labels (id and group) are ignored, unless the payload has nothing else; then the environment
    looks the task up by them.
    """
    played = {
        name: value for name, value in task.payload.items() if name not in _LABELS
    } or task.payload
    return json.dumps([played, task.seed], sort_keys=True, default=repr)


def _find_task_problem(task: object) -> str:
    if not isinstance(task, Task):
        return f"type is {type(task).__name__} and not Task"
    if not isinstance(task.id, str) or not task.id:
        return f"id is {quote(repr(task.id), 60)}"
    if not isinstance(task.seed, int) or isinstance(task.seed, bool):
        return f"seed is of the type {type(task.seed).__name__}"
    if not isinstance(task.payload, Mapping):
        return f"payload is of the type {type(task.payload).__name__} and not a map"
    problem = json_problem(task.payload)
    return problem and f"payload is no JSON: {problem}"


def spread_evenly(items: Sequence[str], count: int) -> list[str]:
    """Return at most ``count`` of the items, evenly spaced over the sequence."""
    return [*items[:: max(1, -(-len(items) // count))]]
