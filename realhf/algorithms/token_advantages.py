"""Makes the advantage of every token of a batch from its rewards and its KL terms, and steers the weight of the KL.

What is computed here depends on the batch and the options alone: calls on different workers that need the same numbers
compute them each for itself.
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
    of_sampled_tokens,
    of_tokens,
    of_turns,
    return_to_go,
    returns_by_turn,
    step_advantages,
    step_groups,
    turn_advantages,
)
from realhf.algorithms.inference import scored
from realhf.algorithms.options import PASS_AT_K, RETURN_TO_GO, ResolvedOptions
from realhf.algorithms.policy_loss import PROXIMAL, kl_estimate
from realhf.algorithms.train_step import RL, PredictedTokens, counting, predicted
from realhf.api.keys import FEEDBACK_RATIOS, ROLLOUT_KEY, TURN_KEYS
from realhf.api.sample import SequenceSample

_WHY = MappingProxyType(
    {
        "packed_ref_logprobs": "a KL term (kl_ctl, kl_loss_coef)",
        "seq_no_eos_mask": "ppo.mask_too_long",
        "proximal_logprobs": "ppo.prox_logp_method=actor_inf (the call actor_inf makes it; or use recompute)",
        "packed_logprobs": "ppo.kl_ctl",
        "packed_versions": "ppo.prox_logp_method=loglinear",
        "teacher_logprobs": "ppo.distill_weight (the call teacher_inf makes it)",
        FEEDBACK_RATIOS: "ppo.feedback (the call feedback_inf makes it)",
        "values": "ppo.adv_estimator=gae (the call critic_inf makes it: experiment=ppo)",
        **dict.fromkeys(TURN_KEYS, "ppo.credit=turn, or a ppo.loss_agg by turn,"),
        TURN_KEYS[2]: "ppo.credit=state",
    }
)


def require(sample: SequenceSample, keys: Iterable[str]) -> None:
    """Raise ValueError that names the first key which is missing, and the option that asks for it."""
    for key in keys:
        if key not in sample.keys:
            raise ValueError(f"{_WHY[key]} needs the key {key}")


def counted(sample: SequenceSample, options: ResolvedOptions) -> SequenceSample:
    """Return the sample without the numbers of rollouts where ``ppo.count`` says that each sequence counts."""
    by_row = options.count == "row" and ROLLOUT_KEY in sample.keys
    return sample.select(sample.keys - {ROLLOUT_KEY}) if by_row else sample


@dataclass(frozen=True)
class TrainedTokens:
    """Holds the positions of a batch, ``tokens``, with a mask that is True where rewards train a token (``RL``), so not
    on sequences that train nothing; ``valid`` bool (n sequences,): those that have a reward; ``trainable`` bool (n
    sequences,): without those that ``mask_too_long`` leaves out."""

    tokens: PredictedTokens
    valid: Tensor
    trainable: Tensor

    @staticmethod
    def of(sample: SequenceSample, options: ResolvedOptions) -> TrainedTokens:
        """Read them from ``loss_mask``, ``rl_weights``, ``outcome`` and ``seq_no_eos_mask``."""
        tokens, valid = PredictedTokens.of(sample), valid_sequences(sample)
        trainable = valid & ~truncated_sequences(sample) if options.mask_too_long else valid
        mask = counting(sample, RL, tokens.mask & trainable[tokens.sequence])
        return TrainedTokens(replace(tokens, mask=mask), valid, trainable)


def valid_sequences(sample: SequenceSample) -> Tensor:
    """Return which sequences have a reward, bool (n sequences,): all, if there is no key ``outcome``."""
    if "outcome" not in sample.keys:
        return torch.ones(len(sample["rewards"]), dtype=torch.bool)
    return sample["outcome"].cpu() == 0


def truncated_sequences(sample: SequenceSample) -> Tensor:
    """Return which sequences a limit of tokens ended, bool (n sequences,). Raises ValueError without the key."""
    require(sample, ("seq_no_eos_mask",))
    return sample["seq_no_eos_mask"].cpu().bool()


def token_advantages(
    sample: SequenceSample, options: ResolvedOptions, trained: TrainedTokens, kl: Tensor, kl_ctl: float
) -> Tensor:
    """Return the advantage of every token, f32 (L-1), 0 outside the mask: the estimate of its sequence (or of its turn)
    plus what the KL terms from there on earn; or, for the estimators that tell tokens apart, that of what follows it.

    ``kl`` f32 (L-1,) is the divergence at every token, ``kl_ctl`` its weight in the reward.
    """
    tokens, mask = trained.tokens, trained.tokens.mask
    if options.needs_values:
        return value_estimate(sample, options, trained, kl, kl_ctl).advantages
    rewards = -kl_ctl * kl
    if options.credit == "turn":
        advantages = _turn_advantages(sample, options, trained)
    else:
        per_sequence = _estimates(sample, options, trained)
        advantages = torch.where(mask, per_sequence[tokens.sequence], 0.0)
        if options.credit == "state":
            advantages = advantages + options.step_advantage_weight * _step_advantages(sample, options, trained)
        if options.adv_estimator in RETURN_TO_GO:
            rewards = rewards + at_last_token(per_sequence, mask, tokens.sequence)
            return return_to_go(rewards, mask, tokens.sequence, tokens.n_sequences, options.discount)
    if options.kl_ctl == 0:
        return advantages
    return advantages + return_to_go(rewards, mask, tokens.sequence, tokens.n_sequences)


def value_estimate(
    sample: SequenceSample, options: ResolvedOptions, trained: TrainedTokens, kl: Tensor, kl_ctl: float
) -> ValueEstimate:
    """Return advantages and returns by ``values`` (``adv_estimator=gae``). Raises ValueError on a value that is not
    finite where one is needed."""
    tokens, mask = trained.tokens, trained.tokens.mask
    require(sample, ("values", *options.turn_keys))
    values = sample["values"].cpu().float()
    if not bool(torch.isfinite(values[mask]).all()):
        raise ValueError("critic_inf: a value is not finite: the critic has diverged; lower critic.optimizer.lr")
    rewards = -kl_ctl * kl
    per_sequence = _estimates(sample, options, trained)
    if options.credit != "turn":
        rewards = rewards + at_last_token(per_sequence, mask, tokens.sequence)
        return of_sampled_tokens(
            rewards, values, mask, tokens.sequence, tokens.n_sequences, options.discount, options.gae_lambda
        )
    counts = torch.from_numpy(np.asarray(sample.lengths("turn_rewards").values)).long()
    earned = sample["turn_rewards"].cpu().float()
    bias = torch.zeros_like(earned)
    bias[counts.cumsum(0) - 1] = options.reward_bias
    shaped = scored((earned + bias).numpy(), options.reward_scaling, 0.0, options.max_reward_clip)
    return of_turns(
        rewards,
        torch.from_numpy(shaped),
        counts,
        values,
        predicted(sample, "turn_ids"),
        mask,
        tokens.sequence,
        options.discount,
        options.gae_lambda,
    )


def kl_of_behaviour(sample: SequenceSample, options: ResolvedOptions, mask: Tensor) -> Tensor:
    """Return KL(old, ref) at every token of ``mask``, f32 (L-1), 0 elsewhere and where no KL is in the reward."""
    if options.kl_ctl == 0:
        return torch.zeros(len(mask))
    behaviour = PROXIMAL if options.recompute_logprob else "packed_logprobs"
    require(sample, ("packed_ref_logprobs", behaviour))
    old = torch.where(mask, sample[behaviour].cpu(), 0.0)
    ref = torch.where(mask, sample["packed_ref_logprobs"].cpu(), 0.0)
    return torch.where(mask, kl_estimate(old, ref, options.kl_estimator), 0.0)


def distillation(sample: SequenceSample, options: ResolvedOptions, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a teacher makes of every token of ``mask``, f32 (L-1), 0 elsewhere: the advantage log p_teacher - log
    p_old, cut to +-10, and the k3 estimate of KL(old, teacher) in nats. Raises ValueError on a teacher's
    log-probability that is no number.

    With ``ppo.feedback`` the gap is that of ``feedback_logratios``, whose ends one engine computed (Hübotter et al.
    2026, SDPO). Else the old policy is the proximal one wherever that is known before the step: beside the weights that
    make up for the difference to the sampler, the sampler's own log-probabilities would push the policy away from the
    sampler.

    The expected policy gradient with this advantage is minus that of the reverse KL divergence at each token, the ways
    to it held fixed. Source: Lu 2025, On-Policy Distillation (Thinking Machines); Agarwal et al. 2024, GKD.
    """
    if options.needs_feedback:
        require(sample, (FEEDBACK_RATIOS,))
        gap = torch.where(mask, sample[FEEDBACK_RATIOS].cpu(), 0.0)
        if bool(torch.isnan(gap).any()):
            raise ValueError("feedback_inf: a log-probability is not a number")
        nothing = torch.zeros_like(gap)
        return -kl_estimate(nothing, gap, "k1"), kl_estimate(nothing, gap, "k3")
    behaviour = PROXIMAL if options.prox_logp_method in ("actor_inf", "recompute") else "packed_logprobs"
    require(sample, ("teacher_logprobs", behaviour))
    old = torch.where(mask, sample[behaviour].cpu(), 0.0)
    teacher = torch.where(mask, sample["teacher_logprobs"].cpu(), 0.0)
    if bool(torch.isnan(teacher).any()):
        raise ValueError("teacher_inf: a log-probability of the teacher is not a number")
    return -kl_estimate(old, teacher, "k1"), kl_estimate(old, teacher, "k3")


def kl_of_rollouts(kl: Tensor, trained: TrainedTokens) -> tuple[float, int]:
    """Return the mean over the trainable rollouts of what their tokens' divergences sum to, nats (0 without any), and
    the number of these rollouts."""
    n = len(torch.unique(trained.tokens.rollout[trained.trainable]))
    return float(kl.double().sum()) / max(1, n), n


def rollout_means(values: Tensor, valid: Tensor, rollout: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the valid sequences of each rollout, f64 (n rollouts,), 0 without one, and whether it has one,
    bool (n rollouts,). ``values`` and ``valid`` are (n sequences,)."""
    blank = torch.zeros(int(rollout.max()) + 1 if len(rollout) else 0, dtype=torch.float64)
    count = blank.index_add(0, rollout, valid.double())
    total = blank.index_add(0, rollout, torch.where(valid, values.double(), 0.0))
    return total / count.clamp(min=1), count > 0


def by_rollout(estimator: Estimator, rollout: Tensor) -> Estimator:
    """Return the estimator that compares rollouts and answers for their sequences: ``scores``, ``valid``, ``group`` and
    the result are those of sequences, ``rollout`` i64 (n,) numbers the rollout of each.

    A rollout enters all statistics once, with the mean of its valid sequences. A sequence whose score is another (an
    agent may judge each of its conversations) gets what its rollout would get with that score.
    """

    def estimate(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
        means, has = rollout_means(scores, valid, rollout)
        score = means.float()
        if len(score) == len(rollout):  # Each has one sequence: NaN scores of invalid ones reach the estimator too.
            return estimator(scores, valid, group)
        groups = torch.zeros_like(rollout[: len(score)]).scatter(0, rollout, group)
        found = torch.where(valid, estimator(score, has, groups)[rollout], 0.0)
        for row in torch.nonzero(valid & (scores != score[rollout])).flatten().tolist():
            own = int(rollout[row])
            found[row] = estimator(score.index_fill(0, rollout[row], float(scores[row])), has, groups)[own]
        return found

    return estimate


def _estimator(options: ResolvedOptions, trained: TrainedTokens) -> Estimator:
    """Return the estimator of the options, comparing rollouts."""
    estimator = options.estimator()
    if options.adv_estimator == PASS_AT_K:
        estimator = partial(estimator, k=options.pass_at_k)
    return by_rollout(estimator, trained.tokens.rollout)


def _estimates(sample: SequenceSample, options: ResolvedOptions, trained: TrainedTokens) -> Tensor:
    """Return the estimator's number for every sequence, f32 (n sequences,)."""
    estimator = _estimator(options, trained)
    return estimator(sample["rewards"].cpu().float(), trained.valid, trained.tokens.group)


def _turn_advantages(sample: SequenceSample, options: ResolvedOptions, trained: TrainedTokens) -> Tensor:
    """Return the advantage of every token's turn, f32 (L-1), 0 outside the mask. The return from a turn on is scaled,
    moved and clipped as the reward of an episode is."""
    tokens = trained.tokens
    estimator = _estimator(options, trained)
    scores, counts = _returns_by_turn(sample, options)
    advantages = turn_advantages(scores, trained.valid, tokens.group, estimator)
    return of_tokens(advantages, predicted(sample, "turn_ids"), tokens.sequence, tokens.mask, counts)


def _returns_by_turn(sample: SequenceSample, options: ResolvedOptions) -> tuple[Tensor, Tensor]:
    """Return the scored return from each turn on, f32 (n sequences, most turns), and the turns of each, i64 (n,)."""
    counts = torch.from_numpy(np.asarray(sample.lengths("turn_rewards").values)).long()
    returns = returns_by_turn(sample["turn_rewards"].cpu(), counts, options.discount).float().numpy()
    scores = scored(returns, options.reward_scaling, options.reward_bias, options.max_reward_clip)
    return torch.from_numpy(scores), counts


def _step_advantages(sample: SequenceSample, options: ResolvedOptions, trained: TrainedTokens) -> Tensor:
    """Return the advantage of every token's turn among the turns that began in the same state, f32 (L-1), 0 outside the
    mask. Raises ValueError as ``of_tokens`` does."""
    tokens, estimator = trained.tokens, options.estimator()
    scores, counts = _returns_by_turn(sample, options)
    advantages = step_advantages(scores, *_turn_states(sample, trained), tokens.group, estimator)
    return of_tokens(advantages, predicted(sample, "turn_ids"), tokens.sequence, tokens.mask, counts)


def shared_states(sample: SequenceSample, trained: TrainedTokens) -> float:
    """Return the fraction of the turns of valid rollouts that began in a state in which another turn of the group did:
    only these have a step-level advantage. 0 without a turn."""
    groups = step_groups(*_turn_states(sample, trained), trained.tokens.group)
    return float((torch.bincount(groups)[groups] > 1).double().mean()) if len(groups) else 0.0


def _turn_states(sample: SequenceSample, trained: TrainedTokens) -> tuple[Tensor, Tensor]:
    """Return the state that every turn began in, i64, and which turns of valid rollouts the sequence has the tokens of,
    bool, both (n sequences, most turns)."""
    require(sample, TURN_KEYS)
    counts = torch.from_numpy(np.asarray(sample.lengths("turn_states").values)).long()
    shape = (len(counts), int(counts.max()) if len(counts) else 0)
    states, present = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    states[torch.arange(shape[1]) < counts[:, None]] = sample["turn_states"].cpu()
    turn, sequence = predicted(sample, "turn_ids").long(), trained.tokens.sequence
    played = (turn >= 0) & (turn < counts[sequence]) & trained.valid[sequence]
    present[sequence[played], turn[played]] = True
    return states, present


_MOST_ERROR = 0.2


class KLController:
    """Holds ``value``, which multiplies the KL divergence in the reward; it starts as ``ppo.kl_ctl``.

    With ``ppo.kl_target`` every train step moves it: value *= 1 + clip(kl / target - 1, +-0.2) * min(1, n / horizon),
    where ``kl`` (nats) is the mean over the step's ``n`` trainable rollouts of what a rollout's sampled tokens sum
    to. So a step changes it by a fifth at most, and it stays above 0.
    Source: Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences.
    """

    def __init__(self, options: ResolvedOptions) -> None:
        self.value = options.kl_ctl
        self._target, self._horizon = options.kl_target, options.kl_horizon

    def observe(self, kl: float, n: int) -> None:
        """Take in the mean divergence of a step's ``n`` trainable rollouts, from which the next step's weight follows.
        One that is not finite moves nothing."""
        if self._target is None or n == 0 or not math.isfinite(kl):
            return
        error = min(_MOST_ERROR, max(-_MOST_ERROR, kl / self._target - 1))
        self.value *= 1 + error * min(1.0, n / self._horizon)
