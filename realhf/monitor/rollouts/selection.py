"""Chooses which samples of a run keep their rollouts, and which of these the details of their tokens.

The choice depends on the sample's id alone, so that all processes that see a sample make the same one without asking,
and a group is kept whole or not at all.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from realhf.api.config import ALL_ROLLOUTS, MonitorConfig

_RANGE = float(1 << 64)


@dataclass(frozen=True)
class Selection:
    """Keeps a ``share`` of all samples, and of a ``token_share`` of these also the tokens; both from 0 to 1."""

    share: float = 1.0
    token_share: float = 1.0

    def chooses(self, key: str) -> bool:
        """Return whether the sample with this key keeps its rollouts."""
        return self.share >= 1 or (self.share > 0 and _draw("rollout", key) < self.share)

    def with_tokens(self, key: str) -> bool:
        """Return whether a sample that was chosen keeps its tokens, too."""
        return self.token_share >= 1 or (self.token_share > 0 and _draw("tokens", key) < self.token_share)


def selection_of(config: MonitorConfig, *, n_seqs: int, group_size: int) -> Selection:
    """Return the choice that ``monitor.rollouts`` and ``monitor.rollout_tokens`` ask for, in steps of ``n_seqs``
    samples with ``group_size`` rollouts each. A number of rollouts is rounded up to whole groups."""
    if config.rollouts == ALL_ROLLOUTS:
        return Selection(1.0, config.rollout_tokens)
    groups = math.ceil(int(config.rollouts) / max(1, group_size))
    return Selection(min(1.0, groups / max(1, n_seqs)), config.rollout_tokens)


def _draw(purpose: str, key: str) -> float:
    """Return a number in [0, 1) that the two texts alone decide."""
    digest = hashlib.blake2b(f"{purpose}/{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / _RANGE
