"""Offers the templates as a set of tasks, and turns a task's payload back into its instance."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from realhf.api.environment import SPLITS, TRAIN, Task
from realhf.environments.sql import changes, questions
from realhf.environments.sql.instance import Instance, Scene, draw_scene

GROUPS = ("lookup", "aggregate", "join", "change", "steps")
"""The easiest first: one cell; over several rows; over two tables; one change; several statements."""


@dataclass(frozen=True)
class Template:
    """A kind of task, an endless family of instances."""

    group: str
    draw: Callable[[Scene], Instance]


TEMPLATES: Mapping[str, Template] = MappingProxyType(
    {
        draw.__name__: Template(group, draw)
        for group, draws in {
            "lookup": (questions.cell, questions.name_of_id, questions.name_of_number),
            "aggregate": (questions.count, questions.total, questions.total_above, questions.extreme),
            "join": (questions.linked_value, questions.linked_count, questions.linked_total),
            "change": (changes.set_number, changes.delete, changes.insert, changes.raise_numbers),
            "steps": (changes.transfer, changes.copy_number, changes.archive, changes.rename),
        }.items()
        for draw in draws
    }
)


class SqlTaskSet:
    """Implements ``realhf.api.environment.TaskSet``: the templates of ``groups``, each an endless family by seed. The
    splits draw disjoint names. Raises ValueError for an unknown split or group."""

    def __init__(self, split: str = TRAIN, groups: Sequence[str] = GROUPS) -> None:
        if split not in SPLITS:
            raise ValueError(f"{split!r} is no split (known: {', '.join(SPLITS)})")
        if unknown := [group for group in groups if group not in GROUPS]:
            raise ValueError(f"{unknown[0]!r} is no group of tasks (known: {', '.join(GROUPS)})")
        self.split = split
        self.groups: Sequence[str] = tuple(group for group in GROUPS if group in groups)
        self.group_of: Mapping[str, str] = {
            name: template.group for name, template in TEMPLATES.items() if template.group in groups
        }

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the instance that ``seed`` draws. Raises KeyError for a template that is not in the set."""
        group = self.group_of[template_id]
        payload = {"template": template_id, "split": self.split, "seed": seed}
        return Task(f"{template_id}:{self.split}:{seed}", group, payload, seed=seed)


def draw_instance(payload: Mapping[str, Any]) -> Instance:
    """Return the instance of a task's payload, the same for the same payload. Raises ValueError for a payload that is
    not of this environment."""
    name, split, seed = (payload.get(key) for key in ("template", "split", "seed"))
    if not isinstance(name, str) or name not in TEMPLATES:
        raise ValueError(f"the task names no template of this environment: {name!r}")
    if not isinstance(split, str) or type(seed) is not int:
        raise ValueError(
            f"the task of template {name} needs a split and a whole number as seed, not {split!r}, {seed!r}"
        )
    rng = random.Random(f"sql:{name}:{split}:{seed}")
    return TEMPLATES[name].draw(draw_scene(rng, split))
