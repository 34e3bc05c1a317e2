"""Policy-gradient train step: GRPO and related algorithms (docs/reference/dataflow.md 10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.algorithms.advantages import normalise
from realhf.algorithms.aggregation import AGGREGATIONS
from realhf.algorithms.options import PolicyGradientOptions, ResolvedOptions
from realhf.algorithms.policy_loss import (
    ADVANTAGES,
    CLIPPED,
    CURRENT,
    MISMATCH,
    PROXIMAL,
    RATIO,
    TOKEN_TERMS,
    PolicyObjective,
    policy_at_sampling,
)
from realhf.algorithms.resolution import resolve
from realhf.algorithms.token_advantages import (
    KLController,
    TrainedTokens,
    apply_count_option,
    distillation,
    kl_of_behaviour,
    kl_of_rollouts,
    require_keys,
    rollout_means,
    shared_states,
    token_advantages,
    truncated_sequences,
    valid_sequences,
)
from realhf.algorithms.train_step import (
    COMPONENTS,
    RL,
    NonFiniteGuard,
    PredictedTokens,
    component_mask,
    component_weights,
    replace_keys,
    select_weighted_part,
    split_updates,
    summary,
)
from realhf.api.keys import ROLLOUT_KEY, TURN_IDS, UNMASKED_LOGPROBS
from realhf.api.model import CallContext, Model, TrainResult
from realhf.api.sample import SequenceSample
from realhf.api.trace import TrainedRows

N_BINS = 8
"""Number of bins in the histogram of head staleness; the last bin counts 7 and more."""
PLACE = "place"
"""Key of each predicted token's position in the batch, in a minibatch, i64 (L-1)."""


class PolicyGradientInterface:
    """Train call of the policy.

    Reads ``packed_input_ids``, ``loss_mask``, ``packed_logprobs`` and ``rewards``. Optional keys
    are ``outcome`` (0: valid), ``seq_no_eos_mask``, ``packed_versions``, ``packed_ref_logprobs``,
    ``proximal_logprobs``, ``teacher_logprobs``, ``unmasked_logprobs`` and ``rollout_index``; with ``credit=turn`` also
    ``turn_ids`` and ``turn_rewards``, with ``credit=state`` in addition ``turn_states``. The keys
    of ``COMPONENTS``, if present, weight each token in each term of the loss.

    Advantages are computed once per step from the groups (the rollouts of one sample). Then follow
    ``sample_reuse`` passes of ``ppo_n_minibatches`` optimizer steps over rollouts, shuffled by
    seed, step and pass. Sequences with the same ``rollout_index`` belong to one rollout, which
    counts once wherever sequences are compared, averaged or counted, unless ``ppo.count`` is
    ``row``.

    A sequence whose advantages are all 0 has no policy gradient, so it is dropped from the forward
    and backward pass; the normalisers T and S still count it. With a KL term or an entropy bonus
    such a sequence has a gradient and is kept.

    Args:
        ppo: Options of the section ``ppo``, as an object or as plain values.
        temperature: Sampling temperature.
        loss_scale_len: Divisor of ``loss_agg=constant`` if ``ppo`` does not set it, tokens.
        skip_zero_advantage: Whether to drop sequences without a gradient. False gives the same gradient.
        first_step: Train steps before this one make no update, so that a critic can warm up first.
        algorithm: Options of a custom algorithm (``ppo.algo=FILE.py:NAME``).

    Raises ValueError for invalid options and for a temperature that is not positive.
    """

    def __init__(
        self,
        ppo: PolicyGradientOptions | Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        loss_scale_len: int | None = None,
        skip_zero_advantage: bool = True,
        first_step: int = 0,
        algorithm: Mapping[str, Any] | None = None,
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive to train, got {temperature}")
        configured = ppo if ppo is not None else PolicyGradientOptions()
        self.options = resolve(configured, loss_scale_len=loss_scale_len, own=algorithm)
        self._temperature = temperature
        self._skip_zero = skip_zero_advantage
        self._first_step = first_step
        self._guard = NonFiniteGuard(self.options.max_nonfinite_steps)
        self._kl = KLController(self.options)

    def train_step(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> dict[str, Any]:
        """Train one step and return its statistics. Raises ValueError for a missing key.

        After ``max_nonfinite_steps`` consecutive updates without a finite gradient the statistic
        ``stop`` contains the reason.
        """
        require_keys(sample, self._needed_keys())
        sample = apply_count_option(sample, self.options)
        stats = self._staleness(sample, context.step)
        if self._rewards_need_proximal and not self.options.needs_actor_inf:
            sample = self._with_proximal(model, sample, context)
        prepared, batch_stats = self.prepare(sample)
        self._kl.observe(
            batch_stats.get("kl_of_sequence", 0.0), int(batch_stats["n_trainable_rollouts"])
        )
        record = RecordedStep(context.step, prepared) if context.recorder.keeps else None
        prepared = record.batch if record is not None else prepared
        parts = (
            self._minibatches(model, prepared, context) if context.step >= self._first_step else []
        )
        results: list[TrainResult] = []
        for part in parts:
            objective = PolicyObjective(
                self.options, context.step, self._temperature, recorded=record is not None
            )
            result = model.engine.train_batch(part, objective, mb_spec=context.mb_spec)
            if not results:
                # Only before the first update do engine and trainer have the same weights.
                trained_mask = component_mask(part, RL, PredictedTokens.from_sample(part).mask)
                stats |= mismatch_statistics(result.kept[MISMATCH][trained_mask])
            if record is not None:
                record.add(part, result.kept)
            results.append(result)
            if not self._guard.observe(result):
                break
        if record is not None:
            context.recorder.record_trained(
                record.rows(sample["packed_versions"] if "packed_versions" in sample.keys else None)
            )
        return {**batch_stats, **stats, **summary(results), **self._guard.stop_statistics()}

    @property
    def _rewards_need_proximal(self) -> bool:
        """Whether the log-probabilities of the proximal policy are needed to compute the KL reward
        or the distillation advantage."""
        options = self.options
        for_teacher = options.needs_teacher and options.prox_logp_method == "recompute"
        return for_teacher or (options.recompute_logprob and options.kl_ctl != 0)

    def _needed_keys(self) -> tuple[str, ...]:
        """Return the keys that the options require in a batch."""
        versions = ("packed_versions",) if self.options.prox_logp_method == "loglinear" else ()
        truncated = ("seq_no_eos_mask",) if self.options.mask_too_long else ()
        return (*self.options.scored_keys, *versions, *truncated, *self.options.turn_keys)

    def _staleness(self, sample: SequenceSample, step: int) -> dict[str, float]:
        """Return the staleness statistics of the valid sequences."""
        if "packed_versions" not in sample.keys:
            return {}
        tokens = PredictedTokens.from_sample(sample)
        tokens = replace(tokens, mask=tokens.mask & valid_sequences(sample)[tokens.sequence])
        return staleness_statistics(sample["packed_versions"].cpu(), tokens, step)

    def _minibatches(
        self, model: Model, prepared: SequenceSample, context: CallContext
    ) -> list[SequenceSample]:
        """Return the minibatch of each update, leaving out empty ones.

        With several updates the proximal log-probabilities are computed here, before the first one.
        With one update they equal the log-probabilities of its own forward pass.
        """
        options = self.options
        if (
            options.n_updates > 1
            and options.prox_logp_method == "recompute"
            and PROXIMAL not in prepared.keys
        ):
            prepared = self._with_proximal(
                model, prepared, context, only=self._has_gradient(prepared)
            )
        parts = split_updates(
            prepared, options.ppo_n_minibatches, options.sample_reuse, context.seed
        )
        return [trained for part in parts if (trained := self._select_trained(part)) is not None]

    def _with_proximal(
        self, model: Model, sample: SequenceSample, context: CallContext, only: Tensor | None = None
    ) -> SequenceSample:
        """Return the sample with the proximal log-probabilities added.

        If ``only`` bool (n_sequences,) is given, other sequences are not computed and get 0.
        """
        scored_sample = sample
        if only is not None:
            lengths = torch.from_numpy(sample.lengths("packed_input_ids").values)
            mask = sample["loss_mask"].cpu().bool() & torch.repeat_interleave(only, lengths)
            scored_sample = replace_keys(sample, per_token={"loss_mask": mask})
        logprobs = model.engine.logprobs(
            scored_sample, temperature=self._temperature, mb_spec=context.mb_spec
        )
        return replace_keys(sample, shifted={PROXIMAL: logprobs})

    def prepare(self, sample: SequenceSample) -> tuple[SequenceSample, dict[str, float]]:
        """Return the batch with ``advantages`` f32 (L-1), and the statistics of the batch.

        ``loss_mask`` is False on invalid and, with ``mask_too_long``, truncated sequences.
        """
        sample = apply_count_option(sample, self.options)
        trained = TrainedTokens.from_sample(sample, self.options)
        rewards = sample["rewards"].cpu().float()
        tokens = trained.tokens
        valid = trained.valid
        mask = trained.tokens.mask
        # Length and entropy statistics include truncated sequences, even if those do not train.
        valid_mask = PredictedTokens.from_sample(sample).mask & valid[tokens.sequence]
        valid_tokens = replace(tokens, mask=component_mask(sample, RL, valid_mask))
        kl = kl_of_behaviour(sample, self.options, mask)
        advantages, distillation_stats = self._advantages(sample, trained, kl)
        lengths = torch.from_numpy(sample.lengths("packed_input_ids").values)
        token_mask = sample["loss_mask"].cpu().bool() & torch.repeat_interleave(
            trained.trainable, lengths
        )
        has_signal = torch.zeros(len(sample), dtype=torch.bool)
        has_signal[tokens.group[torch.unique(tokens.sequence[advantages != 0])]] = True
        out = replace_keys(
            sample.select(self._trained_keys(sample)),
            per_token={"loss_mask": token_mask},
            shifted={ADVANTAGES: advantages},
        )
        means, has_reward = rollout_means(rewards, valid, tokens.rollout)
        stats = {
            "reward_mean": float(means[has_reward].mean()) if bool(has_reward.any()) else 0.0,
            "reward_std": float(means[has_reward].std()) if int(has_reward.sum()) > 1 else 0.0,
            "groups_with_signal": float(has_signal.sum()),
            "n_groups": float(len(torch.unique(tokens.group))),
            **_length_statistics(sample, valid_tokens, valid, self.options),
            **_entropy_statistics(sample, valid_tokens),
            **self._kl_statistics(kl, trained),
            **distillation_stats,
            **(
                {"shared_states": shared_states(sample, trained)}
                if self.options.credit == "state"
                else {}
            ),
            "n_sequences": float(tokens.n_sequences),
            "n_rollouts": float(tokens.n_rollouts),
            "n_invalid": float((~valid).sum()),
            "n_trainable": float(trained.trainable.sum()),
            "n_tokens": float(mask.sum()),
        }
        return out, stats

    def _advantages(
        self, sample: SequenceSample, trained: TrainedTokens, kl: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the advantage of every token, f32 (L-1), and the statistics of the distillation.

        It is the weighted sum of the advantage from rewards and that from a teacher, 0 outside the
        mask.
        """
        options = self.options
        mask = trained.tokens.mask
        advantages = torch.zeros(len(mask))
        if options.rl_weight:
            advantages = token_advantages(sample, options, trained, kl, self._kl.value)
            if options.adv_norm:
                advantages = normalise(advantages, mask)
        if not options.distill_weight:
            return advantages, {}
        teacher_advantages, teacher_kl = distillation(sample, options, mask)
        mixed = options.rl_weight * advantages + options.distill_weight * teacher_advantages
        return mixed, {"kl_teacher": float(teacher_kl.double().sum() / mask.sum().clamp(min=1))}

    def _kl_statistics(self, kl: Tensor, trained: TrainedTokens) -> dict[str, float]:
        """Return the number of trainable rollouts and, with a KL reward, its weight and the mean
        KL.

        The mean KL is in nats per rollout.
        """
        kl_per_rollout, n_rollouts = kl_of_rollouts(kl, trained)
        stats = {"n_trainable_rollouts": float(n_rollouts)}
        if self.options.kl_ctl == 0:
            return stats
        return stats | {"kl_ctl": self._kl.value, "kl_of_sequence": kl_per_rollout}

    def _trained_keys(self, sample: SequenceSample) -> list[str]:
        """Return the keys of the batch that the loss reads.

        ``proximal_logprobs`` is one of them only if ``actor_inf`` provides it or this call computed
        it for the reward.
        """
        keys = [
            "packed_input_ids",
            "packed_logprobs",
            UNMASKED_LOGPROBS,
            "packed_ref_logprobs",
            ROLLOUT_KEY,
            *COMPONENTS,
        ]
        if AGGREGATIONS[self.options.loss_agg].by_turn:
            keys.append(TURN_IDS)
        if self.options.needs_actor_inf or self._rewards_need_proximal:
            keys.append(PROXIMAL)
        if self.options.prox_logp_method == "loglinear":
            keys.append("packed_versions")
        return [key for key in keys if key in sample.keys]

    def _select_trained(self, part: SequenceSample) -> SequenceSample | None:
        """Return the minibatch with loss weights and without sequences that have no gradient.

        Returns None if no sequence is left.
        """
        weights = component_weights(part, self.options.loss_agg, self.options.loss_scale_len or 1)
        return select_weighted_part(part, weights, self._has_gradient(part))

    def _has_gradient(self, part: SequenceSample) -> Tensor:
        """Return which sequences have a gradient, bool (n_sequences,)."""
        tokens = PredictedTokens.from_sample(part)
        options = self.options
        every_token_has_gradient = (
            options.kl_loss_coef != 0 or options.entropy_coef != 0 or not self._skip_zero
        )
        if every_token_has_gradient:
            return tokens.sequences_with(tokens.mask)
        has_gradient = part[ADVANTAGES] != 0
        for key in TOKEN_TERMS:
            has_gradient = has_gradient | component_mask(part, key, tokens.mask)
        return tokens.sequences_with(tokens.mask & has_gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return the count of consecutive updates without a finite gradient, and the weight of the
        KL reward."""
        return {"nonfinite_in_a_row": self._guard.in_a_row, "kl_ctl": self._kl.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of ``state_dict``. Raises KeyError without ``nonfinite_in_a_row``.

        Without ``kl_ctl`` (a state of an older version) the weight of the KL reward is unchanged.
        """
        self._guard.in_a_row = int(state["nonfinite_in_a_row"])
        self._kl.value = float(state.get("kl_ctl", self._kl.value))


def _length_statistics(
    sample: SequenceSample, tokens: PredictedTokens, valid: Tensor, options: ResolvedOptions
) -> dict[str, float]:
    """Return statistics of the lengths of valid rollouts in sampled tokens; {} without a valid
    rollout.

    ``overlong_fraction`` is the fraction of rollouts whose reward has a length penalty,
    ``too_long_fraction`` of those with a sequence that was cut off by a token limit.
    """
    zeros = torch.zeros(tokens.n_rollouts, dtype=torch.int64)
    is_valid = torch.zeros(tokens.n_rollouts, dtype=torch.bool).index_fill(
        0, tokens.rollout[valid], True
    )
    n_tokens = zeros.index_add(0, tokens.owner, tokens.mask.long())[is_valid]
    if not len(n_tokens):
        return {}
    stats = {
        "response_tokens_mean": float(n_tokens.double().mean()),
        "response_tokens_max": float(n_tokens.max()),
    }
    if options.overlong_length is not None:
        penalty_free = options.overlong_length * (1 - options.overlong_buffer)
        stats["overlong_fraction"] = float((n_tokens > penalty_free).double().mean())
    if "seq_no_eos_mask" in sample.keys:
        is_truncated = zeros.index_fill(0, tokens.rollout[valid & truncated_sequences(sample)], 1)
        stats["too_long_fraction"] = float(is_truncated[is_valid].double().mean())
    return stats


def _entropy_statistics(sample: SequenceSample, tokens: PredictedTokens) -> dict[str, float]:
    """Return an estimate of the sampler's mean entropy in nats; {} without a token.

    It is the mean of -log p over the sampled tokens of valid sequences.
    """
    if "packed_logprobs" not in sample.keys:
        return {}
    logprobs = policy_at_sampling(sample).cpu()[tokens.mask]
    return {"entropy_estimate": -float(logprobs.double().mean())} if len(logprobs) else {}


class RecordedStep:
    """Trace of a train step: the values of every token before and after its updates.

    Attributes:
        batch: The batch to train on in place of the given one. Its minibatches may contain any of its
            sequences in any order: the key ``PLACE`` maps their tokens back to the batch.

    Args:
        step: Number of the train step.
        batch: A batch with the keys of ``PolicyGradientInterface.prepare``.
    """

    def __init__(self, step: int, batch: SequenceSample) -> None:
        self._step = step
        tokens = PredictedTokens.from_sample(batch)
        size = len(tokens.mask)
        self._tokens = tokens
        self._advantages = batch[ADVANTAGES].cpu()
        self._behaviour = policy_at_sampling(batch).cpu()
        self._lengths = np.asarray(batch.lengths("packed_input_ids").values) - 1
        self.batch = replace_keys(batch, shifted={PLACE: torch.arange(size)})
        self._before = torch.full((size,), torch.nan)
        self._current = torch.full((size,), torch.nan)
        self._ratio = torch.ones(size)
        self._clipped = torch.zeros(size, dtype=torch.bool)
        self._updated = False

    def add(self, part: SequenceSample, loss_values: Mapping[str, Tensor]) -> None:
        """Record a trained minibatch and the values that its loss kept.

        A later pass over the same tokens replaces the values of an earlier one.
        """
        place = part[PLACE].cpu()
        if PROXIMAL in part.keys:
            self._before[place] = part[PROXIMAL].cpu().float()
        elif not self._updated:
            self._before[place] = loss_values[CURRENT]
        self._updated = True
        self._current[place] = loss_values[CURRENT]
        self._ratio[place] = loss_values[RATIO]
        self._clipped[place] = loss_values[CLIPPED] > 0

    def rows(self, versions: Tensor | None) -> TrainedRows:
        """Return the recorded values. ``versions`` i32 (n,) is the version that sampled each
        token."""
        tokens = self._tokens
        return TrainedRows(
            self._step,
            self.batch.ids,
            np.bincount(tokens.group.numpy(), minlength=len(self.batch.ids)),
            self._lengths,
            tokens.mask.numpy(),
            self._behaviour.numpy(),
            self._before.numpy(),
            self._current.numpy(),
            self._ratio.numpy(),
            self._advantages.numpy(),
            self._clipped.numpy(),
            None if versions is None else versions.cpu().numpy(),
        )


def staleness_statistics(versions: Tensor, tokens: PredictedTokens, step: int) -> dict[str, float]:
    """Return the staleness of the rollouts of a train step, in weight versions.

    The staleness of a token is u - v with u = ``step``, the version of the weights that train, and
    v the version that sampled it (docs/reference/dataflow.md 1). The head is a rollout's oldest
    token, the tail its newest. The statistics are ``staleness/head_mean``, ``head_max``,
    ``tail_mean``, and the fractions of rollouts by head staleness, ``hist_0`` ... ``hist_6`` and
    ``hist_7plus``; {} if no token has a known version.

    Args:
        versions: Version that sampled each predicted token, -1 if unknown, i32 (n,).
        tokens: The predicted tokens; those outside the mask are ignored.
        step: Number of the train step.
    """
    known = tokens.mask & (versions >= 0)
    rollout = tokens.owner[known]
    lag = step - versions[known].long()
    if not len(lag):
        return {}
    zeros = torch.zeros(tokens.n_rollouts, dtype=torch.int64)
    head = zeros.scatter_reduce(0, rollout, lag, "amax", include_self=False)
    tail = zeros.scatter_reduce(0, rollout, lag, "amin", include_self=False)
    has_version = torch.zeros(tokens.n_rollouts, dtype=torch.bool).index_fill(0, rollout, True)
    head = head[has_version]
    tail = tail[has_version]
    bins = torch.bincount(head.clamp(0, N_BINS - 1), minlength=N_BINS).double() / len(head)
    names = [f"hist_{lag}" for lag in range(N_BINS - 1)] + [f"hist_{N_BINS - 1}plus"]
    stats = {
        "head_mean": float(head.double().mean()),
        "head_max": float(head.max()),
        "tail_mean": float(tail.double().mean()),
        **dict(zip(names, bins.tolist(), strict=True)),
    }
    return {f"staleness/{name}": value for name, value in stats.items()}


def mismatch_statistics(differences: Tensor) -> dict[str, float]:
    """Return quantiles of the mismatch between generator and trainer; {} without a token.

    ``differences`` (n,) is |behaviour - current log-probability| of each trained token before the
    first update. The statistics are ``mismatch/abs_p50``, ``abs_p99`` and ``abs_max``. If the
    tokens are of older weight versions, the difference also includes the change of the policy since
    then.
    """
    if not len(differences):
        return {}
    ordered = differences.sort().values
    index_of = {
        "p50": len(ordered) // 2,
        "p99": (99 * len(ordered)) // 100,
        "max": len(ordered) - 1,
    }
    return {f"mismatch/abs_{name}": float(ordered[index]) for name, index in index_of.items()}
