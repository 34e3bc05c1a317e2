"""Offers the templates as a set of tasks, and turns a task's payload back into its instance."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from realhf.api.environment import SPLITS, TRAIN, Task
from realhf.environments.sql import templates
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
            "lookup": (templates.cell, templates.name_of_id, templates.name_of_number),
            "aggregate": (templates.count, templates.total, templates.total_above, templates.extreme),
            "join": (templates.linked_value, templates.linked_count, templates.linked_total),
            "change": (templates.set_number, templates.delete, templates.insert, templates.raise_numbers),
            "steps": (templates.transfer, templates.copy_number, templates.archive, templates.rename),
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
