"""Scores a batch without training: rewards from environment scores, and log-probabilities of a role."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.algorithms.train_step import PredictedTokens, shifted_sample
from realhf.api.model import CallContext, Model
from realhf.api.sample import SequenceSample

FloatArray = np.ndarray[Any, np.dtype[np.float32]]


def scored(values: FloatArray, scaling: float, bias: float, clip: float) -> FloatArray:
    """Return clip((value + bias) * scaling, +-clip) in fp32; NaN stays NaN."""
    rewards = (values + np.float32(bias)) * np.float32(scaling)
    return np.minimum(np.maximum(rewards, np.float32(-clip)), np.float32(clip))


def overlong_penalty(tokens: Tensor, length: int, buffer: float) -> Tensor:
    """Return what a rollout of so many sampled tokens, i64 (n,), gets beside its reward, f32 (n,) from 0 to -1: with
    L_cache = buffer * length, 0 up to length - L_cache, then linearly down to -1 at length, and -1 from there on.
    Source: Yu et al. 2025, DAPO, eq. 13."""
    cache = buffer * length
    return ((length - cache - tokens.double()) / cache).clamp(-1.0, 0.0).float()


def length_penalties(sample: SequenceSample, length: int | None, buffer: float) -> Tensor:
    """Return the ``overlong_penalty`` of each sequence's rollout, f32 (n sequences,), for the tokens that ``loss_mask``
    marks in all its sequences; 0 without a ``length``, where no tokens are read."""
    if length is None or not buffer:
        return torch.zeros(())
    tokens = PredictedTokens.of(sample)
    count = torch.bincount(tokens.owner[tokens.mask], minlength=tokens.n_rollouts)
    return overlong_penalty(count, length, buffer)[tokens.rollout]


class OutcomeRewardInterface:
    """Computes ``rewards`` (or what ``output_key`` calls them) from ``env_rewards``: clip((score + reward_bias) *
    reward_scaling, +-max_reward_clip), f32, one per sequence (docs/reference/dataflow.md 10, Score). Where the key
    ``outcome`` reports a failure the reward is NaN: a failed episode has no reward, not reward 0. With
    ``overlong_length`` and ``overlong_buffer`` its penalty for length is added (``length_penalties``)."""

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
        if not max_reward_clip > 0 or not math.isfinite(reward_scaling) or not math.isfinite(reward_bias):
            raise ValueError("max_reward_clip must be positive, reward_scaling and reward_bias finite")
        self._scaling, self._bias, self._clip = reward_scaling, reward_bias, max_reward_clip
        self._key = output_key

    def inference(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return the rewards with the lengths of ``env_rewards``, and the statistics ``reward_mean`` and ``n_scored``
        over the sequences that have a reward. Raises ValueError where ``outcome`` calls a rollout valid and its score
        is not finite."""
        scores = sample["env_rewards"].float().cpu().numpy()
        if "outcome" in sample.keys:
            valid = sample["outcome"].cpu().numpy() == 0
            _check_scores(sample, scores, valid)
            scores = np.where(valid, scores, np.float32(math.nan))
        rewards = scored(scores, self._scaling, self._bias, self._clip)
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


def _check_scores(sample: SequenceSample, scores: FloatArray, valid: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    """Raise ValueError that names the first sample with a valid rollout and no finite score: it is no failure that was
    marked as one, so a mean without it would be wrong, and so would an infinite score that is clipped."""
    strange = np.flatnonzero(valid & ~np.isfinite(scores))
    if len(strange):
        row = int(strange[0])
        at = int(sample.group_index("env_rewards")[row])
        raise ValueError(f"env_rewards of sample {sample.ids[at]!r} is {scores[row]} for a rollout that did not fail")


class LogprobInterface:
    """Computes ``output_key`` from ``packed_input_ids`` (and ``loss_mask``): f32, L-1 per sequence, the log-probability
    of every trainable token at ``temperature``, which must be the sampling temperature."""

    def __init__(self, output_key: str = "packed_ref_logprobs", temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self._key, self._temperature = output_key, temperature

    def inference(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return the sample of ``output_key`` and the statistic ``n_tokens``, the number of tokens of the scored
        sequences."""
        logprobs = model.engine.logprobs(sample, temperature=self._temperature, mb_spec=context.mb_spec)
        return shifted_sample(sample, self._key, logprobs), {"n_tokens": float(sample.n_tokens("packed_input_ids"))}
