"""Which sequences share a padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BATCH_TOKENS = 4096
"""Positions of one padded batch. More of them at once make nothing faster, on a CPU the caches make it slower."""
_MAX_PADDING = 0.1
_SMALL = BATCH_TOKENS // 4
"""A batch of so few positions may have more padding: it costs less than another pass."""


def padded_batches(members: Sequence[int], lengths: np.ndarray, most: int = BATCH_TOKENS) -> list[list[int]]:
    """The sequences ``members``, from longest to shortest, cut where a batch would have more than ``most`` positions or
    too much of it would be padding. ``lengths`` int64 (n,) are those of all sequences; one that is longer than ``most``
    is a batch of its own. Deterministic."""
    batches: list[list[int]] = []
    for i in sorted(members, key=lambda i: (-lengths[i], i)):
        current = batches[-1] if batches else []
        if current:
            positions = padded_size([*current, i], lengths)
            padding = positions - int(lengths[current].sum()) - int(lengths[i])
            if positions <= most and (padding <= _MAX_PADDING * positions or positions <= _SMALL):
                current.append(i)
                continue
        batches.append([i])
    return batches


def padded_size(batch: Sequence[int], lengths: np.ndarray) -> int:
    """Positions of a batch whose first sequence is its longest."""
    return int(lengths[batch[0]]) * len(batch)
