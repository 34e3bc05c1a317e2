"""GMPO: the geometric mean of a sequence's ratios, each clipped by itself (Zhao et al. 2025, Geometric-Mean Policy
Optimization)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from realhf.api.algorithm import Algorithm
from realhf.api.option import option


@dataclass
class GmpoOptions:
    """A token's ratio is held within exp(-width) and exp(width) before the mean is taken."""

    width: float = option(0.4, "Log ratios are clipped at this distance from 0.", above=0, at_most=20)


def geometric_mean(terms: Any, ppo: Any, own: GmpoOptions) -> Any:
    """Return -A (product of the clipped ratios of the sequence) ^ (1 / tokens), the same for all its tokens: their mean
    is the loss of the sequence. A ratio is clipped where it has gone further the way that A pushes it."""
    import torch

    from realhf.algorithms.policy_loss import TokenLoss, exponential

    advantages = torch.where(terms.mask, terms.advantages, 0.0)
    log_ratio = torch.where(terms.mask, terms.logprobs, 0.0) - torch.where(terms.mask, terms.old, 0.0)
    push = torch.where(advantages < 0, -1.0, 1.0)
    held = push * (push * log_ratio).clamp(max=own.width)
    mean, clamped = exponential(terms.sequence_mean(held))
    ratio = torch.where(terms.mask, mean[terms.sequence], 1.0)
    clipped = (push * log_ratio > own.width) & terms.mask
    return TokenLoss(-advantages * ratio, ratio.detach(), clipped, torch.zeros_like(terms.mask), clamped)


GMPO = Algorithm(preset={"loss_agg": "seq_mean_token_mean"}, loss=geometric_mean, options=GmpoOptions)
