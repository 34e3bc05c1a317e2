"""Computes outcome advantages: one number per response from the scores of its group (docs/reference/dataflow.md 10).

Every estimator takes ``scores`` f32 (n,), ``valid`` bool (n,) and ``group`` i64 (n,), the sample number of each
sequence, and returns f32 (n,). Invalid sequences enter no statistic and get exactly 0, whatever their score (NaN
included). Statistics are fp64 and per response, never weighted by tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = 1e-6


def grpo(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return (R - mean) / (unbiased std + 1e-6) within the group; exactly 0 when all valid scores are equal or fewer
    than two are valid. Source: Shao et al. 2024, DeepSeekMath."""
    score, stats = _group_statistics(scores, valid, group)
    centred = score - stats.mean[group]
    squares = torch.zeros_like(stats.mean).index_add(0, group, torch.where(valid, centred, 0.0).square())
    std = (squares / (stats.count - 1).clamp(min=1)).sqrt()
    return _finish(centred / (std[group] + _EPS), valid & stats.varied[group])


def grpo_nostd(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R - mean within the group. Source: Liu et al. 2025, Dr. GRPO."""
    score, stats = _group_statistics(scores, valid, group)
    return _finish(score - stats.mean[group], valid & stats.varied[group])


def rloo(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R minus the mean of the other valid responses of the group. Source: Ahmadian et al. 2024."""
    score, stats = _group_statistics(scores, valid, group)
    count = stats.count[group]
    others = (stats.mean[group] * count - score) / (count - 1).clamp(min=1)
    return _finish(score - others, valid & stats.varied[group])


def reinforce(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R minus the mean over all valid responses of the batch; exactly 0 when all are equal."""
    return grpo_nostd(scores, valid, torch.zeros_like(group))


def reinforce_pp(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R itself. ``return_to_go`` then gives the earlier tokens their share, and all are whitened over the batch.
    Source: Hu 2025, REINFORCE++."""
    score, _ = _group_statistics(scores, valid, group)
    return _finish(score, valid)


def reinforce_pp_baseline(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R minus the mean of the group; what follows is as in ``reinforce_pp``."""
    return grpo_nostd(scores, valid, group)


def gae(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R itself, the reward of an episode's last token; ``generalised`` (``gae.py``) then compares what follows
    each token with a critic's values."""
    return reinforce_pp(scores, valid, group)


def return_to_go(rewards: Tensor, mask: Tensor, sequence: Tensor, n_sequences: int, discount: float = 1.0) -> Tensor:
    """Sum discount^(s-t) r_s over s >= t within each sequence: f32 (n,), 0 outside ``mask``.

    Only positions in ``mask`` count, in the sum and in the distance s-t: text of the environment between two turns is
    skipped, not discounted. ``sequence`` i64 (n,) is sorted; ``rewards`` may hold anything outside the mask.
    """
    chosen = sequence[mask]
    count = torch.bincount(chosen, minlength=n_sequences)
    rank = torch.arange(len(chosen), device=chosen.device) - (count.cumsum(0) - count)[chosen]
    table = rewards.new_zeros(n_sequences, int(count.max()) if n_sequences else 0, dtype=torch.float64)
    table[chosen, rank] = rewards[mask].double()
    if discount == 1.0:
        table = table.flip(1).cumsum(1).flip(1)
    else:
        for t in range(table.shape[1] - 2, -1, -1):
            table[:, t] += discount * table[:, t + 1]
    out = torch.zeros_like(rewards, dtype=torch.float32)
    out[mask] = table[chosen, rank].float()
    return out


def at_last_token(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Put ``values`` (n sequences,) at the last position of each sequence inside ``mask``, and 0 elsewhere: (n,)."""
    positions = torch.arange(len(mask), device=mask.device)
    last = torch.full_like(values, -1, dtype=torch.int64)
    last = last.scatter_reduce(0, sequence, torch.where(mask, positions, -1), "amax")
    out = values.new_zeros(len(mask))
    has = last >= 0
    out[last[has]] = values[has]
    return out


def normalise(advantages: Tensor, mask: Tensor, eps: float = 1e-5) -> Tensor:
    """Whiten f32 (n,) over ``mask`` (bool): masked mean and biased std in fp64; 0 elsewhere."""
    if not bool(mask.any()):
        return torch.zeros_like(advantages)
    chosen = advantages[mask].double()
    std = (chosen - chosen.mean()).square().mean().sqrt()
    return _finish((advantages.double() - chosen.mean()) / (std + eps), mask)


class _GroupStatistics:
    """Holds the fp64 statistics (n groups,) of each group: ``count`` and ``mean`` of its valid scores, and ``varied``
    (bool), whether they differ."""

    def __init__(self, score: Tensor, valid: Tensor, group: Tensor) -> None:
        n_groups = int(group.max()) + 1 if len(group) else 0
        blank = torch.zeros(n_groups, dtype=torch.float64, device=score.device)
        self.count = blank.index_add(0, group, valid.double())
        self.mean = blank.index_add(0, group, score) / self.count.clamp(min=1)
        low = torch.where(valid, score, torch.inf)
        high = torch.where(valid, score, -torch.inf)
        lowest = torch.full_like(blank, torch.inf).scatter_reduce(0, group, low, "amin")
        highest = torch.full_like(blank, -torch.inf).scatter_reduce(0, group, high, "amax")
        self.varied = (self.count >= 2) & (highest > lowest)


def _group_statistics(scores: Tensor, valid: Tensor, group: Tensor) -> tuple[Tensor, _GroupStatistics]:
    """Return the scores in fp64 with 0 at invalid sequences, and the statistics. Raises ValueError when a valid score
    is not finite: a failure must be marked as one, not scored."""
    if not bool(torch.isfinite(scores[valid]).all()):
        raise ValueError("a valid sequence has a reward that is not finite")
    score = torch.where(valid, scores.double(), 0.0)
    return score, _GroupStatistics(score, valid, group)


def _finish(advantages: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, advantages, 0.0).float()
