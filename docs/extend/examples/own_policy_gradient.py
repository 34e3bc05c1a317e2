"""A policy loss and an advantage of one's own, for the graph of GRPO on any environment."""

from __future__ import annotations

from typing import Any

from experiments.policy_gradient import Config, build, config_class
from realhf.api.algorithm import reads_clip_options
from realhf.registry import advantage_estimators, policy_losses

__all__ = ["Config", "build", "config_class"]


@policy_losses.register("soft_clip")
@reads_clip_options("ratio")
def soft_clip_loss(terms: Any, options: Any) -> Any:
    """Return -A tanh(ratio - 1): the further a token's ratio is from 1, the less it is moved; no hard clip."""
    import torch

    from realhf.algorithms.policy_loss import TokenLoss, policy_ratio

    ratio, clamped = policy_ratio(terms, options.ratio)
    advantages = torch.where(terms.mask, terms.advantages, 0.0)
    loss = torch.where(terms.mask, -advantages * torch.tanh(ratio - 1), 0.0)
    nowhere = torch.zeros_like(terms.mask)
    return TokenLoss(loss, ratio.detach(), nowhere, nowhere, clamped)


@advantage_estimators.register("above_median")
def above_median(scores: Any, valid: Any, group: Any) -> Any:
    """Return the score minus the median of the valid scores of its group: one lucky rollout makes no other worse."""
    import torch

    advantages = torch.zeros_like(scores)
    for number in group[valid].unique():
        members = valid & (group == number)
        advantages[members] = scores[members] - scores[members].quantile(0.5)
    return advantages
