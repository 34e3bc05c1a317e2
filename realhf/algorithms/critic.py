"""Critic of PPO: inference of the values of a batch, and the train step on its returns."""

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
    apply_count_option,
    kl_of_behaviour,
    kl_of_rollouts,
    value_estimate,
)
from realhf.algorithms.train_step import (
    WEIGHTS,
    NonFiniteGuard,
    PredictedTokens,
    build_shifted_sample,
    replace_keys,
    select_weighted_part,
    split_updates,
    summary,
    token_weights,
    weighted_sum,
)
from realhf.api.keys import ROLLOUT_KEY
from realhf.api.model import CallContext, ForwardOutputs, Model
from realhf.api.sample import SequenceSample

VALUES = "values"
"""Key of the value of the state in which each predicted token was sampled, f32 (L-1), units of
rewards."""
TARGETS = "returns"
"""Key of the returns on which a minibatch trains, f32 (L-1), units of the critic's predictions."""
BEFORE = "values"
"""Key of a minibatch's predictions from before the step, f32 (L-1), units of the critic's
predictions."""
_MIN_STD = 1e-2
"""Lower bound of the standard deviation of the returns, which prevents a division by 0 if all
returns are equal."""
_REPORTED = ("n_updates", "skipped", "grad_norm", "loss", "lr", "value_clip_fraction")
"""Statistics of the updates that are reported; ``loss`` is half the mean squared error in the
critic's units."""


class CriticInterface:
    """Interface of both calls of a critic, ``critic_inf`` and ``critic_train``.

    One object serves both, because predictions are normalised by the moments of the returns that
    were trained on (``value_norm``).

    ``inference`` computes ``values`` f32 (L-1) from ``packed_input_ids`` and ``loss_mask``: the
    value of the state in which every trainable token was sampled, in units of rewards, 0 elsewhere.
    ``train_step`` reads the keys that ``PolicyGradientInterface`` computes advantages from,
    including ``values``, and computes the same advantages with the same ``ppo`` options. The return
    of a token is its advantage plus its value.
    """

    def __init__(
        self,
        ppo: PolicyGradientOptions | Mapping[str, Any],
        critic: CriticOptions | Mapping[str, Any] | None = None,
        loss_scale_len: int | None = None,
    ) -> None:
        self.options = resolve(ppo, loss_scale_len=loss_scale_len)
        if not self.options.needs_values:
            raise ValueError(
                f"ppo.adv_estimator={self.options.adv_estimator}: takes no values of a critic; use "
                f"gae"
            )
        self.critic = (
            critic if isinstance(critic, CriticOptions) else CriticOptions(**dict(critic or {}))
        )
        self._moments = ReturnMoments(self.critic.value_norm_decay)
        self._guard = NonFiniteGuard(self.options.max_nonfinite_steps)
        self._kl = KLController(self.options)

    def inference(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return the sample with ``values``, and the statistic ``n_tokens``.

        Raises ValueError for a model without a value head.
        """
        predicted = model.engine.forward(
            sample, lambda outputs, _: outputs.values(), mb_spec=context.mb_spec
        )
        values = self._moments.denormalise(predicted) if self.critic.value_norm else predicted
        values = torch.where(
            PredictedTokens.from_sample(sample).mask.to(values.device), values, 0.0
        )
        return build_shifted_sample(sample, VALUES, values), {
            "n_tokens": float(sample.n_tokens("packed_input_ids"))
        }

    def train_step(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> dict[str, Any]:
        """Train one step: update the moments of the returns, then train on every minibatch.

        Returns statistics. After ``max_nonfinite_steps`` consecutive updates without a finite
        gradient the statistic ``stop`` contains the reason. Raises ValueError for a missing key,
        and for a value or reward that is not finite.
        """
        sample = apply_count_option(sample, self.options)
        trained = TrainedTokens.from_sample(sample, self.options)
        kl = kl_of_behaviour(sample, self.options, trained.tokens.mask)
        estimate = value_estimate(sample, self.options, trained, kl, self._kl.value)
        self._kl.observe(*kl_of_rollouts(kl, trained))
        values = sample[VALUES].cpu().float()
        stats = _value_statistics(values, estimate)
        results = []
        for part in self._minibatches(self._prepare(sample, values, estimate), context):
            result = model.engine.train_batch(
                part, ValueObjective(self.critic.value_clip), mb_spec=context.mb_spec
            )
            results.append(result)
            if not self._guard.observe(result):
                break
        running = {
            "return_running_mean": self._moments.mean,
            "return_running_std": self._moments.std,
        }
        return {
            **stats,
            **(running if self.critic.value_norm else {}),
            **{name: value for name, value in summary(results).items() if name in _REPORTED},
            **self._guard.stop_statistics(),
        }

    def _prepare(
        self, sample: SequenceSample, values: Tensor, estimate: ValueEstimate
    ) -> SequenceSample:
        """Return tokens, targets and old predictions, with ``loss_mask`` True where a return is
        trained on.

        Also updates the moments of the returns.
        """
        before = values
        targets = estimate.returns
        if self.critic.value_norm:
            # The old predictions were made with the moments from before this step.
            before = self._moments.normalise(values)
            self._moments.observe(targets[estimate.valued])
            targets = self._moments.normalise(targets)
        mask = _unshift_mask(sample, estimate.valued)
        return replace_keys(
            sample.select(sample.keys & {"packed_input_ids", ROLLOUT_KEY}),
            per_token={"loss_mask": mask},
            shifted={TARGETS: targets, BEFORE: before},
        )

    def _minibatches(self, prepared: SequenceSample, context: CallContext) -> list[SequenceSample]:
        """Return the minibatch of each update with the loss weight of every position, leaving out
        empty minibatches."""
        n = self.critic.n_minibatches or self.options.ppo_n_minibatches
        passes = self.critic.sample_reuse or self.options.sample_reuse
        minibatches = []
        for part in split_updates(prepared, n, passes, context.seed):
            tokens = PredictedTokens.from_sample(part)
            weights = token_weights(tokens, "token_mean")
            weighted = select_weighted_part(
                part, {WEIGHTS: weights}, tokens.sequences_with(tokens.mask)
            )
            if weighted is not None:
                minibatches.append(weighted)
        return minibatches

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of the returns, the weight of the KL reward and the count of
        consecutive non-finite updates."""
        return {
            "moments": self._moments.state_dict(),
            "kl_ctl": self._kl.value,
            "nonfinite_in_a_row": self._guard.in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of ``state_dict``. Raises KeyError for a missing entry."""
        self._moments.load_state_dict(state["moments"])
        self._kl.value = float(state["kl_ctl"])
        self._guard.in_a_row = int(state["nonfinite_in_a_row"])


def _unshift_mask(sample: SequenceSample, shifted: Tensor) -> Tensor:
    """Convert a mask over predicted tokens, bool (L-1), to a mask over all tokens, bool (L)."""
    lengths = torch.from_numpy(sample.lengths("packed_input_ids").values)
    is_first = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    is_first[(lengths.cumsum(0) - lengths)[lengths > 0]] = True
    mask = torch.zeros_like(is_first)
    mask[~is_first] = shifted
    return mask


def _value_statistics(values: Tensor, estimate: ValueEstimate) -> dict[str, float]:
    """Return statistics of values and returns in units of rewards; {} without a trained return.

    ``explained_variance`` is 1 - Var(return - value) / Var(return), 0 if all returns are equal.
    """
    value = values[estimate.valued].double()
    target = estimate.returns[estimate.valued].double()
    if not len(value):
        return {}
    return_variance = float(target.var(correction=0))
    error_variance = float((target - value).var(correction=0))
    return {
        "value_mean": float(value.mean()),
        "return_mean": float(target.mean()),
        "return_std": return_variance**0.5,
        "value_error": float((target - value).square().mean()) ** 0.5,
        "explained_variance": 1 - error_variance / return_variance if return_variance > 0 else 0.0,
        "n_values": float(len(value)),
    }


def value_loss(
    predicted: Tensor, before: Tensor, target: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the clipped value loss, f32 (n,), and whether its clipped term determines it, bool
    (n,).

    The loss is max((v - R)^2, (clip(v, v_old +- clip) - R)^2) / 2, without ``clip`` (v - R)^2 / 2.
    Source: Schulman et al. 2017, the reference implementation of PPO.
    """
    unclipped = (predicted - target).square()
    if clip is None:
        return unclipped / 2, torch.zeros_like(unclipped, dtype=torch.bool)
    clipped = (
        torch.minimum(torch.maximum(predicted, before - clip), before + clip) - target
    ).square()
    return torch.maximum(unclipped, clipped) / 2, clipped > unclipped


class ValueObjective:
    """``LossFn`` of a minibatch of the critic.

    Reads ``returns``, ``values`` (the predictions before the step), both in the units of the
    critic's predictions, and ``loss_weights``, all f32 (L-1). ``loss_mask`` selects the positions.
    """

    def __init__(self, clip: float | None) -> None:
        self._clip = clip

    def __call__(
        self, outputs: ForwardOutputs, part: SequenceSample
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a microbatch (scalar) and the sums of its statistics over
        positions."""
        predicted = outputs.values()
        device = predicted.device
        mask = PredictedTokens.from_sample(part).mask.to(device)
        target, before, weights = (part[key].to(device) for key in (TARGETS, BEFORE, WEIGHTS))
        losses, clipped = value_loss(predicted, before, target, self._clip)
        stats = {
            "value_clip_fraction": float((clipped & mask).sum()),
            "n_trained_tokens": float(mask.sum()),
        }
        return weighted_sum(losses, weights, mask), stats


class ReturnMoments:
    """Bias-corrected exponential moving moments of the returns, fp64.

    A batch enters with the weight 1 - ``decay``. Before the first batch the mean is 0 and the
    standard deviation 1; it is never below 0.01.
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"critic.value_norm_decay={decay}: must be at least 0 and below 1")
        self._decay = decay
        self._sum = self._squares = self._weight = 0.0

    def observe(self, returns: Tensor) -> None:
        """Update the moments with the returns of a batch, (n,). An empty batch changes nothing.

        Raises ValueError for a return that is not finite.
        """
        if not len(returns):
            return
        values = returns.double()
        mean = float(values.mean())
        mean_square = float(values.square().mean())
        if not math.isfinite(mean) or not math.isfinite(mean_square):
            raise ValueError("critic: a return is not finite")
        # All three start at 0. Dividing by the weight corrects the bias towards 0, as in Adam.
        share = 1 - self._decay
        self._sum += share * (mean - self._sum)
        self._squares += share * (mean_square - self._squares)
        self._weight += share * (1 - self._weight)

    @property
    def mean(self) -> float:
        """Moving mean of the returns."""
        return self._sum / self._weight if self._weight else 0.0

    @property
    def std(self) -> float:
        """Moving standard deviation of the returns, at least 0.01."""
        if not self._weight:
            return 1.0
        return max(_MIN_STD, math.sqrt(max(0.0, self._squares / self._weight - self.mean**2)))

    def normalise(self, values: Tensor) -> Tensor:
        """Convert ``values`` from units of rewards to units of the critic's predictions, f32, same
        shape."""
        return ((values.double() - self.mean) / self.std).float()

    def denormalise(self, predicted: Tensor) -> Tensor:
        """Convert the critic's predictions to units of rewards, f32, same shape."""
        return (predicted.double() * self.std + self.mean).float()

    def state_dict(self) -> dict[str, Any]:
        """Return the moments."""
        return {"sum": self._sum, "squares": self._squares, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of ``state_dict``. Raises KeyError for a missing entry."""
        self._sum, self._squares, self._weight = (
            float(state[name]) for name in ("sum", "squares", "weight")
        )
