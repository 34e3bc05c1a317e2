"""Lists the tasks as the playground's picker shows them."""

from __future__ import annotations

import re
from typing import Any

from realhf.aws.tasks.loader import fill, load_templates
from realhf.aws.tasks.task import TIERS

BLANK = "…"
_RUN_TIME = re.compile(r"\$\{setup[^}]*\}")


def catalog() -> list[dict[str, Any]]:
    """List the tasks, easiest first: ``task_id``, ``tier``, ``description`` with an ellipsis for what only a seed or a
    set-up tells, ``held_out``. Names of templates are left out: they would reveal the answer."""
    found = []
    for template in load_templates():
        blank = _RUN_TIME.sub(BLANK, fill(template.descriptions[0], dict.fromkeys(template.params, BLANK)))
        found.append(
            {
                "task_id": template.task_id,
                "tier": template.tier,
                "description": blank,
                "held_out": template.split == "heldout",
            }
        )
    return sorted(found, key=lambda task: (TIERS.index(task["tier"]), task["task_id"]))
