"""Offers the AWS tasks by their numbers, for the curriculum of a trainer of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from realhf.aws.tasks.loader import instantiate, load_templates
from realhf.aws.tasks.task import TIERS, Task


class TrainingTasks:
    """Holds the training templates of these ``tiers`` (None: of all) with any of these ``tags`` (none: whatever their
    tags). Held-out templates are never in it. Raises TaskError for an unknown tier or tag."""

    def __init__(self, tiers: Iterable[str] | None = None, tags: Iterable[str] = ()) -> None:
        templates = load_templates(tiers, tags=tags, split="train")
        self.group_of: Mapping[int, str] = {template.task_id: template.tier for template in templates}
        self.groups: Sequence[str] = TIERS

    def instantiate(self, template_id: int, seed: int) -> Task:
        """Return the instance that ``seed`` draws among the names that training may see."""
        return instantiate(template_id, seed)
