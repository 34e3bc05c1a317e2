"""What a train step is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from realhf.api.config.option import option


@dataclass
class DatasetConfig:
    """Samples and where they come from."""

    train_bs_n_seqs: int = option(
        16, "A train step takes this many samples: groups of a task, or supervised episodes.", at_least=1
    )
    curriculum: str = option("learnability", "This rule draws the tasks.", choices=("learnability", "priority"))
    group_success: str = option(
        "fraction",
        "To the curriculum, a group counts as the fraction of its rollouts that achieved the task, or as whether any "
        "did.",
        choices=("fraction", "any"),
    )
    priority: dict[str, Any] = option(
        {},
        "These constants of the priority curriculum differ from its preset (key 'preset': standard or slow).",
    )
