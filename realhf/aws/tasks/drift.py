"""Chooses drifts: after set-up, a few of a task's possible changes really happen, and have to be found and undone.

Source: docs/reference/environment.md 7 (Drift).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

from realhf.aws.tasks.task import SetupCommand

T = TypeVar("T")
FEWEST, MOST = 2, 3


def choose_drifts(possible: Sequence[T], seed: int) -> list[T]:
    """Choose two or three of them (fewer where there are not so many), in their order, decided by ``seed``."""
    rng = random.Random(f"drift:{seed}")
    count = min(rng.randint(FEWEST, MOST), len(possible))
    return [possible[i] for i in sorted(rng.sample(range(len(possible)), count))]


def repairs(drifts: Iterable[SetupCommand]) -> list[str]:
    """Return the commands that undo these drifts, in their order."""
    return [command for drift in drifts for command in drift.repair]
