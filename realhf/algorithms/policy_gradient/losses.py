"""Defines policy losses per token and KL estimators (docs/reference/dataflow.md 10).

All tensors are fp32 and packed over the predicted tokens of a microbatch, (n,). Positions outside ``mask`` may hold
anything, NaN included: they change neither loss nor gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.options import ResolvedOptions

_MAX_EXPONENT = 20.0
MAX_KL = 10.0
"""Bound of a token's KL divergence in rewards and statistics, nats."""


@dataclass(frozen=True)
class LossTerms:
    """Holds the inputs of a policy loss.

    ``logprobs`` has a gradient; ``old`` belongs to the policy that the ratio is taken against: the behaviour policy or
    the proximal one; ``sequence`` i64 (n,) numbers the sequence of each position, in [0, n_sequences).
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    sequence: Tensor
    n_sequences: int

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Average ``values`` (n,), 0 outside the mask, over each sequence's trainable tokens: (n_sequences,)."""
        blank = values.new_zeros(self.n_sequences)
        count = blank.index_add(0, self.sequence, self.mask.to(values.dtype))
        return blank.index_add(0, self.sequence, values) / count.clamp(min=1)


@dataclass(frozen=True)
class TokenLoss:
    """Holds the result of a policy loss: ``loss`` (n,), 0 outside the mask; ``ratio`` (n,) without gradient, 1 outside
    the mask; ``clipped`` and ``dual_clipped`` bool (n,), true where the clip decides the value; ``clamped``, the number
    of positions whose exponent was cut to +-20."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor
    clamped: int


def ppo_loss(terms: LossTerms, options: ResolvedOptions) -> TokenLoss:
    """Return max(-A rho, -A clip(rho)), at most ``c_clip`` |A| (the dual clip; it binds only for A < 0). With
    ``ratio=sequence`` rho is the length-normalised sequence ratio (GSPO, Zheng et al. 2025)."""
    ratio, clamped = policy_ratio(terms, options.ratio)
    advantages = torch.where(terms.mask, terms.advantages, 0.0)
    plain = -advantages * ratio
    clip = -advantages * ratio.clamp(1 - options.eps_clip, 1 + options.eps_clip_higher)
    loss = torch.maximum(plain, clip)
    clipped = (clip > plain) & terms.mask
    dual = torch.zeros_like(terms.mask)
    if options.c_clip is not None:
        bound = options.c_clip * advantages.abs()
        dual = (loss > bound) & (advantages < 0)
        loss = torch.where(dual, bound, loss)
    return TokenLoss(torch.where(terms.mask, loss, 0.0), ratio.detach(), clipped, dual, clamped)


def cispo_loss(terms: LossTerms, options: ResolvedOptions) -> TokenLoss:
    """Return -stop_gradient(clip(rho)) A log pi: weights are clipped, and no token loses its gradient (MiniMax-M1,
    2025)."""
    ratio, clamped = policy_ratio(terms, options.ratio)
    ratio = ratio.detach()
    weight = ratio.clamp(1 - options.eps_clip, 1 + options.eps_clip_higher)
    advantages = torch.where(terms.mask, terms.advantages, 0.0)
    loss = -weight * advantages * torch.where(terms.mask, terms.logprobs, 0.0)
    return TokenLoss(loss, ratio, (weight != ratio) & terms.mask, torch.zeros_like(terms.mask), clamped)


def reinforce_loss(terms: LossTerms, options: ResolvedOptions) -> TokenLoss:
    """Return -A log pi; the ratio is reported, not used."""
    ratio, clamped = policy_ratio(terms, "token")
    advantages = torch.where(terms.mask, terms.advantages, 0.0)
    loss = -advantages * torch.where(terms.mask, terms.logprobs, 0.0)
    nowhere = torch.zeros_like(terms.mask)
    return TokenLoss(loss, ratio.detach(), nowhere, nowhere, clamped)


def policy_ratio(terms: LossTerms, level: str) -> tuple[Tensor, int]:
    """Return the current over the behaviour probability, (n,), 1 outside the mask, and the number of clamped exponents.

    ``token``: exp(lp - old). ``sequence``: the value is the geometric mean of the sequence, the gradient that of the
    own token.
    """
    difference = torch.where(terms.mask, terms.logprobs, 0.0) - torch.where(terms.mask, terms.old, 0.0)
    if level == "token":
        return exponential(difference)
    value, clamped = exponential(terms.sequence_mean(difference.detach()))
    ratio = torch.where(terms.mask, value[terms.sequence], 1.0) * (difference - difference.detach()).exp()
    return ratio, clamped


def exponential(exponent: Tensor) -> tuple[Tensor, int]:
    """Return exp of the exponent cut to +-20, and how many were cut."""
    beyond = int((exponent.detach().abs() > _MAX_EXPONENT).sum())
    return exponent.clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp(), beyond


def kl_penalty(a: Tensor, b: Tensor, estimator: str) -> tuple[Tensor, int]:
    """Return k2 or k3 of ``kl_estimate`` as a term of the loss, (n,), and how many exponents were cut. Nothing else is:
    the further a token lies below the reference, the harder it is pulled back, where a clamped value has no gradient
    at all. Beyond an exponent of 20 the pull stays what it is there."""
    x = a - b
    if estimator == "k2":
        return 0.5 * x.square(), 0
    if estimator != "k3":
        raise ValueError(f"KL estimator {estimator!r} is no penalty in the loss")
    exponent = -x
    held = exponent.clamp(max=_MAX_EXPONENT)
    beyond = exponent - held
    return held.exp() * (1 + beyond) - 1 + x, int((beyond.detach() > 0).sum())


def kl_estimate(a: Tensor, b: Tensor, estimator: str) -> Tensor:
    """Estimate KL(a, b) at tokens drawn from a, for rewards and statistics. With x = log a - log b: k1 is x, k2 is
    x^2 / 2, k3 is exp(-x) - 1 + x; all are clamped to +-10. Source: Schulman 2020, Approximating KL divergence."""
    x = a - b
    if estimator == "k1":
        value = x
    elif estimator == "k2":
        value = 0.5 * x.square()
    elif estimator == "k3":
        value = (-x).clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp() - 1 + x
    else:
        raise ValueError(f"unknown KL estimator {estimator!r}")
    return value.clamp(-MAX_KL, MAX_KL)
