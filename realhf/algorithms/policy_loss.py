"""Computes the policy loss of a minibatch: token losses, KL estimators and the weight of off-policy tokens
(docs/reference/dataflow.md 10).

All tensors are fp32 and packed over the predicted tokens of a microbatch, (n,). Positions outside ``mask`` may hold
anything, NaN included: they change neither loss nor gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from realhf.algorithms.options import ResolvedOptions
from realhf.algorithms.train_step import CE, KL, RL, WEIGHT_SUMS, PredictedTokens, component_sum, counting
from realhf.api.model import ForwardOutputs
from realhf.api.sample import SequenceSample

ADVANTAGES, PROXIMAL = "advantages", "proximal_logprobs"
MISMATCH = "mismatch"
CURRENT, RATIO, CLIPPED = "current", "ratio", "clipped"


def cross_entropy(outputs: ForwardOutputs, logprobs: Tensor, part: SequenceSample) -> Tensor:
    """Return -log p of every token at the temperature of sampling, (n,)."""
    del outputs, part
    return -logprobs


TOKEN_TERMS: Mapping[str, Callable[[ForwardOutputs, Tensor, SequenceSample], Tensor]] = MappingProxyType(
    {CE: cross_entropy}
)
"""The terms beside the policy loss and the KL to the reference, by their keys in ``COMPONENTS``: what the forward pass
knows, the log-probabilities of the tokens and the micro-batch -> the loss of every token, (n,), which is added with the
weights of the component."""


class PolicyObjective:
    """Is the ``LossFn`` of one minibatch of train step ``step`` (u).

    It reads ``packed_logprobs``, ``advantages`` and ``loss_weights`` of each microbatch, and as the options ask
    ``packed_ref_logprobs``, ``proximal_logprobs`` and ``packed_versions``. The loss is the sum of the components of
    ``COMPONENTS``, each over the tokens that count in it with their weights. Without ``proximal_logprobs`` the current
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
        self._loss = options.token_loss()

    def __call__(self, outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a microbatch and the sums of its statistics."""
        options, tokens = self._options, PredictedTokens.of(part)
        logprobs, entropy = outputs.logprobs(temperature=self._temperature, with_entropy=options.entropy_coef != 0)
        device = logprobs.device
        mask = counting(part, RL, tokens.mask.to(device))
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
            _add_weight_statistics(stats, correction, terms, options)
        total = component_sum(losses, part, RL)
        for key, term in TOKEN_TERMS.items():
            if key in part.keys:
                added = component_sum(term(outputs, logprobs, part), part, key)
                stats[f"loss_{key.removesuffix('_weights')}"] = float(added.detach())
                total = total + added
        if "packed_ref_logprobs" in part.keys:
            total = total + self._reference_loss(part, logprobs, mask, stats)
        if entropy is not None:
            total = total - options.entropy_coef * component_sum(entropy, part, RL)
            stats["entropy"] = float(torch.where(mask, entropy.detach(), 0.0).sum())
        return total, stats

    def _proximal(self, part: SequenceSample, current: Tensor, behaviour: Tensor) -> Tensor:
        if self._options.prox_logp_method == "loglinear":
            versions = part["packed_versions"].to(current.device)
            return loglinear_proximal(current, behaviour, versions, self._step)
        return part[PROXIMAL].to(current.device) if PROXIMAL in part.keys else current

    def _reference_loss(self, part: SequenceSample, logprobs: Tensor, mask: Tensor, stats: dict[str, float]) -> Tensor:
        """Return the KL term of the loss (0 where the KL is in the reward), and add the sum of KL, and how many tokens
        enter it with the bound, to ``stats``."""
        held = counting(part, KL, PredictedTokens.of(part).mask.to(mask.device)) | mask
        ref = torch.where(held, part["packed_ref_logprobs"].to(mask.device), 0.0)
        current = torch.where(held, logprobs, 0.0)
        apart = torch.where(mask, kl_estimate(current.detach(), ref, "k3"), 0.0)
        stats["kl_ref"], stats["kl_ref_clamped_fraction"] = float(apart.sum()), float((apart >= MAX_KL).sum())
        if self._options.kl_loss_coef == 0:
            return torch.zeros((), device=mask.device)
        kl, cut = kl_penalty(current, ref, self._options.kl_estimator)
        stats["clamped_exponents"] += cut
        return self._options.kl_loss_coef * component_sum(kl, part, KL)


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
    stats: dict[str, float], correction: BehaviourWeight, terms: LossTerms, options: ResolvedOptions
) -> None:
    """Add ``behav_weight_mean`` of the weights used, ``behav_weight_max`` before any bound, the fraction of tokens that
    the bounds left out (``rejected_fraction``) or cut (``truncated_fraction``), and the sums that the effective sample
    size and the fraction of sequences left out are made of (``WEIGHT_SUMS``)."""
    mask = terms.mask
    stats["behav_weight_mean"] = float(torch.where(mask, correction.weight, 0.0).double().sum())
    stats["behav_weight_max"] = float(correction.raw[mask].max()) if bool(mask.any()) else 0.0
    stats["clamped_exponents"] += correction.clamped
    by_sequence = options.behav_imp_sequence_cap is not None or options.behav_imp_sequence_floor is not None
    if options.behav_imp_weight_mode == "mask" or by_sequence:
        stats["rejected_fraction"] = float(correction.rejected.sum())
    if options.behav_imp_weight_mode == "truncate":
        stats["truncated_fraction"] = float(correction.truncated.sum())
    if options.behav_imp_weight_mode != "none" or by_sequence:
        stats |= _weight_sums(terms, correction, options.behav_imp_weight_level)


def _weight_sums(terms: LossTerms, correction: BehaviourWeight, level: str) -> dict[str, float]:
    """Return the sums of the weights used and of their squares, over tokens or, above their level, over sequences; and
    how many sequences with a token there are, and are left out whole."""
    blank = torch.zeros(terms.n_sequences, dtype=torch.float64, device=terms.mask.device)
    owner = terms.sequence[terms.mask]
    tokens = blank.index_add(0, owner, torch.ones_like(owner, dtype=torch.float64))
    kept = blank.index_add(0, owner, (~correction.rejected)[terms.mask].double())
    used = correction.weight[terms.mask].double()
    if level != "token":
        used = blank.scatter(0, owner, used)[tokens > 0]
    found = (len(used), used.sum(), used.square().sum(), (tokens > 0).sum(), ((tokens > 0) & (kept == 0)).sum())
    return dict(zip(WEIGHT_SUMS, map(float, found), strict=True))


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
        return self.sequence_sum(values) / count.clamp(min=1)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Add ``values`` (n,), 0 outside the mask, up over each sequence: (n_sequences,)."""
        return values.new_zeros(self.n_sequences).index_add(0, self.sequence, values)


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


@dataclass(frozen=True)
class BehaviourWeight:
    """Holds ``weight`` (n,), which multiplies token losses and is 1 outside the mask, and how it came about.

    ``raw`` (n,) is the weight before any bound; ``rejected`` and ``truncated`` bool (n,) mark the tokens that a bound
    left out, or whose weight it cut; ``clamped`` counts the exponents cut to +-20.
    """

    weight: Tensor
    raw: Tensor
    rejected: Tensor
    truncated: Tensor
    clamped: int


def behaviour_weight(terms: LossTerms, behaviour: Tensor, options: ResolvedOptions) -> BehaviourWeight:
    """Return each token's weight w: its proximal over its behaviour probability, ``terms.old`` being the proximal
    policy's. With ``behav_imp_weight_level`` ``sequence`` w is the geometric mean over the sequence's trainable tokens,
    with ``product`` their product.

    Outside [floor, cap] w is 0 (``mask``, masked importance sampling) or the bound itself (``truncate``, truncated
    importance sampling; Yao et al. 2025). Tokens of a sequence whose geometric mean is outside the sequence's bounds
    have 0 in any case (Liu et al. 2025). Source of the decoupled objective: Hilton et al. 2021; Fu et al. 2025, AReaL.
    """
    mask, level = terms.mask, options.behav_imp_weight_level
    difference = torch.where(mask, terms.old, 0.0) - torch.where(mask, behaviour, 0.0)
    mean = terms.sequence_mean(difference)
    exponent = {"sequence": mean, "product": terms.sequence_sum(difference)}.get(level, difference)
    raw, clamped = exponential(exponent)
    raw = torch.where(mask, raw if level == "token" else raw[terms.sequence], 1.0)
    cap, floor = options.behav_imp_weight_cap, options.behav_imp_weight_floor
    outside, nowhere = ((raw > cap) | (raw < floor)) & mask, torch.zeros_like(mask)
    weight, rejected, truncated = torch.ones_like(raw), nowhere, nowhere
    if options.behav_imp_weight_mode == "mask":
        weight, rejected = raw, outside
    elif options.behav_imp_weight_mode == "truncate":
        weight, truncated = torch.where(mask, raw.clamp(floor, cap), 1.0), outside
    low, high = options.behav_imp_sequence_floor, options.behav_imp_sequence_cap
    far = torch.zeros_like(mean, dtype=torch.bool)
    if low is not None:
        far |= mean < math.log(low)
    if high is not None:
        far |= mean > math.log(high)
    rejected = rejected | (far[terms.sequence] & mask)
    return BehaviourWeight(torch.where(rejected, 0.0, weight), raw, rejected, truncated & ~rejected, clamped)


def loglinear_proximal(current: Tensor, behaviour: Tensor, versions: Tensor, step: int) -> Tensor:
    """Interpolate the proximal log-probabilities without a forward pass, (n,).

    They lie on the line from the behaviour policy's (version v of each token) to the current ones (on the way from
    version u = ``step`` to u + 1), at (u - v) / (u + 1 - v). Where v >= u, or v = -1 (unknown), they are the behaviour
    policy's own.
    """
    lag = step - versions
    share = torch.where((lag > 0) & (versions >= 0), lag / (lag + 1).clamp(min=1), 0.0)
    return behaviour + share * (current - behaviour)
