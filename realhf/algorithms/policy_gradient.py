"""Runs the policy-gradient train step: GRPO and its relatives (docs/reference/dataflow.md 10)."""

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
)
from realhf.algorithms.resolution import resolve
from realhf.algorithms.token_advantages import (
    KLController,
    TrainedTokens,
    counted,
    distillation,
    kl_of_behaviour,
    kl_of_rollouts,
    require,
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
    component_weights,
    counting,
    replace_keys,
    summary,
    updates_of,
    weighted_part,
)
from realhf.api.keys import ROLLOUT_KEY, TURN_IDS
from realhf.api.model import CallContext, Model, TrainResult
from realhf.api.sample import SequenceSample
from realhf.api.trace import TrainedRows


class PolicyGradientInterface:
    """Trains one step on ``packed_input_ids, loss_mask, packed_logprobs, rewards`` and, where present, ``outcome`` (0:
    valid), ``seq_no_eos_mask``, ``packed_versions``, ``packed_ref_logprobs``, ``proximal_logprobs``,
    ``teacher_logprobs`` and ``rollout_index``; with ``credit=turn`` also on ``turn_ids`` and ``turn_rewards``, with
    ``credit=state`` on ``turn_states`` too. The keys of ``COMPONENTS``, where present, say how much each token counts
    in each term of the loss.

    Advantages are computed once per step from the groups (the rollouts of one sample); then follow ``sample_reuse``
    passes of ``ppo_n_minibatches`` optimizer steps, over rollouts shuffled by seed, step and pass. Sequences of one
    ``rollout_index`` are rows of one rollout, which counts once wherever sequences are compared, averaged or counted,
    unless ``ppo.count`` is ``row``. ``temperature`` is
    the sampling temperature; ``loss_scale_len`` the divisor of ``loss_agg=constant`` where ``ppo`` does not give it.

    A sequence without any advantage contributes nothing to a pure policy gradient, so it is left out of the forward and
    backward pass; the normalisers T and S still count it. With a KL term or an entropy bonus such a sequence does
    contribute and stays in. ``skip_zero_advantage=False`` keeps all (the gradient is the same; tests compare both).

    Train steps before ``first_step`` make no update: there a critic learns what the policy is worth as it is.
    ``algorithm`` holds the own options of an algorithm of somebody's own (``ppo.algo=FILE.py:NAME``).
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
        given = ppo if ppo is not None else PolicyGradientOptions()
        self.options = resolve(given, loss_scale_len=loss_scale_len, own=algorithm)
        self._temperature = temperature
        self._skip_zero = skip_zero_advantage
        self._first_step = first_step
        self._guard = NonFiniteGuard(self.options.max_nonfinite_steps)
        self._kl = KLController(self.options)

    def train_step(self, model: Model, sample: SequenceSample, context: CallContext) -> dict[str, Any]:
        """Train one step. Raises ValueError on a missing key. After ``max_nonfinite_steps`` consecutive updates without
        a finite gradient the statistic ``stop`` holds the reason."""
        require(sample, self._needed_keys())
        sample = counted(sample, self.options)
        stats = self._staleness(sample, context.step)
        if self._kl_of_proximal and not self.options.needs_actor_inf:
            sample = self._with_proximal(model, sample, context)
        prepared, batch_stats = self.prepare(sample)
        self._kl.observe(batch_stats.get("kl_of_sequence", 0.0), int(batch_stats["n_trainable_rollouts"]))
        record = RecordedStep(context.step, prepared) if context.recorder.keeps else None
        prepared = record.batch if record is not None else prepared
        parts = self._minibatches(model, prepared, context) if context.step >= self._first_step else []
        results: list[TrainResult] = []
        for part in parts:
            objective = PolicyObjective(self.options, context.step, self._temperature, recorded=record is not None)
            result = model.engine.train_batch(part, objective, mb_spec=context.mb_spec)
            if not results:  # Later ones run after an update: theirs is no mismatch of engine and trainer.
                compared = counting(part, RL, PredictedTokens.of(part).mask)
                stats |= mismatch_statistics(result.kept[MISMATCH][compared])
            if record is not None:
                record.add(part, result.kept)
            results.append(result)
            if not self._guard.observe(result):
                break
        if record is not None:
            context.recorder.trained(
                record.rows(sample["packed_versions"] if "packed_versions" in sample.keys else None)
            )
        return {**batch_stats, **stats, **summary(results), **self._guard.verdict()}

    @property
    def _kl_of_proximal(self) -> bool:
        """Return whether the proximal policy stands for the behaviour policy in the KL part of the reward, or beside
        the teacher."""
        options = self.options
        by_teacher = options.needs_teacher and options.prox_logp_method == "recompute"
        return by_teacher or (options.recompute_logprob and options.kl_ctl != 0)

    def _needed_keys(self) -> tuple[str, ...]:
        versions = ("packed_versions",) if self.options.prox_logp_method == "loglinear" else ()
        truncated = ("seq_no_eos_mask",) if self.options.mask_too_long else ()
        return (*self.options.scored_keys, *versions, *truncated, *self.options.turn_keys)

    def _staleness(self, sample: SequenceSample, step: int) -> dict[str, float]:
        if "packed_versions" not in sample.keys:
            return {}
        tokens = PredictedTokens.of(sample)
        tokens = replace(tokens, mask=tokens.mask & valid_sequences(sample)[tokens.sequence])
        return staleness_statistics(sample["packed_versions"].cpu(), tokens, step)

    def _minibatches(self, model: Model, prepared: SequenceSample, context: CallContext) -> list[SequenceSample]:
        """Return what each update trains on. With several updates the proximal log-probabilities are computed here,
        before the first; with one they are those of its own forward pass."""
        options = self.options
        if options.n_updates > 1 and options.prox_logp_method == "recompute" and PROXIMAL not in prepared.keys:
            prepared = self._with_proximal(model, prepared, context, only=self._contributes(prepared))
        parts = updates_of(prepared, options.ppo_n_minibatches, options.sample_reuse, context.seed)
        return [chosen for part in parts if (chosen := self._trained_part(part)) is not None]

    def _with_proximal(
        self, model: Model, sample: SequenceSample, context: CallContext, only: Tensor | None = None
    ) -> SequenceSample:
        """Add the proximal log-probabilities. Only sequences in ``only``, bool (n sequences,), are scored."""
        scored = sample
        if only is not None:
            tokens = torch.from_numpy(sample.lengths("packed_input_ids").values)
            mask = sample["loss_mask"].cpu().bool() & torch.repeat_interleave(only, tokens)
            scored = replace_keys(sample, per_token={"loss_mask": mask})
        logprobs = model.engine.logprobs(scored, temperature=self._temperature, mb_spec=context.mb_spec)
        return replace_keys(sample, shifted={PROXIMAL: logprobs})

    def prepare(self, sample: SequenceSample) -> tuple[SequenceSample, dict[str, float]]:
        """Return the batch with ``advantages`` f32 (L-1) and with ``loss_mask`` False on invalid (and, with
        ``mask_too_long``, truncated) sequences; and statistics of the batch."""
        sample = counted(sample, self.options)
        trained, scores = TrainedTokens.of(sample, self.options), sample["rewards"].cpu().float()
        tokens, valid, mask = trained.tokens, trained.valid, trained.tokens.mask
        sampled = PredictedTokens.of(sample).mask & valid[tokens.sequence]  # Whether a limit cut them off or not.
        sampled_tokens = replace(tokens, mask=counting(sample, RL, sampled))
        kl = kl_of_behaviour(sample, self.options, mask)
        advantages, distilled = self._advantages(sample, trained, kl)
        lengths = torch.from_numpy(sample.lengths("packed_input_ids").values)
        token_mask = sample["loss_mask"].cpu().bool() & torch.repeat_interleave(trained.trainable, lengths)
        signal = torch.zeros(len(sample), dtype=torch.bool)
        signal[tokens.group[torch.unique(tokens.sequence[advantages != 0])]] = True
        out = replace_keys(
            sample.select(self._trained_keys(sample)),
            per_token={"loss_mask": token_mask},
            shifted={ADVANTAGES: advantages},
        )
        means, has = rollout_means(scores, valid, tokens.rollout)
        stats = {
            "reward_mean": float(means[has].mean()) if bool(has.any()) else 0.0,
            "reward_std": float(means[has].std()) if int(has.sum()) > 1 else 0.0,
            "groups_with_signal": float(signal.sum()),
            "n_groups": float(len(torch.unique(tokens.group))),
            **_length_statistics(sample, sampled_tokens, valid, self.options),
            **_entropy_statistics(sample, sampled_tokens),
            **self._kl_statistics(kl, trained),
            **distilled,
            **({"shared_states": shared_states(sample, trained)} if self.options.credit == "state" else {}),
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
        """Return the advantage of every token, f32 (L-1), 0 outside the mask, and what a teacher says of them."""
        options, mask = self.options, trained.tokens.mask
        advantages = torch.zeros(len(mask))
        if options.rl_weight:
            advantages = token_advantages(sample, options, trained, kl, self._kl.value)
            if options.adv_norm:
                advantages = normalise(advantages, mask)
        if not options.distill_weight:
            return advantages, {}
        by_teacher, apart = distillation(sample, options, mask)
        mixed = options.rl_weight * advantages + options.distill_weight * by_teacher
        return mixed, {"kl_teacher": float(apart.double().sum() / mask.sum().clamp(min=1))}

    def _kl_statistics(self, kl: Tensor, trained: TrainedTokens) -> dict[str, float]:
        """Return how many rollouts train, the weight of the KL term in the reward, and what it weighs, nats a rollout;
        the count alone without the term."""
        weighed, n = kl_of_rollouts(kl, trained)
        found = {"n_trainable_rollouts": float(n)}
        return found if self.options.kl_ctl == 0 else found | {"kl_ctl": self._kl.value, "kl_of_sequence": weighed}

    def _trained_keys(self, sample: SequenceSample) -> list[str]:
        """List the keys of the input that the loss reads. ``proximal_logprobs`` is one only if ``actor_inf`` was asked
        for it or this call computed it for the reward."""
        keys = ["packed_input_ids", "packed_logprobs", "packed_ref_logprobs", ROLLOUT_KEY, *COMPONENTS]
        if AGGREGATIONS[self.options.loss_agg].by_turn:
            keys.append(TURN_IDS)
        if self.options.needs_actor_inf or self._kl_of_proximal:
            keys.append(PROXIMAL)
        if self.options.prox_logp_method == "loglinear":
            keys.append("packed_versions")
        return [key for key in keys if key in sample.keys]

    def _trained_part(self, part: SequenceSample) -> SequenceSample | None:
        """Return the minibatch with its loss weights, without the sequences that cannot contribute; None if it is
        empty."""
        weights = component_weights(part, self.options.loss_agg, self.options.loss_scale_len or 1)
        return weighted_part(part, weights, self._contributes(part))

    def _contributes(self, part: SequenceSample) -> Tensor:
        """Return which sequences have a gradient, bool (n sequences,)."""
        tokens, options = PredictedTokens.of(part), self.options
        every_token_counts = options.kl_loss_coef != 0 or options.entropy_coef != 0 or not self._skip_zero
        if every_token_counts:
            return tokens.having(tokens.mask)
        counts = part[ADVANTAGES] != 0
        for key in TOKEN_TERMS:
            counts = counts | counting(part, key, tokens.mask)
        return tokens.having(tokens.mask & counts)

    def state_dict(self) -> dict[str, Any]:
        """Return the count of consecutive updates without a finite gradient, and the weight of the KL reward."""
        return {"nonfinite_in_a_row": self._guard.in_a_row, "kl_ctl": self._kl.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. Raises KeyError without ``nonfinite_in_a_row``; an older state has no
        ``kl_ctl``."""
        self._guard.in_a_row = int(state["nonfinite_in_a_row"])
        self._kl.value = float(state.get("kl_ctl", self._kl.value))


def _length_statistics(
    sample: SequenceSample, tokens: PredictedTokens, valid: Tensor, options: ResolvedOptions
) -> dict[str, float]:
    """Return how many tokens valid rollouts sampled, and the fractions of those rollouts in which a token limit ended a
    sequence, and whose length the reward punishes."""
    blank = torch.zeros(tokens.n_rollouts, dtype=torch.int64)
    has = torch.zeros(tokens.n_rollouts, dtype=torch.bool).index_fill(0, tokens.rollout[valid], True)
    count = blank.index_add(0, tokens.owner, tokens.mask.long())[has]
    if not len(count):
        return {}
    found = {"response_tokens_mean": float(count.double().mean()), "response_tokens_max": float(count.max())}
    if options.overlong_length is not None:
        free = options.overlong_length * (1 - options.overlong_buffer)
        found["overlong_fraction"] = float((count > free).double().mean())
    if "seq_no_eos_mask" in sample.keys:
        cut = blank.index_fill(0, tokens.rollout[valid & truncated_sequences(sample)], 1)
        found["too_long_fraction"] = float(cut[has].double().mean())
    return found


def _entropy_statistics(sample: SequenceSample, tokens: PredictedTokens) -> dict[str, float]:
    """Return an estimate of the mean entropy of the distributions that tokens were sampled from, in nats: the mean of
    -log p over the sampled tokens of valid sequences, {} without one."""
    if "packed_logprobs" not in sample.keys:
        return {}
    logprobs = sample["packed_logprobs"].cpu()[tokens.mask]
    return {"entropy_estimate": -float(logprobs.double().mean())} if len(logprobs) else {}


PLACE = "place"
"""The key that says where in the batch each predicted token of a minibatch stands, i64 (L-1)."""


class RecordedStep:
    """Is train step ``step`` on ``batch``, which has the keys of ``PolicyGradientInterface.prepare``. ``batch`` is the
    one to train on: its sequences may be cut into minibatches and left out as one likes."""

    def __init__(self, step: int, batch: SequenceSample) -> None:
        self._step = step
        tokens = PredictedTokens.of(batch)
        size = len(tokens.mask)
        self._tokens, self._advantages = tokens, batch[ADVANTAGES].cpu()
        self._behaviour = batch["packed_logprobs"].cpu()
        self._lengths = np.asarray(batch.lengths("packed_input_ids").values) - 1
        self.batch = replace_keys(batch, shifted={PLACE: torch.arange(size)})
        self._before, self._current = torch.full((size,), torch.nan), torch.full((size,), torch.nan)
        self._ratio, self._clipped = torch.ones(size), torch.zeros(size, dtype=torch.bool)
        self._updated = False

    def add(self, part: SequenceSample, kept: Mapping[str, Tensor]) -> None:
        """Take a minibatch that was trained on, and what its loss kept. A later pass replaces an earlier one."""
        place = part[PLACE].cpu()
        if PROXIMAL in part.keys:
            self._before[place] = part[PROXIMAL].cpu().float()
        elif not self._updated:
            self._before[place] = kept[CURRENT]
        self._updated = True
        self._current[place], self._ratio[place] = kept[CURRENT], kept[RATIO]
        self._clipped[place] = kept[CLIPPED] > 0

    def rows(self, versions: Tensor | None) -> TrainedRows:
        """Return what was collected; ``versions`` i32 (n,) sampled each token of the batch."""
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


N_BINS = 8
"""Bins of the histogram of head staleness; the last one counts everything from 7 on."""


def staleness_statistics(versions: Tensor, tokens: PredictedTokens, step: int) -> dict[str, float]:
    """Return the staleness u - v of the rollouts of a train step, u = ``step`` being the version of the weights that
    train (docs/reference/dataflow.md 1). ``versions`` i32 (n,) is the version that sampled each predicted token, -1 if
    unknown; only tokens inside the mask count.

    The head is a rollout's oldest token, the tail its newest: ``staleness/head_mean, head_max, tail_mean``, and
    ``staleness/hist_0`` ... ``hist_6``, ``hist_7plus``: fractions of rollouts by head staleness. The result is empty
    when none has a token of known version.
    """
    known = tokens.mask & (versions >= 0)
    rollout, lag = tokens.owner[known], step - versions[known].long()
    if not len(lag):
        return {}
    blank = torch.zeros(tokens.n_rollouts, dtype=torch.int64)
    head = blank.scatter_reduce(0, rollout, lag, "amax", include_self=False)
    tail = blank.scatter_reduce(0, rollout, lag, "amin", include_self=False)
    has = torch.zeros(tokens.n_rollouts, dtype=torch.bool).index_fill(0, rollout, True)
    head, tail = head[has], tail[has]
    bins = torch.bincount(head.clamp(0, N_BINS - 1), minlength=N_BINS).double() / len(head)
    names = [f"hist_{lag}" for lag in range(N_BINS - 1)] + [f"hist_{N_BINS - 1}plus"]
    found = {
        "head_mean": float(head.double().mean()),
        "head_max": float(head.max()),
        "tail_mean": float(tail.double().mean()),
        **dict(zip(names, bins.tolist(), strict=True)),
    }
    return {f"staleness/{name}": value for name, value in found.items()}


def mismatch_statistics(distances: Tensor) -> dict[str, float]:
    """Return quantiles of ``distances`` (n,), |behaviour - proximal log-probability| of each trained token:
    ``mismatch/abs_p50, abs_p99, abs_max``; {} without a token. With equal versions they measure how far engine and
    trainer disagree; with older ones, how far the policy has moved as well."""
    if not len(distances):
        return {}
    ordered = distances.sort().values
    at = {"p50": len(ordered) // 2, "p99": (99 * len(ordered)) // 100, "max": len(ordered) - 1}
    return {f"mismatch/abs_{name}": float(ordered[index]) for name, index in at.items()}
