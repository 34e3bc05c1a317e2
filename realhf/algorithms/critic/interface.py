"""Runs the critic of PPO: the values of a batch, and the step in which the critic learns from its returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from realhf.algorithms.aggregation import token_weights
from realhf.algorithms.critic.options import CriticOptions
from realhf.algorithms.critic.value_loss import BEFORE, TARGETS, WEIGHTS, ValueObjective
from realhf.algorithms.critic.value_norm import ReturnMoments
from realhf.algorithms.minibatches import minibatches
from realhf.algorithms.nonfinite import NonFiniteGuard
from realhf.algorithms.policy_gradient.gae import ValueEstimate
from realhf.algorithms.policy_gradient.kl_controller import KLController
from realhf.algorithms.policy_gradient.options import PolicyGradientOptions
from realhf.algorithms.policy_gradient.resolve import resolve
from realhf.algorithms.policy_gradient.token_advantages import (
    TrainedTokens,
    counted,
    kl_of_behaviour,
    kl_of_rollouts,
    value_estimate,
)
from realhf.algorithms.sequences import PredictedTokens, replace_keys, select_sequences
from realhf.api.keys import ROLLOUT_KEY
from realhf.api.model import CallContext, ForwardOutputs, Model, TrainResult
from realhf.api.sample import SequenceSample

VALUES = "values"


class CriticInterface:
    """Is the interface of both calls of a critic, ``critic_inf`` and ``critic_train``: one object serves both, because
    predictions are in units of the returns that training saw (``value_norm``).

    ``inference`` computes ``values`` f32 (L-1) from ``packed_input_ids`` and ``loss_mask``: the value of the state in
    which every trainable token was sampled, in units of rewards, 0 elsewhere. ``train_step`` reads the keys of
    ``PolicyGradientInterface`` that advantages are made of, ``values`` among them, and computes the same advantages
    with the same ``ppo`` options; a token's return is its advantage plus its value.
    """

    def __init__(
        self,
        ppo: PolicyGradientOptions | Mapping[str, Any],
        critic: CriticOptions | Mapping[str, Any] | None = None,
        loss_scale_len: int | None = None,
    ) -> None:
        self.options = resolve(ppo, loss_scale_len=loss_scale_len)
        if not self.options.needs_values:
            raise ValueError(f"ppo.adv_estimator={self.options.adv_estimator}: takes no values of a critic; use gae")
        self.critic = critic if isinstance(critic, CriticOptions) else CriticOptions(**dict(critic or {}))
        self._moments = ReturnMoments(self.critic.value_norm_decay)
        self._guard = NonFiniteGuard(self.options.max_nonfinite_steps)
        self._kl = KLController(self.options)

    def inference(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return the sample of ``values`` and the statistic ``n_tokens``. Raises ValueError on a model without a value
        head."""
        predicted = model.engine.forward(sample, _predicted, mb_spec=context.mb_spec)
        values = self._moments.restored(predicted) if self.critic.value_norm else predicted
        values = torch.where(PredictedTokens.of(sample).mask.to(values.device), values, 0.0)
        lengths = [[length - 1 for length in inner] for inner in sample.seqlens["packed_input_ids"]]
        out = SequenceSample.from_tensors(sample.ids, {VALUES: values}, {VALUES: lengths})
        return out, {"n_tokens": float(sample.n_tokens("packed_input_ids"))}

    def train_step(self, model: Model, sample: SequenceSample, context: CallContext) -> dict[str, Any]:
        """Train one step: moments of the returns first, then every minibatch. Raises ValueError on a missing key, and
        on a value or reward that is not finite. After ``max_nonfinite_steps`` consecutive updates without a finite
        gradient the statistic ``stop`` holds the reason."""
        sample = counted(sample, self.options)
        trained = TrainedTokens.of(sample, self.options)
        kl = kl_of_behaviour(sample, self.options, trained.tokens.mask)
        estimate = value_estimate(sample, self.options, trained, kl, self._kl.value)
        self._kl.observe(*kl_of_rollouts(kl, trained))
        values = sample[VALUES].cpu().float()
        stats = _statistics(values, estimate)
        results = []
        for part in self._minibatches(self._prepared(sample, values, estimate), context):
            result = model.engine.train_batch(part, ValueObjective(self.critic.value_clip), mb_spec=context.mb_spec)
            results.append(result)
            if not self._guard.observe(result):
                break
        norm = {"return_running_mean": self._moments.mean, "return_running_std": self._moments.std}
        return {
            **stats,
            **(norm if self.critic.value_norm else {}),
            **_summary(results),
            **self._guard.verdict(),
        }

    def _prepared(self, sample: SequenceSample, values: Tensor, estimate: ValueEstimate) -> SequenceSample:
        """Return tokens, targets and old predictions, with ``loss_mask`` True where the critic learns a return."""
        before, targets = values, estimate.returns
        if self.critic.value_norm:
            before = self._moments.normalised(values)  # What the critic said, in the units it said it in.
            self._moments.observe(targets[estimate.valued])
            targets = self._moments.normalised(targets)
        mask = _per_token(sample, estimate.valued)
        return replace_keys(
            sample.select(sample.keys & {"packed_input_ids", ROLLOUT_KEY}),
            per_token={"loss_mask": mask},
            shifted={TARGETS: targets, BEFORE: before},
        )

    def _minibatches(self, prepared: SequenceSample, context: CallContext) -> list[SequenceSample]:
        """Return what each update trains on, with the weight of every position."""
        n = self.critic.n_minibatches or self.options.ppo_n_minibatches
        passes = self.critic.sample_reuse or self.options.sample_reuse
        parts = [prepared]
        if n * passes > 1:
            parts = [part for number in range(passes) for part in minibatches(prepared, n, (context.seed, number))]
        weighted = []
        for part in parts:
            tokens = PredictedTokens.of(part)
            weights = token_weights(tokens.mask, tokens.sequence, tokens.n_sequences, "token_mean")
            keep = torch.zeros(tokens.n_sequences, dtype=torch.bool)
            keep[tokens.sequence[tokens.mask]] = True
            part = part.select(part.keys - {ROLLOUT_KEY})
            chosen = select_sequences(replace_keys(part, shifted={WEIGHTS: weights}), keep)
            weighted += [] if chosen is None else [chosen]
        return weighted

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of the returns, the weight of the KL reward, and the count of consecutive updates without
        a finite gradient."""
        return {
            "moments": self._moments.state_dict(),
            "kl_ctl": self._kl.value,
            "nonfinite_in_a_row": self._guard.in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. Raises KeyError where a part is missing."""
        self._moments.load_state_dict(state["moments"])
        self._kl.value = float(state["kl_ctl"])
        self._guard.in_a_row = int(state["nonfinite_in_a_row"])


def _predicted(outputs: ForwardOutputs, part: SequenceSample) -> Tensor:
    del part
    return outputs.values()


def _per_token(sample: SequenceSample, shifted: Tensor) -> Tensor:
    """Return a mask over predicted tokens, bool (L-1), as one over tokens, bool (L)."""
    lengths = torch.from_numpy(sample.lengths("packed_input_ids").values)
    first = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    first[(lengths.cumsum(0) - lengths)[lengths > 0]] = True
    mask = torch.zeros_like(first)
    mask[~first] = shifted
    return mask


def _statistics(values: Tensor, estimate: ValueEstimate) -> dict[str, float]:
    """Return what values and returns say of each other, in units of rewards: {} where nothing is learned.
    ``explained_variance`` is 1 - Var(return - value) / Var(return), 0 where all returns are equal."""
    value, target = values[estimate.valued].double(), estimate.returns[estimate.valued].double()
    if not len(value):
        return {}
    spread = float(target.var(correction=0))
    error = float((target - value).var(correction=0))
    return {
        "value_mean": float(value.mean()),
        "return_mean": float(target.mean()),
        "return_std": spread**0.5,
        "value_error": float((target - value).square().mean()) ** 0.5,
        "explained_variance": 1 - error / spread if spread > 0 else 0.0,
        "n_values": float(len(value)),
    }


def _summary(results: list[TrainResult]) -> dict[str, float]:
    """Return the means over the updates of a step; ``loss`` is half the mean squared error in the critic's units."""
    skipped = float(sum(result.skipped for result in results))
    out = {"n_updates": len(results) - skipped, "skipped": skipped, "grad_norm": 0.0}
    if not results:
        return out
    n_tokens = sum(result.stats.get("n_trained_tokens", 0.0) for result in results)
    clipped = sum(result.stats.get("value_clip_fraction", 0.0) for result in results)
    for name in ("loss", "lr"):
        values = [result.stats[name] for result in results if name in result.stats]
        if values:
            out[name] = sum(values) / len(values)
    out["value_clip_fraction"] = clipped / max(1.0, n_tokens)
    out["grad_norm"] = sum(result.grad_norm for result in results) / len(results)
    return out
