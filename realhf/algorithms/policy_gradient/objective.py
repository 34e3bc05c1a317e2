"""Computes the loss of a minibatch of the policy-gradient step, microbatch by microbatch
(docs/reference/dataflow.md 10)."""

from __future__ import annotations

import torch
from torch import Tensor

from realhf.algorithms.aggregation import weighted_sum
from realhf.algorithms.policy_gradient.behaviour_weight import BehaviourWeight, behaviour_weight, loglinear_proximal
from realhf.algorithms.policy_gradient.losses import MAX_KL, LossTerms, TokenLoss, kl_estimate, kl_penalty
from realhf.algorithms.policy_gradient.options import ResolvedOptions
from realhf.algorithms.sequences import PredictedTokens
from realhf.api.model import ForwardOutputs
from realhf.api.sample import SequenceSample
from realhf.builtins import policy_losses

ADVANTAGES, WEIGHTS, PROXIMAL = "advantages", "loss_weights", "proximal_logprobs"
MISMATCH = "mismatch"
CURRENT, RATIO, CLIPPED = "current", "ratio", "clipped"


class PolicyObjective:
    """Is the ``LossFn`` of one minibatch of train step ``step`` (u).

    It reads ``packed_logprobs``, ``advantages`` and ``loss_weights`` of each microbatch, and as the options ask
    ``packed_ref_logprobs``, ``proximal_logprobs`` and ``packed_versions``. Without ``proximal_logprobs`` the current
    log-probabilities stand for them: before any update of the step they are the same. Logits are divided by
    ``temperature``, that of sampling.

    It keeps ``MISMATCH``: |behaviour - current| of the trained tokens, 0 elsewhere; and where it is ``recorded`` also
    ``CURRENT`` log-probabilities (0 outside the mask), ``RATIO`` and ``CLIPPED`` (1 where a clip decides).
    """

    def __init__(
        self, options: ResolvedOptions, step: int, temperature: float = 1.0, *, recorded: bool = False
    ) -> None:
        self._options, self._step, self._temperature = options, step, temperature
        self._recorded = recorded
        self._loss = policy_losses.get(options.loss)

    def __call__(self, outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a microbatch and the sums of its statistics."""
        options, tokens = self._options, PredictedTokens.of(part)
        logprobs, entropy = outputs.logprobs(temperature=self._temperature, with_entropy=options.entropy_coef != 0)
        device = logprobs.device
        mask, weights = tokens.mask.to(device), part[WEIGHTS].to(device)
        behaviour = part["packed_logprobs"].to(device)
        old = behaviour if options.prox_logp_method is None else self._proximal(part, logprobs.detach(), behaviour)
        terms = LossTerms(
            logprobs, old, part[ADVANTAGES].to(device), mask, tokens.sequence.to(device), tokens.n_sequences
        )
        policy: TokenLoss = self._loss(terms, options)
        distance = _distance(terms, behaviour)
        outputs.keep(MISMATCH, distance)
        if self._recorded:
            outputs.keep(CURRENT, torch.where(mask, logprobs.detach(), 0.0))
            outputs.keep(RATIO, policy.ratio)
            outputs.keep(CLIPPED, policy.clipped | policy.dual_clipped)
        stats = _policy_statistics(terms, policy, behaviour, distance)
        losses = policy.loss
        if options.use_decoupled_loss:
            correction = behaviour_weight(terms, behaviour, options)
            losses = losses * correction.weight
            _add_weight_statistics(stats, correction, mask, options)
        total = weighted_sum(losses, weights, mask)
        if "packed_ref_logprobs" in part.keys:
            total = total + self._reference_loss(part, logprobs, mask, weights, stats)
        if entropy is not None:
            total = total - options.entropy_coef * weighted_sum(entropy, weights, mask)
            stats["entropy"] = float(torch.where(mask, entropy.detach(), 0.0).sum())
        return total, stats

    def _proximal(self, part: SequenceSample, current: Tensor, behaviour: Tensor) -> Tensor:
        if self._options.prox_logp_method == "loglinear":
            versions = part["packed_versions"].to(current.device)
            return loglinear_proximal(current, behaviour, versions, self._step)
        return part[PROXIMAL].to(current.device) if PROXIMAL in part.keys else current

    def _reference_loss(
        self, part: SequenceSample, logprobs: Tensor, mask: Tensor, weights: Tensor, stats: dict[str, float]
    ) -> Tensor:
        """Return the KL term of the loss (0 where the KL is in the reward), and add the sum of KL, and how many tokens
        enter it with the bound, to ``stats``."""
        ref = torch.where(mask, part["packed_ref_logprobs"].to(mask.device), 0.0)
        current = torch.where(mask, logprobs, 0.0)
        apart = kl_estimate(current.detach(), ref, "k3")
        stats["kl_ref"], stats["kl_ref_clamped_fraction"] = float(apart.sum()), float((apart >= MAX_KL).sum())
        if self._options.kl_loss_coef == 0:
            return torch.zeros((), device=mask.device)
        kl, cut = kl_penalty(current, ref, self._options.kl_estimator)
        stats["clamped_exponents"] += cut
        return self._options.kl_loss_coef * weighted_sum(kl, weights, mask)


def _distance(terms: LossTerms, behaviour: Tensor) -> Tensor:
    """Return |behaviour - current log-probability|, (n,), 0 outside the mask: engine and trainer disagree by that."""
    sampled = torch.where(terms.mask, behaviour, 0.0)
    return (sampled - torch.where(terms.mask, terms.logprobs.detach(), 0.0)).abs()


def _policy_statistics(terms: LossTerms, policy: TokenLoss, behaviour: Tensor, distance: Tensor) -> dict[str, float]:
    """Sum the statistics over the microbatch's trainable tokens."""
    mask = terms.mask
    sampled = torch.where(mask, behaviour, 0.0)
    current = torch.where(mask, terms.logprobs.detach(), 0.0)
    return {
        "mismatch_kl": float(kl_estimate(sampled, current, "k3").double().sum()),
        "mismatch_abs": float(distance.double().sum()),
        "ratio_mean": float(torch.where(mask, policy.ratio, 0.0).double().sum()),
        "ratio_max": float(policy.ratio[mask].max()) if bool(mask.any()) else 0.0,
        "clip_fraction": float(policy.clipped.sum()),
        "dual_clip_fraction": float(policy.dual_clipped.sum()),
        "clamped_exponents": float(policy.clamped),
        "n_trained_tokens": float(mask.sum()),
    }


def _add_weight_statistics(
    stats: dict[str, float], correction: BehaviourWeight, mask: Tensor, options: ResolvedOptions
) -> None:
    """Add ``behav_weight_mean`` of the weights used, ``behav_weight_max`` before any bound, and the fraction of tokens
    that the bounds left out (``rejected_fraction``) or cut (``truncated_fraction``)."""
    stats["behav_weight_mean"] = float(torch.where(mask, correction.weight, 0.0).double().sum())
    stats["behav_weight_max"] = float(correction.raw[mask].max()) if bool(mask.any()) else 0.0
    stats["clamped_exponents"] += correction.clamped
    name = {"mask": "rejected_fraction", "truncate": "truncated_fraction"}.get(options.behav_imp_weight_mode)
    if name is not None:
        stats[name] = float(correction.bounded.sum())
