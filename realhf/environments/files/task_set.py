"""Offers the templates as an endless task set of one split."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from realhf.api.environment import SPLITS, Task
from realhf.environments.files.templates import GROUPS, TEMPLATES, Instance, Scene


class FilesTasks:
    """Holds the templates of these groups: every seed draws another instance of a template. Every instance holds names,
    and no name occurs in both splits. Raises ValueError for a group or split that does not exist."""

    def __init__(self, groups: Iterable[str], split: str) -> None:
        chosen = [*groups]
        if unknown := [group for group in chosen if group not in GROUPS]:
            raise ValueError(f"unknown group {unknown[0]!r} (known: {', '.join(GROUPS)})")
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r} (known: {', '.join(SPLITS)})")
        self.split = split
        self.groups: Sequence[str] = [group for group in GROUPS if group in chosen]
        self.group_of: Mapping[str, str] = {name: group for name, (group, _) in TEMPLATES.items() if group in chosen}

    def instance(self, template_id: str, seed: int) -> Instance:
        """Return the instance that ``seed`` draws, with its solution. Raises KeyError for a template not in the set."""
        if template_id not in self.group_of:
            raise KeyError(template_id)
        rng = random.Random(f"files {self.split} {template_id} {seed}")
        return TEMPLATES[template_id][1](Scene(rng, self.split))

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the instance that ``seed`` draws. Raises KeyError for a template not in the set."""
        row = self.instance(template_id, seed).row
        return Task(f"{template_id}/{seed}", group=self.group_of[template_id], payload=row, seed=seed)
