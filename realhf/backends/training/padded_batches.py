"""Decides which rows share a pass: a padded batch, or a packed one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BATCH_TOKENS = 4096
"""Most positions of one padded batch where nobody says how many. A larger one is not faster, and on a CPU the caches
make it slower."""
_MAX_PADDING = 0.05
"""Share of a batch's positions that may be padding."""
SMALL = BATCH_TOKENS // 8
"""Number of positions up to which a batch may have more padding, because that costs less than another pass."""


def padded_batches(members: Sequence[int], lengths: np.ndarray, most: int | None = None) -> list[list[int]]:
    """Batch the rows ``members``, from longest to shortest.

    A batch ends where it would have more than ``most`` positions or too much of it would be padding. ``lengths`` int64
    (n,) are those of all rows; one that is longer than ``most`` is a batch of its own. Deterministic.
    """
    most = BATCH_TOKENS if most is None else most
    batches: list[list[int]] = []
    for i in sorted(members, key=lambda i: (-lengths[i], i)):
        current = batches[-1] if batches else []
        if current:
            positions = padded_size([*current, i], lengths)
            padding = positions - int(lengths[current].sum()) - int(lengths[i])
            if positions <= most and (padding <= _MAX_PADDING * positions or positions <= SMALL):
                current.append(i)
                continue
        batches.append([i])
    return batches


def packed_batches(members: Sequence[int], lengths: np.ndarray, most: int | None = None) -> list[list[int]]:
    """Batch the rows ``members``, from longest to shortest, where nothing is padded: a batch ends where it would have
    more than ``most`` positions. A row that is longer is a batch of its own. Deterministic."""
    most = BATCH_TOKENS if most is None else most
    batches: list[list[int]] = []
    room = 0
    for i in sorted(members, key=lambda i: (-lengths[i], i)):
        if not batches or lengths[i] > room:
            batches.append([])
            room = most
        batches[-1].append(i)
        room -= int(lengths[i])
    return batches


def padded_size(batch: Sequence[int], lengths: np.ndarray) -> int:
    """Return the positions of a batch whose first row is its longest."""
    return int(lengths[batch[0]]) * len(batch)
