"""Policy losses: token losses, KL estimators and importance weights of off-policy tokens.

All tensors are fp32 and packed over the predicted tokens of a microbatch, (n,). Positions outside
``mask`` may hold any value, NaN included: they change neither the loss nor the gradient. The
formulas are in docs/reference/dataflow.md 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from realhf.algorithms.options import ResolvedOptions
from realhf.algorithms.train_step import (
    CE,
    KL,
    RL,
    WEIGHT_SUMS,
    PredictedTokens,
    component_mask,
    component_sum,
)
from realhf.api.keys import UNMASKED_LOGPROBS
from realhf.api.model import ForwardOutputs
from realhf.api.sample import SequenceSample

ADVANTAGES = "advantages"
"""Key of the advantage of every predicted token, f32 (L-1)."""
PROXIMAL = "proximal_logprobs"
"""Key of the log-probabilities under the proximal policy, f32 (L-1)."""
MISMATCH = "mismatch"
"""Key under which the loss keeps |behaviour - current log-probability| of every token."""
CURRENT = "current"
"""Key under which the loss keeps the current log-probability of every token."""
RATIO = "ratio"
"""Key under which the loss keeps the policy ratio of every token."""
CLIPPED = "clipped"
"""Key under which the loss keeps whether a clip determined each token's loss (1) or not (0)."""
_MAX_EXPONENT = 20.0
"""Log-ratios are clamped to +-20 before exp(), so that a large mismatch between the
log-probabilities of generator and trainer gives a ratio of at most 4.9e8. Far from the fp32 limit
(exp(88)), its products with advantages and its square stay finite."""
MAX_KL = 10.0
"""Bound of a token's KL divergence in rewards and statistics, nats."""


def cross_entropy(outputs: ForwardOutputs, logprobs: Tensor, part: SequenceSample) -> Tensor:
    """Return -log p of every token at the sampling temperature, (n,)."""
    del outputs, part
    return -logprobs


TOKEN_TERMS: Mapping[str, Callable[[ForwardOutputs, Tensor, SequenceSample], Tensor]] = (
    MappingProxyType({CE: cross_entropy})
)
"""Additional loss terms by their keys in ``COMPONENTS``. Each function takes the outputs of the
forward pass, the log-probabilities of the tokens (n,) and the microbatch, and returns the loss of
every token, (n,). The policy loss and the KL to the reference are not among them."""


class PolicyObjective:
    """``LossFn`` of the minibatches of one train step.

    Reads ``packed_logprobs``, ``advantages`` and ``loss_weights`` of each microbatch and, depending
    on the options, ``packed_ref_logprobs``, ``proximal_logprobs`` and ``packed_versions``. Tokens
    that were sampled under a mask have the probabilities ``packed_logprobs`` with it, by which the
    behaviour weights divide, and ``unmasked_logprobs`` without it, which are those of the policy at
    sampling: the proximal policy and the mismatch are compared with these. The loss
    is the sum of the components in ``COMPONENTS``, each summed over its tokens with its weights.
    Without ``proximal_logprobs`` the detached current log-probabilities replace them: they are
    equal before the first update of the step.

    Keeps ``MISMATCH``, |behaviour - current| of the trained tokens and 0 elsewhere. If ``recorded``
    it also keeps ``CURRENT`` (0 outside the mask), ``RATIO`` and ``CLIPPED``.

    Args:
        options: The resolved options of the policy gradient.
        step: Number u of the train step, also the version of the weights before its first update.
        temperature: Sampling temperature; the logits are divided by it.
        recorded: Whether to keep the values that the trace of a train step stores.
    """

    def __init__(
        self,
        options: ResolvedOptions,
        step: int,
        temperature: float = 1.0,
        *,
        recorded: bool = False,
    ) -> None:
        self._options = options
        self._step = step
        self._temperature = temperature
        self._recorded = recorded
        self._token_loss = options.token_loss()

    def __call__(
        self, outputs: ForwardOutputs, part: SequenceSample
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a microbatch (scalar) and the sums of its statistics over tokens."""
        options = self._options
        tokens = PredictedTokens.from_sample(part)
        logprobs, entropy = outputs.logprobs(
            temperature=self._temperature, with_entropy=options.entropy_coef != 0
        )
        device = logprobs.device
        mask = component_mask(part, RL, tokens.mask.to(device))
        behaviour_logprobs = part["packed_logprobs"].to(device)
        sampled_logprobs = policy_at_sampling(part).to(device)
        old_logprobs = behaviour_logprobs
        if options.prox_logp_method is not None:
            old_logprobs = self._proximal_logprobs(part, logprobs.detach(), sampled_logprobs)
        terms = LossTerms(
            logprobs,
            old_logprobs,
            part[ADVANTAGES].to(device),
            mask,
            tokens.sequence.to(device),
            tokens.n_sequences,
        )
        policy: TokenLoss = self._token_loss(terms, options)
        mismatch = _compute_mismatch(terms, sampled_logprobs)
        outputs.keep(MISMATCH, mismatch)
        if self._recorded:
            outputs.keep(CURRENT, torch.where(mask, logprobs.detach(), 0.0))
            outputs.keep(RATIO, policy.ratio)
            outputs.keep(CLIPPED, policy.clipped | policy.dual_clipped)
        stats = _policy_statistics(terms, policy, sampled_logprobs, mismatch)
        token_losses = policy.loss
        if options.use_decoupled_loss:
            correction = behaviour_weight(terms, behaviour_logprobs, options)
            token_losses = token_losses * correction.weight
            _add_weight_statistics(stats, correction, terms, options)
        total = component_sum(token_losses, part, RL)
        for key, term in TOKEN_TERMS.items():
            if key in part.keys:
                term_loss = component_sum(term(outputs, logprobs, part), part, key)
                stats[f"loss_{key.removesuffix('_weights')}"] = float(term_loss.detach())
                total = total + term_loss
        if "packed_ref_logprobs" in part.keys:
            total = total + self._reference_loss(part, logprobs, mask, stats)
        if entropy is not None:
            total = total - options.entropy_coef * component_sum(entropy, part, RL)
            stats["entropy"] = float(torch.where(mask, entropy.detach(), 0.0).sum())
        return total, stats

    def _proximal_logprobs(self, part: SequenceSample, current: Tensor, sampled: Tensor) -> Tensor:
        """Return the log-probabilities under the proximal policy, (n,). ``sampled`` are those under
        the policy that sampled, without token masks."""
        if self._options.prox_logp_method == "loglinear":
            versions = part["packed_versions"].to(current.device)
            return loglinear_proximal(current, sampled, versions, self._step)
        return part[PROXIMAL].to(current.device) if PROXIMAL in part.keys else current

    def _reference_loss(
        self, part: SequenceSample, logprobs: Tensor, mask: Tensor, stats: dict[str, float]
    ) -> Tensor:
        """Return the KL term of the loss, 0 if the loss has none (``kl_loss_coef=0``).

        Adds the k3 estimate of the KL to the reference, summed over the trained tokens, and the
        number of tokens whose estimate reached ``MAX_KL`` to ``stats``.
        """
        # The KL term may apply to tokens without an advantage; the statistics are over trained
        # tokens.
        kl_mask = (
            component_mask(part, KL, PredictedTokens.from_sample(part).mask.to(mask.device)) | mask
        )
        ref_logprobs = torch.where(kl_mask, part["packed_ref_logprobs"].to(mask.device), 0.0)
        current_logprobs = torch.where(kl_mask, logprobs, 0.0)
        kl_of_trained = torch.where(
            mask, kl_estimate(current_logprobs.detach(), ref_logprobs, "k3"), 0.0
        )
        stats["kl_ref"] = float(kl_of_trained.sum())
        stats["kl_ref_clamped_fraction"] = float((kl_of_trained >= MAX_KL).sum())
        if self._options.kl_loss_coef == 0:
            return torch.zeros((), device=mask.device)
        kl, n_clamped = kl_penalty(current_logprobs, ref_logprobs, self._options.kl_estimator)
        stats["clamped_exponents"] += n_clamped
        return self._options.kl_loss_coef * component_sum(kl, part, KL)


def policy_at_sampling(sample: SequenceSample) -> Tensor:
    """Return the log-probabilities of the tokens under the policy that sampled them, f32 (L-1),
    without the token masks under which it did."""
    key = UNMASKED_LOGPROBS if UNMASKED_LOGPROBS in sample.keys else "packed_logprobs"
    return sample[key]


def _compute_mismatch(terms: LossTerms, behaviour: Tensor) -> Tensor:
    """Return |behaviour - current log-probability|, (n,), 0 outside the mask.

    It measures how much the generation engine and the trainer disagree about a token, so
    ``behaviour`` are log-probabilities without token masks, as the trainer's are.
    """
    behaviour = torch.where(terms.mask, behaviour, 0.0)
    return (behaviour - torch.where(terms.mask, terms.logprobs.detach(), 0.0)).abs()


def _policy_statistics(
    terms: LossTerms, policy: TokenLoss, behaviour: Tensor, mismatch: Tensor
) -> dict[str, float]:
    """Sum the statistics of the policy loss over the trained tokens of a microbatch."""
    mask = terms.mask
    behaviour = torch.where(mask, behaviour, 0.0)
    current = torch.where(mask, terms.logprobs.detach(), 0.0)
    return {
        "mismatch_kl": float(kl_estimate(behaviour, current, "k3").double().sum()),
        "mismatch_abs": float(mismatch.double().sum()),
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
    """Add the statistics of the behaviour weights to ``stats``.

    These are ``behav_weight_mean`` (sum of the weights as used), ``behav_weight_max`` (before any
    bound), the number of tokens that a bound rejected (``rejected_fraction``) or truncated
    (``truncated_fraction``), and the sums in ``WEIGHT_SUMS``. Sums and counts become means and
    fractions in ``train_step.summary``.
    """
    mask = terms.mask
    stats["behav_weight_mean"] = float(torch.where(mask, correction.weight, 0.0).double().sum())
    stats["behav_weight_max"] = float(correction.raw[mask].max()) if bool(mask.any()) else 0.0
    stats["clamped_exponents"] += correction.clamped
    by_sequence = (
        options.behav_imp_sequence_cap is not None or options.behav_imp_sequence_floor is not None
    )
    if options.behav_imp_weight_mode == "mask" or by_sequence:
        stats["rejected_fraction"] = float(correction.rejected.sum())
    if options.behav_imp_weight_mode == "truncate":
        stats["truncated_fraction"] = float(correction.truncated.sum())
    if options.behav_imp_weight_mode != "none" or by_sequence:
        stats |= _weight_sums(terms, correction, options.behav_imp_weight_level)


def _weight_sums(terms: LossTerms, correction: BehaviourWeight, level: str) -> dict[str, float]:
    """Return the values of ``WEIGHT_SUMS`` for a microbatch.

    The behaviour weights are counted and summed per token for ``level`` token, else per sequence.
    """
    zeros = torch.zeros(terms.n_sequences, dtype=torch.float64, device=terms.mask.device)
    owner = terms.sequence[terms.mask]
    n_tokens = zeros.index_add(0, owner, torch.ones_like(owner, dtype=torch.float64))
    n_kept = zeros.index_add(0, owner, (~correction.rejected)[terms.mask].double())
    weights = correction.weight[terms.mask].double()
    if level != "token":
        # All tokens of a sequence carry the same weight: scatter leaves one of them per sequence.
        weights = zeros.scatter(0, owner, weights)[n_tokens > 0]
    has_tokens = n_tokens > 0
    sums = (
        len(weights),
        weights.sum(),
        weights.square().sum(),
        has_tokens.sum(),
        (has_tokens & (n_kept == 0)).sum(),
    )
    return dict(zip(WEIGHT_SUMS, map(float, sums), strict=True))


@dataclass(frozen=True)
class LossTerms:
    """Inputs of a policy loss."""

    logprobs: Tensor
    """Current log-probabilities, f32 (n,), with a gradient."""
    old: Tensor
    """Log-probabilities under the policy in the denominator of the ratio, f32 (n,): the behaviour
    policy or the proximal policy."""
    advantages: Tensor
    """Advantages, f32 (n,)."""
    mask: Tensor
    """Which tokens train, bool (n,)."""
    sequence: Tensor
    """Index of the sequence of each position in [0, n_sequences), i64 (n,)."""
    n_sequences: int
    """Number of sequences of the microbatch."""

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` over each sequence's trained tokens, (n_sequences,).

        ``values`` (n,) are 0 outside the mask.
        """
        zeros = values.new_zeros(self.n_sequences)
        count = zeros.index_add(0, self.sequence, self.mask.to(values.dtype))
        return self.sequence_sum(values) / count.clamp(min=1)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` (n,), 0 outside the mask, over each sequence,
        (n_sequences,)."""
        return values.new_zeros(self.n_sequences).index_add(0, self.sequence, values)


@dataclass(frozen=True)
class TokenLoss:
    """Result of a policy loss."""

    loss: Tensor
    """Loss of every token, f32 (n,), 0 outside the mask."""
    ratio: Tensor
    """Policy ratio of every token, f32 (n,), without gradient, 1 outside the mask."""
    clipped: Tensor
    """Whether the clip of the ratio determines the loss, bool (n,)."""
    dual_clipped: Tensor
    """Whether the dual clip determines the loss, bool (n,)."""
    clamped: int
    """Number of positions whose log-ratio was clamped to +-20."""


def ppo_loss(terms: LossTerms, options: ResolvedOptions) -> TokenLoss:
    """Return the clipped surrogate loss max(-A rho, -A clip(rho)), at most ``c_clip`` |A|.

    The bound ``c_clip`` is the dual clip, which binds only for A < 0. With ``ratio=sequence`` rho
    is the length-normalised sequence ratio (GSPO, Zheng et al. 2025).
    """
    ratio, clamped = policy_ratio(terms, options.ratio)
    advantages = torch.where(terms.mask, terms.advantages, 0.0)
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - options.eps_clip, 1 + options.eps_clip_higher)
    loss = torch.maximum(unclipped_loss, clipped_loss)
    is_clipped = (clipped_loss > unclipped_loss) & terms.mask
    is_dual_clipped = torch.zeros_like(terms.mask)
    if options.c_clip is not None:
        bound = options.c_clip * advantages.abs()
        is_dual_clipped = (loss > bound) & (advantages < 0)
        loss = torch.where(is_dual_clipped, bound, loss)
    return TokenLoss(
        torch.where(terms.mask, loss, 0.0), ratio.detach(), is_clipped, is_dual_clipped, clamped
    )


def cispo_loss(terms: LossTerms, options: ResolvedOptions) -> TokenLoss:
    """Return -stop_gradient(clip(rho)) A log pi (CISPO, MiniMax-M1 2025).

    Only the weight is clipped, so every token keeps a gradient.
    """
    ratio, clamped = policy_ratio(terms, options.ratio)
    ratio = ratio.detach()
    weight = ratio.clamp(1 - options.eps_clip, 1 + options.eps_clip_higher)
    advantages = torch.where(terms.mask, terms.advantages, 0.0)
    loss = -weight * advantages * torch.where(terms.mask, terms.logprobs, 0.0)
    return TokenLoss(
        loss, ratio, (weight != ratio) & terms.mask, torch.zeros_like(terms.mask), clamped
    )


def reinforce_loss(terms: LossTerms, options: ResolvedOptions) -> TokenLoss:
    """Return -A log pi. The ratio is only reported."""
    ratio, clamped = policy_ratio(terms, "token")
    advantages = torch.where(terms.mask, terms.advantages, 0.0)
    loss = -advantages * torch.where(terms.mask, terms.logprobs, 0.0)
    never_clipped = torch.zeros_like(terms.mask)
    return TokenLoss(loss, ratio.detach(), never_clipped, never_clipped, clamped)


def policy_ratio(terms: LossTerms, level: str) -> tuple[Tensor, int]:
    """Return the ratio of current to old probability, (n,), and the number of clamped log-ratios.

    The ratio is 1 outside the mask. Level ``token``: exp(logprob - old). Level ``sequence``: the
    value is the geometric mean over the sequence, the gradient that of the token's own
    log-probability.
    """
    log_ratio = torch.where(terms.mask, terms.logprobs, 0.0) - torch.where(
        terms.mask, terms.old, 0.0
    )
    if level == "token":
        return exponential(log_ratio)
    sequence_ratio, clamped = exponential(terms.sequence_mean(log_ratio.detach()))
    # exp(x - stop_gradient(x)) is 1 with the gradient of x: it attaches the token's gradient to the
    # value.
    ratio = (
        torch.where(terms.mask, sequence_ratio[terms.sequence], 1.0)
        * (log_ratio - log_ratio.detach()).exp()
    )
    return ratio, clamped


def exponential(exponent: Tensor) -> tuple[Tensor, int]:
    """Return exp of the exponent clamped to +-20, and the number of clamped entries."""
    n_clamped = int((exponent.detach().abs() > _MAX_EXPONENT).sum())
    return exponent.clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp(), n_clamped


def kl_penalty(a: Tensor, b: Tensor, estimator: str) -> tuple[Tensor, int]:
    """Return the k2 or k3 estimate of KL(a, b) as a loss term, (n,), and the number of clamped
    exponents.

    Unlike in ``kl_estimate`` the value is not clamped: a clamped value has no gradient, while a
    loss has to pull a token back more strongly the further its probability is below the reference.
    Beyond a log-ratio of 20, k3 continues linearly.
    """
    x = a - b
    if estimator == "k2":
        return 0.5 * x.square(), 0
    if estimator != "k3":
        raise ValueError(f"KL estimator {estimator!r} cannot be a penalty in the loss")
    exponent = -x
    limited = exponent.clamp(max=_MAX_EXPONENT)
    excess = exponent - limited
    # First-order expansion around the limit: exp(limit + excess) ~ exp(limit) * (1 + excess). It
    # keeps the gradient exp(limit), which exp of the clamped exponent alone would lose.
    return limited.exp() * (1 + excess) - 1 + x, int((excess.detach() > 0).sum())


def kl_estimate(a: Tensor, b: Tensor, estimator: str) -> Tensor:
    """Return an estimate of KL(a, b) in nats at tokens drawn from a, (n,), for rewards and
    statistics.

    ``a`` and ``b`` are log-probabilities. With x = a - b: k1 is x, k2 is x^2 / 2, k3 is
    exp(-x) - 1 + x; all are clamped to +-10. Source: Schulman 2020, Approximating KL divergence.
    """
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
    """Importance weights of the decoupled objective: proximal over behaviour probability."""

    weight: Tensor
    """Weight that multiplies the loss of each token, f32 (n,), 1 outside the mask."""
    raw: Tensor
    """Weight before any bound, f32 (n,)."""
    rejected: Tensor
    """Tokens that a bound excluded (weight 0), bool (n,)."""
    truncated: Tensor
    """Tokens whose weight was truncated to a bound, bool (n,)."""
    clamped: int
    """Number of log-ratios that were clamped to +-20."""


def behaviour_weight(
    terms: LossTerms, behaviour: Tensor, options: ResolvedOptions
) -> BehaviourWeight:
    """Return the weight w of every token: its proximal over its behaviour probability.

    ``terms.old`` are the log-probabilities under the proximal policy, ``behaviour`` those under the
    behaviour policy, f32 (n,). With ``behav_imp_weight_level=sequence`` w is the geometric mean
    over the trained tokens of the sequence, with ``product`` their product.

    Outside [floor, cap] w is 0 (mode ``mask``, masked importance sampling) or the bound itself
    (mode ``truncate``, truncated importance sampling; Yao et al. 2025). All tokens of a sequence
    whose geometric mean is outside the sequence bounds get 0 in every mode (Liu et al. 2025).
    Source of the decoupled objective: Hilton et al. 2021; Fu et al. 2025, AReaL.
    """
    mask = terms.mask
    level = options.behav_imp_weight_level
    log_ratio = torch.where(mask, terms.old, 0.0) - torch.where(mask, behaviour, 0.0)
    sequence_mean = terms.sequence_mean(log_ratio)
    exponent = {"sequence": sequence_mean, "product": terms.sequence_sum(log_ratio)}.get(
        level, log_ratio
    )
    raw, clamped = exponential(exponent)
    raw = torch.where(mask, raw if level == "token" else raw[terms.sequence], 1.0)
    cap = options.behav_imp_weight_cap
    floor = options.behav_imp_weight_floor
    out_of_bounds = ((raw > cap) | (raw < floor)) & mask
    weight = torch.ones_like(raw)
    rejected = torch.zeros_like(mask)
    truncated = torch.zeros_like(mask)
    if options.behav_imp_weight_mode == "mask":
        weight = raw
        rejected = out_of_bounds
    elif options.behav_imp_weight_mode == "truncate":
        weight = torch.where(mask, raw.clamp(floor, cap), 1.0)
        truncated = out_of_bounds
    sequence_floor = options.behav_imp_sequence_floor
    sequence_cap = options.behav_imp_sequence_cap
    sequence_rejected = torch.zeros_like(sequence_mean, dtype=torch.bool)
    if sequence_floor is not None:
        sequence_rejected |= sequence_mean < math.log(sequence_floor)
    if sequence_cap is not None:
        sequence_rejected |= sequence_mean > math.log(sequence_cap)
    rejected = rejected | (sequence_rejected[terms.sequence] & mask)
    return BehaviourWeight(
        torch.where(rejected, 0.0, weight), raw, rejected, truncated & ~rejected, clamped
    )


def loglinear_proximal(current: Tensor, behaviour: Tensor, versions: Tensor, step: int) -> Tensor:
    """Return interpolated proximal log-probabilities, (n,), which need no forward pass.

    Each lies on the line from the token's behaviour log-probability (weight version v) to its
    current one (between version u = ``step`` and u + 1), at the fraction (u - v) / (u + 1 - v).
    Where v >= u, or v is unknown (-1), it is the behaviour log-probability.
    """
    lag = step - versions
    fraction = torch.where((lag > 0) & (versions >= 0), lag / (lag + 1).clamp(min=1), 0.0)
    return behaviour + fraction * (current - behaviour)
