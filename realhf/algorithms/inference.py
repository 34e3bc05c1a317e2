"""Inference calls: rewards from environment scores, and log-probabilities of a role."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.algorithms.train_step import PredictedTokens, build_shifted_sample
from realhf.api.model import CallContext, Model
from realhf.api.sample import SequenceSample

FloatArray = np.ndarray[Any, np.dtype[np.float32]]


def shape_rewards(values: FloatArray, scaling: float, bias: float, clip: float) -> FloatArray:
    """Return (value + bias) * scaling, clipped to +-``clip``, in fp32. NaN stays NaN."""
    rewards = (values + np.float32(bias)) * np.float32(scaling)
    return np.minimum(np.maximum(rewards, np.float32(-clip)), np.float32(clip))


def overlong_penalty(tokens: Tensor, length: int, buffer: float) -> Tensor:
    """Return the length penalty of each rollout, f32 (n,) in [-1, 0], to be added to its reward.

    It is 0 up to (1 - buffer) * length tokens, falls linearly to -1 at ``length`` and stays there.
    Source: Yu et al. 2025, DAPO, eq. 13.

    Args:
        tokens: Number of sampled tokens of each rollout, i64 (n,).
        length: Number of tokens from which on the penalty is -1.
        buffer: Fraction of ``length`` over which the penalty grows.
    """
    buffer_tokens = buffer * length
    return ((length - buffer_tokens - tokens.double()) / buffer_tokens).clamp(-1.0, 0.0).float()


def length_penalties(sample: SequenceSample, length: int | None, buffer: float) -> Tensor:
    """Return the ``overlong_penalty`` of each sequence's rollout, f32 (n_sequences,).

    The tokens of a rollout are those in ``loss_mask``, summed over its sequences. Without
    ``length`` or with ``buffer`` 0 the result is a scalar 0 and ``loss_mask`` is not read.
    """
    if length is None or not buffer:
        return torch.zeros(())
    tokens = PredictedTokens.from_sample(sample)
    count = torch.bincount(tokens.owner[tokens.mask], minlength=tokens.n_rollouts)
    return overlong_penalty(count, length, buffer)[tokens.rollout]


class OutcomeRewardInterface:
    """Inference call that computes rewards from environment scores.

    The reward of a sequence is (``env_rewards`` + reward_bias) * reward_scaling, clipped to
    +-max_reward_clip, f32 (docs/reference/dataflow.md 10, Score), plus the length penalty if
    ``overlong_length`` and ``overlong_buffer`` are set (``length_penalties``). It is NaN if the key
    ``outcome`` reports a failure: a failed episode has no reward, which differs from reward 0. The
    key of the result is ``output_key``.
    """

    def __init__(
        self,
        reward_scaling: float = 1.0,
        reward_bias: float = 0.0,
        max_reward_clip: float = 20.0,
        overlong_length: int | None = None,
        overlong_buffer: float = 0.0,
        output_key: str = "rewards",
    ) -> None:
        self._overlong = (overlong_length, overlong_buffer)
        if (
            not max_reward_clip > 0
            or not math.isfinite(reward_scaling)
            or not math.isfinite(reward_bias)
        ):
            raise ValueError(
                "max_reward_clip must be positive, reward_scaling and reward_bias finite"
            )
        self._scaling = reward_scaling
        self._bias = reward_bias
        self._clip = max_reward_clip
        self._key = output_key

    def inference(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return the rewards, one for each entry of ``env_rewards``, and their statistics.

        ``reward_mean`` is over the ``n_scored`` sequences with a reward. Raises ValueError if a
        valid rollout has a score that is not finite.
        """
        scores = sample["env_rewards"].float().cpu().numpy()
        if "outcome" in sample.keys:
            valid = sample["outcome"].cpu().numpy() == 0
            _check_scores(sample, scores, valid)
            scores = np.where(valid, scores, np.float32(math.nan))
        rewards = shape_rewards(scores, self._scaling, self._bias, self._clip)
        rewards = rewards + length_penalties(sample, *self._overlong).numpy()
        finite = [reward for reward in rewards.tolist() if not math.isnan(reward)]
        out = SequenceSample.from_lengths(
            sample.ids,
            {self._key: sample.lengths("env_rewards")},
            {self._key: "f32"},
            {self._key: ()},
            {self._key: torch.from_numpy(rewards)},
            {},
        )
        mean = sum(finite) / len(finite) if finite else 0.0
        return out, {"reward_mean": mean, "n_scored": float(len(finite))}


def _check_scores(
    sample: SequenceSample, scores: FloatArray, valid: np.ndarray[Any, np.dtype[np.bool_]]
) -> None:
    """Raise ValueError naming the first sample with a valid rollout whose score is not finite.

    Such a score is an error of the environment: leaving it out would bias the mean, and clipping an
    infinite score would hide it.
    """
    not_finite = np.flatnonzero(valid & ~np.isfinite(scores))
    if len(not_finite):
        row = int(not_finite[0])
        index = int(sample.group_index("env_rewards")[row])
        raise ValueError(
            f"env_rewards of sample {sample.ids[index]!r} is {scores[row]} for a rollout that did "
            f"not fail"
        )


class LogprobInterface:
    """Inference call that computes the log-probabilities of the trainable tokens under a model.

    Reads ``packed_input_ids`` and, if present, ``loss_mask``. The result ``output_key`` is f32
    (L-1). ``temperature`` must be the sampling temperature.
    """

    def __init__(self, output_key: str = "packed_ref_logprobs", temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self._key = output_key
        self._temperature = temperature

    def inference(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return the sample with ``output_key``, and the number of tokens of the batch
        (``n_tokens``)."""
        logprobs = model.engine.logprobs(
            sample, temperature=self._temperature, mb_spec=context.mb_spec
        )
        return build_shifted_sample(sample, self._key, logprobs), {
            "n_tokens": float(sample.n_tokens("packed_input_ids"))
        }
