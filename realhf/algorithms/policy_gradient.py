"""The policy-gradient train step: GRPO and its relatives (dataflow spec section 10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from realhf.algorithms.advantages import normalise
from realhf.algorithms.losses import LossTerms, TokenLoss, kl_estimate, token_weights, weighted_sum
from realhf.algorithms.nonfinite import NonFiniteGuard
from realhf.algorithms.presets import resolve
from realhf.algorithms.sequences import PredictedTokens, replace_keys, select_sequences
from realhf.api.config import PPOConfig
from realhf.api.model import CallContext, Model, TrainResult
from realhf.api.registry import advantage_estimators, policy_losses
from realhf.api.sample import SequenceSample

_ADVANTAGES, _WEIGHTS = "advantages", "loss_weights"


class PolicyGradientInterface:
    """One train step from ``packed_input_ids, loss_mask, packed_logprobs, rewards`` and, where present,
    ``outcome`` (0: valid), ``seq_no_eos_mask`` and ``packed_ref_logprobs``.

    Advantages are computed once per step from the groups (the sequences of one sample); then
    ``ppo_n_minibatches`` optimizer steps follow. ``temperature`` is the sampling temperature;
    ``loss_scale_len`` the divisor of ``loss_agg=constant`` (normally gen.max_new_tokens).

    A sequence without any advantage contributes nothing to a pure policy gradient, so it is left out of
    the forward and backward pass; the normalisers T and S still count it. With a KL term or an entropy
    bonus such a sequence does contribute and stays in. ``skip_zero_advantage=False`` keeps all (the
    gradient is the same; tests compare both).
    """

    def __init__(
        self,
        ppo: PPOConfig | Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        loss_scale_len: int = 1024,
        skip_zero_advantage: bool = True,
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive to train, got {temperature}")
        self.options = resolve(ppo if ppo is not None else PPOConfig(), loss_scale_len=loss_scale_len)
        self._temperature = temperature
        self._skip_zero = skip_zero_advantage
        self._loss = policy_losses.get(self.options.loss)
        self._guard = NonFiniteGuard(self.options.max_nonfinite_steps)

    def train_step(self, model: Model, sample: SequenceSample, context: CallContext) -> dict[str, Any]:
        """One step; advances ``model.engine.version`` by one. Raises ValueError on a missing key. After
        ``max_nonfinite_steps`` updates in a row without a finite gradient the statistic ``stop`` tells so."""
        prepared, stats = self.prepare(sample)
        n = self.options.ppo_n_minibatches
        parts = [prepared] if n == 1 else prepared.shuffled(context.seed).split_balanced(n)[0]
        results: list[TrainResult] = []
        for part in parts:
            trained = self._trained_part(part)
            if trained is None:
                continue
            result = model.engine.train_batch(
                trained,
                self.loss,
                temperature=self._temperature,
                mb_spec=context.mb_spec,
                with_entropy=self.options.entropy_coef != 0,
            )
            results.append(result)
            if not self._guard.observe(result):
                break
        model.engine.version += 1
        return {**stats, **_summary(results), **self._guard.verdict()}

    def prepare(self, sample: SequenceSample) -> tuple[SequenceSample, dict[str, float]]:
        """The batch with ``advantages`` f32 (L-1) and ``loss_mask`` False on invalid (and, with
        ``mask_too_long``, truncated) sequences; and statistics of the batch."""
        valid = _valid(sample)
        scores, tokens = sample["rewards"].cpu().float(), PredictedTokens.of(sample)
        estimator = advantage_estimators.get(self.options.adv_estimator)
        per_sequence = estimator(scores, valid, tokens.group)
        trainable = valid & ~_truncated(sample) if self.options.mask_too_long else valid
        mask = tokens.mask & trainable[tokens.sequence]
        advantages = torch.where(mask, per_sequence[tokens.sequence], 0.0)
        if self.options.kl_ctl != 0:
            advantages = advantages + self._kl_to_go(sample, mask, tokens)
        if self.options.adv_norm:
            advantages = normalise(advantages, mask)
        lengths = torch.from_numpy(sample.lengths("packed_input_ids").values)
        token_mask = sample["loss_mask"].cpu().bool() & torch.repeat_interleave(trainable, lengths)
        signal = torch.zeros(len(sample), dtype=torch.bool)
        signal[tokens.group[torch.unique(tokens.sequence[advantages != 0])]] = True
        known = [
            k for k in ("packed_input_ids", "packed_logprobs", "packed_ref_logprobs") if k in sample.keys
        ]
        out = replace_keys(
            sample.select(known), per_token={"loss_mask": token_mask}, shifted={_ADVANTAGES: advantages}
        )
        stats = {
            "reward_mean": float(scores[valid].double().mean()) if bool(valid.any()) else 0.0,
            "groups_with_signal": float(signal.sum()),
            "n_groups": float(len(torch.unique(tokens.group))),
            "n_sequences": float(tokens.n_sequences),
            "n_invalid": float((~valid).sum()),
            "n_tokens": float(mask.sum()),
        }
        return out, stats

    def _kl_to_go(self, sample: SequenceSample, mask: Tensor, tokens: PredictedTokens) -> Tensor:
        """Reversed cumulative sum of -kl_ctl * KL(old, ref) over each sequence's trainable tokens, (L-1)."""
        old = torch.where(mask, sample["packed_logprobs"].cpu(), 0.0)
        ref = torch.where(mask, _reference(sample).cpu(), 0.0)
        reward = -self.options.kl_ctl * kl_estimate(old, ref, self.options.kl_estimator).double()
        reward = torch.where(mask, reward, 0.0)
        total = torch.zeros(tokens.n_sequences, dtype=torch.float64).index_add(0, tokens.sequence, reward)
        running = reward.cumsum(0)
        before = total.cumsum(0) - total
        to_go = total[tokens.sequence] - (running - before[tokens.sequence]) + reward
        return torch.where(mask, to_go, 0.0).float()

    def _trained_part(self, part: SequenceSample) -> SequenceSample | None:
        """The minibatch with its loss weights, less the sequences that cannot contribute; None if empty."""
        tokens, options = PredictedTokens.of(part), self.options
        weights = token_weights(
            tokens.mask, tokens.sequence, tokens.n_sequences, options.loss_agg, options.loss_scale_len
        )
        every_token_counts = options.kl_loss_coef != 0 or options.entropy_coef != 0 or not self._skip_zero
        counts = tokens.mask if every_token_counts else tokens.mask & (part[_ADVANTAGES] != 0)
        keep = torch.zeros(tokens.n_sequences, dtype=torch.bool)
        keep[tokens.sequence[counts]] = True
        return select_sequences(replace_keys(part, shifted={_WEIGHTS: weights}), keep)

    def loss(
        self, logprobs: Tensor, part: SequenceSample, entropy: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of a microbatch and sums of its statistics (a ``LossFn``)."""
        tokens, device = PredictedTokens.of(part), logprobs.device
        mask = tokens.mask.to(device)
        terms = LossTerms(
            logprobs,
            part["packed_logprobs"].to(device),
            part[_ADVANTAGES].to(device),
            mask,
            tokens.sequence.to(device),
            tokens.n_sequences,
        )
        weights = part[_WEIGHTS].to(device)
        policy: TokenLoss = self._loss(terms, self.options)
        total = weighted_sum(policy.loss, weights, mask)
        stats = _policy_statistics(terms, policy)
        if "packed_ref_logprobs" in part.keys:
            ref = torch.where(mask, part["packed_ref_logprobs"].to(device), 0.0)
            current = torch.where(mask, logprobs, 0.0)
            if self.options.kl_loss_coef != 0:
                kl = kl_estimate(current, ref, self.options.kl_estimator)
                total = total + self.options.kl_loss_coef * weighted_sum(kl, weights, mask)
            stats["kl_ref"] = float(kl_estimate(current.detach(), ref, "k3").sum())
        elif self.options.needs_reference:
            _reference(part)
        if entropy is not None:
            total = total - self.options.entropy_coef * weighted_sum(entropy, weights, mask)
            stats["entropy"] = float(torch.where(mask, entropy.detach(), 0.0).sum())
        return total, stats

    def state_dict(self) -> dict[str, Any]:
        return {"nonfinite_in_a_row": self._guard.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._guard.in_a_row = int(state["nonfinite_in_a_row"])


def _valid(sample: SequenceSample) -> Tensor:
    if "outcome" not in sample.keys:
        return torch.ones(len(sample["rewards"]), dtype=torch.bool)
    return sample["outcome"].cpu() == 0


def _truncated(sample: SequenceSample) -> Tensor:
    if "seq_no_eos_mask" not in sample.keys:
        raise ValueError("ppo.mask_too_long needs the key seq_no_eos_mask")
    return sample["seq_no_eos_mask"].cpu().bool()


def _reference(sample: SequenceSample) -> Tensor:
    if "packed_ref_logprobs" not in sample.keys:
        raise ValueError("a KL term (kl_ctl, kl_loss_coef) needs the key packed_ref_logprobs")
    return sample["packed_ref_logprobs"]


def _policy_statistics(terms: LossTerms, policy: TokenLoss) -> dict[str, float]:
    """Sums over the microbatch's trainable tokens; ``mismatch`` compares engine and trainer."""
    mask = terms.mask
    old = torch.where(mask, terms.old, 0.0)
    current = torch.where(mask, terms.logprobs.detach(), 0.0)
    return {
        "mismatch_kl": float(kl_estimate(old, current, "k3").double().sum()),
        "mismatch_abs": float((old - current).abs().double().sum()),
        "ratio_mean": float(torch.where(mask, policy.ratio, 0.0).double().sum()),
        "ratio_max": float(policy.ratio[mask].max()) if bool(mask.any()) else 0.0,
        "clip_fraction": float(policy.clipped.sum()),
        "dual_clip_fraction": float(policy.dual_clipped.sum()),
        "clamped_exponents": float(policy.clamped),
        "n_trained_tokens": float(mask.sum()),
    }


_OF_FIRST = ("mismatch_kl", "mismatch_abs")
_TOTALS = ("clamped_exponents", "n_trained_tokens")


def _summary(results: list[TrainResult]) -> dict[str, float]:
    """Statistics of a train step. Per-token means, losses averaged over minibatches; the mismatch is that of
    the first minibatch, the only one that ran before any update."""
    skipped = float(sum(result.skipped for result in results))
    out = {"n_updates": len(results) - skipped, "skipped": skipped, "n_trained_tokens": 0.0, "grad_norm": 0.0}
    if not results:
        return out
    n_tokens = sum(result.stats.get("n_trained_tokens", 0.0) for result in results)
    for name in sorted({name for result in results for name in result.stats}):
        values = [result.stats[name] for result in results if name in result.stats]
        if name in _TOTALS:
            out[name] = sum(values)
        elif name in _OF_FIRST:
            out[name] = values[0] / max(1.0, results[0].stats["n_trained_tokens"])
        elif name == "ratio_max":
            out[name] = max(values)
        elif name in ("loss", "lr"):
            out[name] = sum(values) / len(values)
        else:
            out[name] = sum(values) / max(1.0, n_tokens)
    out["grad_norm"] = sum(result.grad_norm for result in results) / len(results)
    return out
