"""Corrects for tokens that were sampled by a policy other than the one the clip is centred on.

All tensors are fp32 over the predicted tokens of a microbatch, (n,), without gradient. Positions outside ``mask`` may
hold anything, NaN included.

Source: docs/reference/dataflow.md 10.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.losses import LossTerms, exponential
from realhf.algorithms.policy_gradient.options import ResolvedOptions


@dataclass(frozen=True)
class BehaviourWeight:
    """Holds ``weight`` (n,), which multiplies token losses and is 1 outside the mask, and how it came about.

    ``raw`` (n,) is the weight before any bound; ``bounded`` bool (n,) marks the tokens where a bound left the token out
    or cut its weight; ``clamped`` counts the exponents cut to +-20.
    """

    weight: Tensor
    raw: Tensor
    bounded: Tensor
    clamped: int


def behaviour_weight(terms: LossTerms, behaviour: Tensor, options: ResolvedOptions) -> BehaviourWeight:
    """Return each token's weight w: its proximal over its behaviour probability, ``terms.old`` being the proximal
    policy's. With ``behav_imp_weight_level=sequence`` w is the geometric mean over the sequence's trainable tokens.

    Outside [floor, cap] w is 0 (``mask``) or the bound itself (``truncate``, truncated importance sampling; Yao et al.
    2025). Source of the decoupled objective: Hilton et al. 2021; Fu et al. 2025, AReaL.
    """
    difference = torch.where(terms.mask, terms.old, 0.0) - torch.where(terms.mask, behaviour, 0.0)
    if options.behav_imp_weight_level == "sequence":
        difference = terms.sequence_mean(difference)
    raw, clamped = exponential(difference)
    if options.behav_imp_weight_level == "sequence":
        raw = raw[terms.sequence]
    raw = torch.where(terms.mask, raw, 1.0)
    cap, floor = options.behav_imp_weight_cap, options.behav_imp_weight_floor
    bounded = ((raw > cap) | (raw < floor)) & terms.mask
    if options.behav_imp_weight_mode == "mask":
        weight = torch.where(bounded, 0.0, raw)
    elif options.behav_imp_weight_mode == "truncate":
        weight = torch.where(terms.mask, raw.clamp(floor, cap), 1.0)
    else:
        weight, bounded = torch.ones_like(raw), torch.zeros_like(bounded)
    return BehaviourWeight(weight, raw, bounded, clamped)


def loglinear_proximal(current: Tensor, behaviour: Tensor, versions: Tensor, step: int) -> Tensor:
    """Interpolate the proximal log-probabilities without a forward pass, (n,).

    They lie on the line from the behaviour policy's (version v of each token) to the current ones (on the way from
    version u = ``step`` to u + 1), at (u - v) / (u + 1 - v). Where v >= u, or v = -1 (unknown), they are the behaviour
    policy's own.
    """
    lag = step - versions
    share = torch.where((lag > 0) & (versions >= 0), lag / (lag + 1).clamp(min=1), 0.0)
    return behaviour + share * (current - behaviour)
