"""Computes the loss of a critic, micro-batch by micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from realhf.algorithms.aggregation import weighted_sum
from realhf.algorithms.sequences import PredictedTokens
from realhf.api.model import ForwardOutputs
from realhf.api.sample import SequenceSample

TARGETS, BEFORE, WEIGHTS = "returns", "values", "loss_weights"


def value_loss(predicted: Tensor, before: Tensor, target: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Return max((v - R)^2, (clip(v, v_old +- clip) - R)^2) / 2, f32 (n,), and where the clipped term decides, bool
    (n,); without ``clip`` the first term alone. Source: Schulman et al. 2017, the reference implementation of PPO.
    """
    plain = (predicted - target).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    held = (torch.minimum(torch.maximum(predicted, before - clip), before + clip) - target).square()
    return torch.maximum(plain, held) / 2, held > plain


class ValueObjective:
    """Is the ``LossFn`` of a minibatch: it reads ``returns`` and ``values`` (those predicted before the step), both in
    the units that the critic predicts in, and ``loss_weights``, all f32 (L-1). ``loss_mask`` chooses the positions."""

    def __init__(self, clip: float | None) -> None:
        self._clip = clip

    def __call__(self, outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a micro-batch and the sums of its statistics."""
        predicted = outputs.values()
        device = predicted.device
        mask = PredictedTokens.of(part).mask.to(device)
        target, before, weights = (part[key].to(device) for key in (TARGETS, BEFORE, WEIGHTS))
        losses, clipped = value_loss(predicted, before, target, self._clip)
        stats = {
            "value_clip_fraction": float((clipped & mask).sum()),
            "n_trained_tokens": float(mask.sum()),
        }
        return weighted_sum(losses, weights, mask), stats
