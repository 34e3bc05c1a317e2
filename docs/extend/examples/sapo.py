"""SAPO: the ratio passes through a smooth gate in the place of a clip (Gao et al. 2025, Soft Adaptive Policy
Optimization)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from realhf.api.algorithm import Algorithm
from realhf.api.option import option


@dataclass
class SapoOptions:
    """A token with ratio r weighs its advantage by sigmoid(t (r - 1)) 4 / t, t being one of two temperatures."""

    tau_positive: float = option(1.0, "The temperature of tokens with an advantage above 0.", above=0, at_most=100)
    tau_negative: float = option(
        1.05,
        "That of all others: the larger, the sooner a token off its old policy stops to count.",
        above=0,
        at_most=100,
    )


def soft_gate(terms: Any, ppo: Any, own: SapoOptions) -> Any:
    """Return -A sigmoid(t (ratio - 1)) 4 / t."""
    import torch

    from realhf.algorithms.policy_loss import TokenLoss, policy_ratio

    ratio, clamped = policy_ratio(terms, "token")
    advantages = torch.where(terms.mask, terms.advantages, 0.0)
    tau = torch.where(advantages > 0, own.tau_positive, own.tau_negative)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    nowhere = torch.zeros_like(terms.mask)
    return TokenLoss(-advantages * gate, ratio.detach(), nowhere, nowhere, clamped)


SAPO = Algorithm(loss=soft_gate, options=SapoOptions)
