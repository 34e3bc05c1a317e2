"""Runs the critic of PPO: the values of a batch, and the step in which the critic learns from its returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from realhf.algorithms.advantages import ValueEstimate
from realhf.algorithms.options import PolicyGradientOptions
from realhf.algorithms.resolution import resolve
from realhf.algorithms.role_options import CriticOptions
from realhf.algorithms.token_advantages import (
    KLController,
    TrainedTokens,
    counted,
    kl_of_behaviour,
    kl_of_rollouts,
    value_estimate,
)
from realhf.algorithms.train_step import (
    WEIGHTS,
    NonFiniteGuard,
    PredictedTokens,
    replace_keys,
    shifted_sample,
    summary,
    token_weights,
    updates_of,
    weighted_part,
    weighted_sum,
)
from realhf.api.keys import ROLLOUT_KEY
from realhf.api.model import CallContext, ForwardOutputs, Model
from realhf.api.sample import SequenceSample

VALUES = "values"
_REPORTED = ("n_updates", "skipped", "grad_norm", "loss", "lr", "value_clip_fraction")
"""Of an update's statistics; ``loss`` is half the mean squared error in the critic's units."""


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
        predicted = model.engine.forward(sample, lambda outputs, _: outputs.values(), mb_spec=context.mb_spec)
        values = self._moments.restored(predicted) if self.critic.value_norm else predicted
        values = torch.where(PredictedTokens.of(sample).mask.to(values.device), values, 0.0)
        return shifted_sample(sample, VALUES, values), {"n_tokens": float(sample.n_tokens("packed_input_ids"))}

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
            **{name: value for name, value in summary(results).items() if name in _REPORTED},
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
        weighted = []
        for part in updates_of(prepared, n, passes, context.seed):
            tokens = PredictedTokens.of(part)
            weights = token_weights(tokens, "token_mean")
            chosen = weighted_part(part, {WEIGHTS: weights}, tokens.having(tokens.mask))
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


TARGETS, BEFORE = "returns", "values"


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


_SMALLEST_STD = 1e-2


class ReturnMoments:
    """Holds exponential means of the returns and of their squares, corrected for having started at nothing:
    ``observe`` gives the newest batch the share 1 - ``decay``. Before the first batch the mean is 0 and the standard
    deviation 1; it is never below 0.01. fp64."""

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"critic.value_norm_decay={decay}: must be at least 0 and below 1")
        self._decay = decay
        self._sum = self._squares = self._weight = 0.0

    def observe(self, returns: Tensor) -> None:
        """Take in the returns of a batch, (n,); an empty one changes nothing. Raises ValueError where one is not
        finite."""
        if not len(returns):
            return
        values = returns.double()
        mean, square = float(values.mean()), float(values.square().mean())
        if not math.isfinite(mean) or not math.isfinite(square):
            raise ValueError("critic: a return is not finite")
        share = 1 - self._decay
        self._sum += share * (mean - self._sum)
        self._squares += share * (square - self._squares)
        self._weight += share * (1 - self._weight)

    @property
    def mean(self) -> float:
        """The mean of the returns so far."""
        return self._sum / self._weight if self._weight else 0.0

    @property
    def std(self) -> float:
        """The standard deviation of the returns so far, at least 0.01."""
        if not self._weight:
            return 1.0
        return max(_SMALLEST_STD, math.sqrt(max(0.0, self._squares / self._weight - self.mean**2)))

    def normalised(self, values: Tensor) -> Tensor:
        """Return ``values`` in the units that the critic predicts in, f32 of the same shape."""
        return ((values.double() - self.mean) / self.std).float()

    def restored(self, predicted: Tensor) -> Tensor:
        """Return what the critic predicted in the units of rewards, f32 of the same shape."""
        return (predicted.double() * self.std + self.mean).float()

    def state_dict(self) -> dict[str, Any]:
        """Return the moments."""
        return {"sum": self._sum, "squares": self._squares, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. Raises KeyError where one is missing."""
        self._sum, self._squares, self._weight = (float(state[name]) for name in ("sum", "squares", "weight"))
