"""Advantages of the tokens of a batch from rewards and KL terms, and the KL controller.

All results depend only on the batch and the options, so that the calls of actor and critic, which
may run on different workers, each compute the same numbers without communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from realhf.algorithms.advantages import (
    Estimator,
    ValueEstimate,
    at_last_token,
    return_to_go,
    returns_by_turn,
    spread_over_tokens,
    step_advantages,
    step_groups,
    token_value_estimate,
    turn_advantages,
    turn_value_estimate,
)
from realhf.algorithms.inference import shape_rewards
from realhf.algorithms.options import PASS_AT_K, RETURN_TO_GO, ResolvedOptions
from realhf.algorithms.policy_loss import PROXIMAL, kl_estimate, policy_at_sampling
from realhf.algorithms.train_step import RL, PredictedTokens, component_mask, drop_first_tokens
from realhf.api.keys import FEEDBACK_RATIOS, ROLLOUT_KEY, TURN_KEYS
from realhf.api.sample import SequenceSample

_MAX_KL_ERROR = 0.2
"""Bound of the relative KL error in one update of the KL controller (Ziegler et al. 2019)."""
_REQUIRED_BY = MappingProxyType(
    {
        "packed_ref_logprobs": "a KL term (kl_ctl, kl_loss_coef)",
        "seq_no_eos_mask": "ppo.mask_too_long",
        "proximal_logprobs": "ppo.prox_logp_method=actor_inf (the call actor_inf computes it; "
        "or use recompute)",
        "packed_logprobs": "ppo.kl_ctl",
        "packed_versions": "ppo.prox_logp_method=loglinear",
        "teacher_logprobs": "ppo.distill_weight (the call teacher_inf computes it)",
        FEEDBACK_RATIOS: "ppo.feedback (the call feedback_inf computes it)",
        "values": "ppo.adv_estimator=gae (the call critic_inf computes it: experiment=ppo)",
        **dict.fromkeys(TURN_KEYS, "ppo.credit=turn, or a ppo.loss_agg by turn,"),
        TURN_KEYS[2]: "ppo.credit=state",
    }
)
"""For each optional key of a batch, the option that requires it."""


def require_keys(sample: SequenceSample, keys: Iterable[str]) -> None:
    """Raise ValueError naming the first missing key and the option that requires it."""
    for key in keys:
        if key not in sample.keys:
            raise ValueError(f"{_REQUIRED_BY[key]} needs the key {key}")


def apply_count_option(sample: SequenceSample, options: ResolvedOptions) -> SequenceSample:
    """Return the sample. With ``ppo.count=row`` its key ``rollout_index`` is removed, so that each
    sequence counts as a rollout."""
    by_row = options.count == "row" and ROLLOUT_KEY in sample.keys
    return sample.select(sample.keys - {ROLLOUT_KEY}) if by_row else sample


@dataclass(frozen=True)
class TrainedTokens:
    """Predicted tokens of a batch that are trained on rewards, and which of its sequences are
    valid."""

    tokens: PredictedTokens
    """Predicted tokens, with a mask that is True where rewards train the token (``RL``)."""
    valid: Tensor
    """Sequences with a reward, bool (n_sequences,)."""
    trainable: Tensor
    """Valid sequences, except those that ``mask_too_long`` excludes, bool (n_sequences,)."""

    @staticmethod
    def from_sample(sample: SequenceSample, options: ResolvedOptions) -> TrainedTokens:
        """Return the trained tokens of a batch.

        Reads ``loss_mask``, ``rl_weights``, ``outcome`` and, with ``mask_too_long``,
        ``seq_no_eos_mask``.
        """
        tokens = PredictedTokens.from_sample(sample)
        valid = valid_sequences(sample)
        trainable = valid & ~truncated_sequences(sample) if options.mask_too_long else valid
        mask = component_mask(sample, RL, tokens.mask & trainable[tokens.sequence])
        return TrainedTokens(replace(tokens, mask=mask), valid, trainable)


def valid_sequences(sample: SequenceSample) -> Tensor:
    """Return which sequences have a reward, bool (n_sequences,). Without the key ``outcome`` all
    do."""
    if "outcome" not in sample.keys:
        return torch.ones(len(sample["rewards"]), dtype=torch.bool)
    return sample["outcome"].cpu() == 0


def truncated_sequences(sample: SequenceSample) -> Tensor:
    """Return which sequences were cut off by a token limit, bool (n_sequences,).

    Raises ValueError without the key ``seq_no_eos_mask``.
    """
    require_keys(sample, ("seq_no_eos_mask",))
    return sample["seq_no_eos_mask"].cpu().bool()


def token_advantages(
    sample: SequenceSample,
    options: ResolvedOptions,
    trained: TrainedTokens,
    kl: Tensor,
    kl_ctl: float,
) -> Tensor:
    """Return the advantage of every token, f32 (L-1), 0 outside the mask.

    It is the estimate of the token's sequence (or turn) plus the KL rewards of this and later
    tokens. Estimators in ``RETURN_TO_GO`` and GAE compute it per token instead.

    Args:
        sample: The batch.
        options: The resolved options of the policy gradient.
        trained: The trained tokens of the batch.
        kl: KL divergence to the reference at every token, f32 (L-1).
        kl_ctl: Weight of the KL divergence in the reward.
    """
    tokens = trained.tokens
    mask = trained.tokens.mask
    if options.needs_values:
        return value_estimate(sample, options, trained, kl, kl_ctl).advantages
    rewards = -kl_ctl * kl
    if options.credit == "turn":
        advantages = _turn_advantages(sample, options, trained)
    else:
        per_sequence = _sequence_estimates(sample, options, trained)
        advantages = torch.where(mask, per_sequence[tokens.sequence], 0.0)
        if options.credit == "state":
            advantages = advantages + options.step_advantage_weight * _step_advantages(
                sample, options, trained
            )
        if options.adv_estimator in RETURN_TO_GO:
            rewards = rewards + at_last_token(per_sequence, mask, tokens.sequence)
            return return_to_go(
                rewards, mask, tokens.sequence, tokens.n_sequences, options.discount
            )
    if options.kl_ctl == 0:
        return advantages
    return advantages + return_to_go(rewards, mask, tokens.sequence, tokens.n_sequences)


def value_estimate(
    sample: SequenceSample,
    options: ResolvedOptions,
    trained: TrainedTokens,
    kl: Tensor,
    kl_ctl: float,
) -> ValueEstimate:
    """Return GAE advantages and returns from the key ``values`` (``adv_estimator=gae``).

    The arguments are those of ``token_advantages``. Raises ValueError if a value at a trained token
    is not finite.
    """
    tokens = trained.tokens
    mask = trained.tokens.mask
    require_keys(sample, ("values", *options.turn_keys))
    values = sample["values"].cpu().float()
    if not bool(torch.isfinite(values[mask]).all()):
        raise ValueError(
            "critic_inf: a value is not finite: the critic has diverged; lower critic.optimizer.lr"
        )
    rewards = -kl_ctl * kl
    per_sequence = _sequence_estimates(sample, options, trained)
    if options.credit != "turn":
        rewards = rewards + at_last_token(per_sequence, mask, tokens.sequence)
        return token_value_estimate(
            rewards,
            values,
            mask,
            tokens.sequence,
            tokens.n_sequences,
            options.discount,
            options.gae_lambda,
        )
    counts = torch.from_numpy(np.asarray(sample.lengths("turn_rewards").values)).long()
    turn_rewards = sample["turn_rewards"].cpu().float()
    # The bias is per episode: it is added once, to the last turn.
    bias = torch.zeros_like(turn_rewards)
    bias[counts.cumsum(0) - 1] = options.reward_bias
    shaped = shape_rewards(
        (turn_rewards + bias).numpy(), options.reward_scaling, 0.0, options.max_reward_clip
    )
    return turn_value_estimate(
        rewards,
        torch.from_numpy(shaped),
        counts,
        values,
        drop_first_tokens(sample, "turn_ids"),
        mask,
        tokens.sequence,
        options.discount,
        options.gae_lambda,
    )


def kl_of_behaviour(sample: SequenceSample, options: ResolvedOptions, mask: Tensor) -> Tensor:
    """Return KL(old, ref) at every token of ``mask`` in nats, f32 (L-1), 0 elsewhere.

    All are 0 if the reward has no KL term (``kl_ctl=0``). The old policy is the proximal one with
    ``recompute_logprob``, otherwise the behaviour policy, without token masks.
    """
    if options.kl_ctl == 0:
        return torch.zeros(len(mask))
    old_key = PROXIMAL if options.recompute_logprob else "packed_logprobs"
    require_keys(sample, ("packed_ref_logprobs", old_key))
    old_logprobs = sample[PROXIMAL] if options.recompute_logprob else policy_at_sampling(sample)
    old = torch.where(mask, old_logprobs.cpu(), 0.0)
    ref = torch.where(mask, sample["packed_ref_logprobs"].cpu(), 0.0)
    return torch.where(mask, kl_estimate(old, ref, options.kl_estimator), 0.0)


def distillation(
    sample: SequenceSample, options: ResolvedOptions, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the distillation advantage of every token and its KL to the teacher, both f32 (L-1).

    The advantage is log p_teacher - log p_old, clamped to +-10; the divergence is the k3 estimate
    of KL(old, teacher) in nats. Both are 0 outside ``mask``. Raises ValueError for a NaN
    log-probability of the teacher.

    With ``ppo.feedback`` the difference is ``feedback_logratios``, both terms of which one engine
    computed (Hübotter et al. 2026, SDPO). Otherwise the old policy is the proximal one if it is
    known before the step. The behaviour policy would not do: the behaviour weights already correct
    for the difference between generator and trainer, so its log-probabilities would push the policy
    away from the generator.

    The expected policy gradient with this advantage is minus the gradient of the reverse KL
    divergence at each token, given the tokens before it. Source: Lu 2025, On-Policy Distillation
    (Thinking Machines); Agarwal et al. 2024, GKD.
    """
    if options.needs_feedback:
        require_keys(sample, (FEEDBACK_RATIOS,))
        log_ratio = torch.where(mask, sample[FEEDBACK_RATIOS].cpu(), 0.0)
        if bool(torch.isnan(log_ratio).any()):
            raise ValueError("feedback_inf: a log-probability is not a number")
        zeros = torch.zeros_like(log_ratio)
        return -kl_estimate(zeros, log_ratio, "k1"), kl_estimate(zeros, log_ratio, "k3")
    old_key = (
        PROXIMAL if options.prox_logp_method in ("actor_inf", "recompute") else "packed_logprobs"
    )
    require_keys(sample, ("teacher_logprobs", old_key))
    old_logprobs = sample[PROXIMAL] if old_key == PROXIMAL else policy_at_sampling(sample)
    old = torch.where(mask, old_logprobs.cpu(), 0.0)
    teacher = torch.where(mask, sample["teacher_logprobs"].cpu(), 0.0)
    if bool(torch.isnan(teacher).any()):
        raise ValueError("teacher_inf: a log-probability of the teacher is not a number")
    return -kl_estimate(old, teacher, "k1"), kl_estimate(old, teacher, "k3")


def kl_of_rollouts(kl: Tensor, trained: TrainedTokens) -> tuple[float, int]:
    """Return the mean KL of the trainable rollouts in nats, and their number.

    The KL of a rollout is the sum over its tokens of ``kl`` f32 (L-1). The mean is 0 without a
    trainable rollout.
    """
    n = len(torch.unique(trained.tokens.rollout[trained.trainable]))
    return float(kl.double().sum()) / max(1, n), n


def rollout_means(values: Tensor, valid: Tensor, rollout: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean value of each rollout's valid sequences, f64 (n_rollouts,), and whether the
    rollout has a valid sequence, bool (n_rollouts,).

    ``values`` f32 and ``valid`` bool are (n_sequences,), ``rollout`` i64 (n_sequences,) is the
    rollout of each sequence. The mean is 0 for a rollout without a valid sequence.
    """
    zeros = torch.zeros(int(rollout.max()) + 1 if len(rollout) else 0, dtype=torch.float64)
    count = zeros.index_add(0, rollout, valid.double())
    total = zeros.index_add(0, rollout, torch.where(valid, values.double(), 0.0))
    return total / count.clamp(min=1), count > 0


def compare_rollouts(estimator: Estimator, rollout: Tensor) -> Estimator:
    """Wrap an estimator so that it compares rollouts instead of sequences.

    The inputs and the result of the returned estimator are per sequence; ``rollout`` i64 (n,) is
    the rollout of each sequence. A rollout counts once in all statistics, with the mean score of
    its valid sequences. A sequence whose score differs from this mean (an agent may score each of
    its conversations) gets the advantage that its rollout would have with the sequence's score.
    """

    def estimate(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
        means, has_valid = rollout_means(scores, valid, rollout)
        rollout_scores = means.float()
        if len(rollout_scores) == len(rollout):
            # One sequence per rollout. The scores are passed on unchanged, NaN of invalid ones
            # included.
            return estimator(scores, valid, group)
        groups = torch.zeros_like(rollout[: len(rollout_scores)]).scatter(0, rollout, group)
        advantages = torch.where(valid, estimator(rollout_scores, has_valid, groups)[rollout], 0.0)
        for row in torch.nonzero(valid & (scores != rollout_scores[rollout])).flatten().tolist():
            number = int(rollout[row])
            with_own_score = rollout_scores.index_fill(0, rollout[row], float(scores[row]))
            advantages[row] = estimator(with_own_score, has_valid, groups)[number]
        return advantages

    return estimate


def _rollout_estimator(options: ResolvedOptions, trained: TrainedTokens) -> Estimator:
    """Return the estimator selected by the options, wrapped to compare rollouts."""
    estimator = options.estimator()
    if options.adv_estimator == PASS_AT_K:
        estimator = partial(estimator, k=options.pass_at_k)
    return compare_rollouts(estimator, trained.tokens.rollout)


def _sequence_estimates(
    sample: SequenceSample, options: ResolvedOptions, trained: TrainedTokens
) -> Tensor:
    """Return the estimator's result for every sequence, f32 (n_sequences,)."""
    estimator = _rollout_estimator(options, trained)
    return estimator(sample["rewards"].cpu().float(), trained.valid, trained.tokens.group)


def _turn_advantages(
    sample: SequenceSample, options: ResolvedOptions, trained: TrainedTokens
) -> Tensor:
    """Return the advantage of every token's turn (``credit=turn``), f32 (L-1), 0 outside the mask.

    The return from a turn on gets the same bias, scale and clip as the reward of an episode.
    """
    tokens = trained.tokens
    estimator = _rollout_estimator(options, trained)
    scores, counts = _returns_by_turn(sample, options)
    advantages = turn_advantages(scores, trained.valid, tokens.group, estimator)
    return spread_over_tokens(
        advantages, drop_first_tokens(sample, "turn_ids"), tokens.sequence, tokens.mask, counts
    )


def _returns_by_turn(sample: SequenceSample, options: ResolvedOptions) -> tuple[Tensor, Tensor]:
    """Return the shaped return from each turn on and the number of turns of each sequence.

    The returns are f32 (n_sequences, max_turns), the numbers i64 (n_sequences,).
    """
    counts = torch.from_numpy(np.asarray(sample.lengths("turn_rewards").values)).long()
    returns = (
        returns_by_turn(sample["turn_rewards"].cpu(), counts, options.discount).float().numpy()
    )
    scores = shape_rewards(
        returns, options.reward_scaling, options.reward_bias, options.max_reward_clip
    )
    return torch.from_numpy(scores), counts


def _step_advantages(
    sample: SequenceSample, options: ResolvedOptions, trained: TrainedTokens
) -> Tensor:
    """Return the step-level advantage of every token's turn (``credit=state``), f32 (L-1).

    It compares the turns of a group that started in the same state, and is 0 outside the mask.
    Raises ValueError if a trained token is in no turn of its sequence.
    """
    tokens = trained.tokens
    estimator = options.estimator()
    scores, counts = _returns_by_turn(sample, options)
    advantages = step_advantages(scores, *_turn_states(sample, trained), tokens.group, estimator)
    return spread_over_tokens(
        advantages, drop_first_tokens(sample, "turn_ids"), tokens.sequence, tokens.mask, counts
    )


def shared_states(sample: SequenceSample, trained: TrainedTokens) -> float:
    """Return the fraction of turns that started in the same state as another turn of their group.

    Only these turns have a step-level advantage. Turns of invalid rollouts do not count; the result
    is 0 without a turn.
    """
    groups = step_groups(*_turn_states(sample, trained), trained.tokens.group)
    return float((torch.bincount(groups)[groups] > 1).double().mean()) if len(groups) else 0.0


def _turn_states(sample: SequenceSample, trained: TrainedTokens) -> tuple[Tensor, Tensor]:
    """Return the start state of every turn, i64 (n_sequences, max_turns), and which turns are
    present, bool of the same shape.

    A turn is present in a sequence that is valid and contains tokens of it.
    """
    require_keys(sample, TURN_KEYS)
    counts = torch.from_numpy(np.asarray(sample.lengths("turn_states").values)).long()
    shape = (len(counts), int(counts.max()) if len(counts) else 0)
    states = torch.zeros(shape, dtype=torch.int64)
    present = torch.zeros(shape, dtype=torch.bool)
    states[torch.arange(shape[1]) < counts[:, None]] = sample["turn_states"].cpu()
    turn = drop_first_tokens(sample, "turn_ids").long()
    sequence = trained.tokens.sequence
    in_turn = (turn >= 0) & (turn < counts[sequence]) & trained.valid[sequence]
    present[sequence[in_turn], turn[in_turn]] = True
    return states, present


class KLController:
    """Adaptive weight of the KL divergence in the reward (``value``, initially ``ppo.kl_ctl``).

    With ``ppo.kl_target`` every train step updates value *= 1 + clip(kl / target - 1, +-0.2) *
    min(1, n / horizon). Here ``kl`` (nats) is the mean over the step's ``n`` trainable rollouts of
    the sum over a rollout's tokens. A step therefore changes the value by at most a fifth, and it
    stays positive. Without a target the value is constant. Source: Ziegler et al. 2019, Fine-Tuning
    Language Models from Human Preferences.
    """

    def __init__(self, options: ResolvedOptions) -> None:
        self.value = options.kl_ctl
        self._target = options.kl_target
        self._horizon = options.kl_horizon

    def observe(self, kl: float, n: int) -> None:
        """Update the weight from the mean KL (nats) of a step's ``n`` trainable rollouts.

        A KL that is not finite is ignored.
        """
        if self._target is None or n == 0 or not math.isfinite(kl):
            return
        error = min(_MAX_KL_ERROR, max(-_MAX_KL_ERROR, kl / self._target - 1))
        self.value *= 1 + error * min(1.0, n / self._horizon)
