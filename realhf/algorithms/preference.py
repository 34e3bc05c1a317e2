"""Preference learning from pairs of episodes of one task: DPO and reward models.

Both maximise the log-likelihood that the better episode is preferred, which has the probability
sigmoid(score(better) - score(worse)) (Bradley and Terry 1952, Rank Analysis of Incomplete Block
Designs). The score of a reward model is that of a value head (Christiano et al. 2017; Ouyang et al.
2022), the score of DPO is beta (log pi - log reference) (Rafailov et al. 2023, Direct Preference
Optimization).

The two episodes of a pair may be in different microbatches or on different workers. A step
therefore first computes the scores of all episodes, then trains on the linear loss sum(factor *
score). The factors are the derivatives of the preference loss with respect to the scores, so both
losses have the same gradient at the current weights.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.algorithms.inference import length_penalties
from realhf.algorithms.options import ALL, EXTREMES, PAIRINGS
from realhf.algorithms.token_advantages import rollout_means, valid_sequences
from realhf.algorithms.train_step import (
    WEIGHTS,
    NonFiniteGuard,
    PredictedTokens,
    replace_keys,
    select_weighted_part,
    weighted_sum,
)
from realhf.api.keys import VERIFIER_REWARDS
from realhf.api.model import CallContext, ForwardOutputs, Model
from realhf.api.sample import SequenceSample


@dataclass(frozen=True)
class Pairs:
    """Pairs of rollouts; both rollouts of a pair are from the same group."""

    better: Tensor
    """Index of the better rollout of each pair, i64 (p,)."""
    worse: Tensor
    """Index of the worse rollout of each pair, i64 (p,)."""
    weight: Tensor
    """Weight of each pair in the loss, f64 (p,). All groups have the same total; the sum is 1."""

    def __len__(self) -> int:
        return len(self.better)


def build_pairs(
    rewards: Tensor, usable: Tensor, group: Tensor, *, pairing: str = ALL, min_gap: float = 0.0
) -> Pairs:
    """Return the pairs of rollouts of the same group whose rewards differ by more than ``min_gap``.

    With ``pairing`` ``EXTREMES`` a group gives only the pair of its best and worst rollout (in a
    tie, the first of them).

    Args:
        rewards: Reward of each rollout, f64 (n,).
        usable: Which rollouts may be in a pair, bool (n,).
        group: Group of each rollout, i64 (n,).
        pairing: An element of ``PAIRINGS``.
        min_gap: Reward difference that a pair has to exceed.
    """
    better = list[Tensor]()
    worse = list[Tensor]()
    weight = list[Tensor]()
    for number in torch.unique(group[usable]).tolist():
        members = torch.nonzero(usable & (group == number)).flatten()
        if pairing == EXTREMES:
            members = torch.stack(
                [members[rewards[members].argmax()], members[rewards[members].argmin()]]
            )
        gap = rewards[members][:, None] - rewards[members][None, :]
        higher, lower = torch.nonzero(gap > min_gap, as_tuple=True)
        if len(higher):
            better.append(members[higher])
            worse.append(members[lower])
            weight.append(torch.full((len(higher),), 1 / len(higher), dtype=torch.float64))
    if not better:
        no_index = torch.zeros(0, dtype=torch.int64)
        return Pairs(no_index, no_index, torch.zeros(0, dtype=torch.float64))
    return Pairs(torch.cat(better), torch.cat(worse), torch.cat(weight) / len(weight))


def pair_loss(margin: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the preference loss and its derivative with respect to ``margin``, same shape.

    The loss is -(1 - s) log sigmoid(m) - s log sigmoid(-m). Label smoothing s is the probability
    that a label is wrong (Mitchell 2023, A note on DPO with noisy preferences).
    """
    log_sigmoid = torch.nn.functional.logsigmoid
    loss = -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)
    return loss, torch.sigmoid(margin) - (1 - smoothing)


def held_out_groups(ids: Sequence[str], share: float) -> Tensor:
    """Return which samples are held out from training, bool (n,), about ``share`` of all.

    The choice depends only on the ids, so a resumed run makes the same one.
    """
    digests = [
        hashlib.blake2b(f"held-out/{name}".encode("utf-8", "surrogatepass"), digest_size=8)
        for name in ids
    ]
    return torch.tensor(
        [int.from_bytes(d.digest(), "big") < share * 2**64 for d in digests], dtype=torch.bool
    )


class PairwiseInterface(ABC):
    """Train call on the pairs of rollouts in the groups of a batch.

    Reads ``packed_input_ids``, ``loss_mask``, ``rewards`` and, if present, ``outcome`` (0: valid)
    and ``rollout_index``. Only tokens in ``loss_mask`` contribute to a score. The sequences with
    the same ``rollout_index`` together have one score.

    Args:
        held_out: Fraction of the groups that are only measured, not trained on.
        pairing: As in ``build_pairs``.
        min_gap: As in ``build_pairs``.
        max_nonfinite_steps: Number of consecutive non-finite updates that end the run.
    """

    _smoothing = 0.0
    """Label smoothing of ``pair_loss``."""

    def __init__(
        self,
        *,
        held_out: float = 0.0,
        pairing: str = ALL,
        min_gap: float = 0.0,
        max_nonfinite_steps: int = 3,
    ) -> None:
        if pairing not in PAIRINGS or not 0 <= held_out < 1 or not min_gap >= 0:
            raise ValueError("held_out in [0, 1), min_gap from 0 on, a known pairing")
        self._held_out = held_out
        self._pairing = pairing
        self._min_gap = min_gap
        self._guard = NonFiniteGuard(max_nonfinite_steps)

    @abstractmethod
    def row_scores(self, model: Model, sample: SequenceSample, context: CallContext) -> Tensor:
        """Return the score of each sequence, f64 (n_sequences,), 0 for one without a token in the
        mask."""

    @abstractmethod
    def prepare(self, model: Model, sample: SequenceSample, factors: Tensor) -> SequenceSample:
        """Return a batch on which ``linear_loss`` equals the sum of scores times ``factors``, f64
        (n_sequences,)."""

    @abstractmethod
    def linear_loss(
        self, outputs: ForwardOutputs, part: SequenceSample
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a microbatch from the batch that ``prepare`` returned (a
        ``LossFn``)."""

    def row_weights(self, tokens: PredictedTokens, has_tokens: Tensor) -> Tensor:
        """Return the weight of each sequence's score in its rollout's score, f64 (n_sequences,).

        Here it is 1 for sequences with a token in the mask, so a rollout's score is the sum of its
        sequences' scores.
        """
        del tokens
        return has_tokens.double()

    def additional_loss(self, scores: Tensor, pairs: Pairs) -> tuple[float, Tensor]:
        """Return an additional loss term and its derivative with respect to ``scores``, f64
        (n_rollouts,)."""
        del pairs
        return 0.0, torch.zeros_like(scores)

    def train_step(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> dict[str, Any]:
        """Train one step.

        Returns the loss, and ``pair_accuracy``, ``pair_margin`` and ``n_pairs`` of the training
        pairs and (prefix ``held_out_``) the held-out pairs, all before the update; and the reason
        ``stop`` after ``max_nonfinite_steps`` consecutive updates without a finite gradient. A
        batch without a training pair makes no update.
        """
        tokens = PredictedTokens.from_sample(sample)
        has_tokens = tokens.sequences_with(tokens.mask)
        pairs, held_out_pairs = self._split_pairs(sample, tokens, has_tokens)
        in_pair = torch.zeros(tokens.n_rollouts, dtype=torch.bool)
        for part in (pairs, held_out_pairs):
            in_pair[part.better] = True
            in_pair[part.worse] = True
        lengths = torch.from_numpy(np.asarray(sample.lengths("packed_input_ids").values))
        mask = sample["loss_mask"].cpu().bool() & torch.repeat_interleave(
            in_pair[tokens.rollout], lengths
        )
        paired_sample = replace_keys(sample, per_token={"loss_mask": mask})
        row_weights = self.row_weights(tokens, has_tokens)
        row_scores = self.row_scores(model, paired_sample, context)
        scores = torch.zeros(tokens.n_rollouts, dtype=torch.float64)
        scores = scores.index_add(0, tokens.rollout, row_weights * row_scores)
        stats = {
            **pair_statistics(scores, pairs),
            **pair_statistics(scores, held_out_pairs, "held_out_"),
        }
        if not len(pairs):
            return {**stats, "n_updates": 0.0, "skipped": 0.0}
        loss, derivative = pair_loss(scores[pairs.better] - scores[pairs.worse], self._smoothing)
        additional, factors = self.additional_loss(scores, pairs)
        factors = factors.index_add(0, pairs.better, pairs.weight * derivative)
        factors = factors.index_add(0, pairs.worse, -pairs.weight * derivative)
        batch = self.prepare(model, paired_sample, row_weights * factors[tokens.rollout])
        result = model.engine.train_batch(batch, self.linear_loss, mb_spec=context.mb_spec)
        self._guard.observe(result)
        return {
            **stats,
            "loss": float((pairs.weight * loss).sum()) + additional,
            "grad_norm": result.grad_norm,
            "n_updates": float(not result.skipped),
            "skipped": float(result.skipped),
            **({"lr": result.stats["lr"]} if "lr" in result.stats else {}),
            **self._guard.stop_statistics(),
        }

    def _split_pairs(
        self, sample: SequenceSample, tokens: PredictedTokens, has_tokens: Tensor
    ) -> tuple[Pairs, Pairs]:
        """Return the training pairs and the held-out pairs.

        Raises ValueError if a valid sequence has a reward that is not finite.
        """
        usable = valid_sequences(sample) & has_tokens
        rewards, has_reward = rollout_means(sample["rewards"].cpu(), usable, tokens.rollout)
        if not bool(torch.isfinite(rewards[has_reward]).all()):
            raise ValueError("a valid sequence has a reward that is not finite")
        group = torch.zeros_like(tokens.rollout[: len(rewards)]).scatter(
            0, tokens.rollout, tokens.group
        )
        is_held_out = held_out_groups(sample.ids, self._held_out)[group]
        options: dict[str, Any] = {"pairing": self._pairing, "min_gap": self._min_gap}
        training = build_pairs(rewards, has_reward & ~is_held_out, group, **options)
        held_out = build_pairs(rewards, has_reward & is_held_out, group, **options)
        return training, held_out

    def state_dict(self) -> dict[str, Any]:
        """Return the count of consecutive updates without a finite gradient."""
        return {"nonfinite_in_a_row": self._guard.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of ``state_dict``. Raises KeyError without ``nonfinite_in_a_row``."""
        self._guard.in_a_row = int(state["nonfinite_in_a_row"])


def pair_statistics(scores: Tensor, pairs: Pairs, prefix: str = "") -> dict[str, float]:
    """Return ``n_pairs`` and, if there is a pair, ``pair_accuracy`` and ``pair_margin``.

    The accuracy is the fraction of pairs whose better rollout has the higher score (a tie counts
    half), the margin the mean score difference. Both are weighted like the loss. ``scores`` f64
    (n_rollouts,).
    """
    stats = {f"{prefix}n_pairs": float(len(pairs))}
    if len(pairs):
        margin = scores[pairs.better] - scores[pairs.worse]
        correct = (margin > 0).double() + 0.5 * (margin == 0).double()
        stats[f"{prefix}pair_accuracy"] = float((pairs.weight * correct).sum())
        stats[f"{prefix}pair_margin"] = float((pairs.weight * margin).sum())
    return stats


class DPOInterface(PairwiseInterface):
    """Train call of DPO.

    The score of a rollout is ``beta`` times the sum of log pi - log reference over the tokens in
    ``loss_mask`` of all its sequences. Reads ``packed_ref_logprobs`` in addition. Logits are
    divided by ``temperature``; ``smoothing`` is the label smoothing of ``pair_loss``.
    """

    def __init__(
        self, *, beta: float = 0.1, smoothing: float = 0.0, temperature: float = 1.0, **options: Any
    ) -> None:
        super().__init__(**options)
        if not 0 < beta < math.inf or not temperature > 0 or not 0 <= smoothing < 0.5:
            raise ValueError("beta and temperature must be positive, smoothing in [0, 0.5)")
        self._beta = beta
        self._smoothing = smoothing
        self._temperature = temperature

    def row_scores(self, model: Model, sample: SequenceSample, context: CallContext) -> Tensor:
        """See ``PairwiseInterface``."""
        logprobs = model.engine.logprobs(
            sample, temperature=self._temperature, mb_spec=context.mb_spec
        )
        tokens = PredictedTokens.from_sample(sample)
        log_ratio = logprobs.cpu().double() - sample["packed_ref_logprobs"].cpu().double()
        zeros = torch.zeros(tokens.n_sequences, dtype=torch.float64)
        return self._beta * zeros.index_add(
            0, tokens.sequence, torch.where(tokens.mask, log_ratio, 0.0)
        )

    def prepare(self, model: Model, sample: SequenceSample, factors: Tensor) -> SequenceSample:
        """See ``PairwiseInterface``."""
        del model
        tokens = PredictedTokens.from_sample(sample)
        weights = torch.where(tokens.mask, self._beta * factors[tokens.sequence], 0.0)
        return _with_weights(
            sample.select({"packed_input_ids", "loss_mask"}), weights, factors != 0
        )

    def linear_loss(
        self, outputs: ForwardOutputs, part: SequenceSample
    ) -> tuple[Tensor, dict[str, float]]:
        """See ``PairwiseInterface``."""
        logprobs = outputs.logprobs(temperature=self._temperature)[0]
        return _weighted_loss(logprobs, part), {}


class RewardModelInterface(PairwiseInterface):
    """Train and inference call of a reward model: a model with a value head that scores episodes.

    The score of a sequence is the value of the state after the policy's last token; the score of a
    rollout is the mean over its sequences. With ``center`` c the loss has the additional term c
    (score(better) + score(worse))^2. It keeps the scores near 0, because the likelihood depends
    only on their differences (Eisenstein et al. 2023, Helping or Herding?).

    ``inference`` mixes the scores into the rewards of a verifier: (1 - ``weight``) *
    ``verifier_rewards`` + ``weight`` * sigmoid(score), where the sigmoid is the probability that
    the rollout is preferred to one of score 0. With ``overlong_length`` and ``overlong_buffer`` the
    length penalty is added unweighted.
    """

    def __init__(
        self,
        *,
        center: float = 0.0,
        weight: float = 0.5,
        overlong_length: int | None = None,
        overlong_buffer: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not center >= 0 or not 0 < weight <= 1:
            raise ValueError("center must be at least 0, weight above 0 and at most 1")
        self._center = center
        self._weight = weight
        self._overlong = (overlong_length, overlong_buffer)

    def row_scores(self, model: Model, sample: SequenceSample, context: CallContext) -> Tensor:
        """See ``PairwiseInterface``. Raises ValueError for a model without a value head."""
        tokens = PredictedTokens.from_sample(sample)
        end_rows = truncate_after_policy(sample, model.tokenizer)
        values = model.engine.forward(
            end_rows, lambda outputs, _: outputs.values(), mb_spec=context.mb_spec
        )
        end_tokens = PredictedTokens.from_sample(end_rows)
        scores = torch.zeros(end_tokens.n_sequences, dtype=torch.float64)
        scores[end_tokens.sequence[end_tokens.mask]] = values.cpu().double()[end_tokens.mask]
        return torch.where(tokens.sequences_with(tokens.mask), scores, 0.0)

    def prepare(self, model: Model, sample: SequenceSample, factors: Tensor) -> SequenceSample:
        """See ``PairwiseInterface``."""
        end_rows = truncate_after_policy(sample, model.tokenizer)
        tokens = PredictedTokens.from_sample(end_rows)
        return _with_weights(
            end_rows, torch.where(tokens.mask, factors[tokens.sequence], 0.0), factors != 0
        )

    def linear_loss(
        self, outputs: ForwardOutputs, part: SequenceSample
    ) -> tuple[Tensor, dict[str, float]]:
        """See ``PairwiseInterface``."""
        return _weighted_loss(outputs.values(), part), {}

    def row_weights(self, tokens: PredictedTokens, has_tokens: Tensor) -> Tensor:
        """Return 1 / (number of sequences of the rollout with a token in the mask), f64
        (n_sequences,)."""
        zeros = torch.zeros(tokens.n_rollouts, dtype=torch.float64)
        count = zeros.index_add(0, tokens.rollout, has_tokens.double())
        return has_tokens.double() / count.clamp(min=1)[tokens.rollout]

    def additional_loss(self, scores: Tensor, pairs: Pairs) -> tuple[float, Tensor]:
        """Return the centering term and its derivative, as in ``PairwiseInterface``."""
        score_sum = scores[pairs.better] + scores[pairs.worse]
        derivative = 2 * self._center * pairs.weight * score_sum
        derivatives = torch.zeros_like(scores)
        derivatives = derivatives.index_add(0, pairs.better, derivative).index_add(
            0, pairs.worse, derivative
        )
        return self._center * float((pairs.weight * score_sum.square()).sum()), derivatives

    def inference(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return ``rewards`` f32, one per sequence, and statistics.

        A reward is NaN if that of the verifier is. The statistics are the mean of the rewards, the
        mean of the model's part, and how often the model agrees with the verifier on the pairs of a
        group.
        """
        tokens = PredictedTokens.from_sample(sample)
        verifier_rewards = sample[VERIFIER_REWARDS].cpu().double()
        is_scored = tokens.sequences_with(tokens.mask) & torch.isfinite(verifier_rewards)
        row_scores = self.row_scores(model, sample, context)
        zeros = torch.zeros(tokens.n_rollouts, dtype=torch.float64)
        scores = zeros.index_add(
            0, tokens.rollout, self.row_weights(tokens, is_scored) * row_scores
        )
        preferred = torch.sigmoid(scores)[tokens.rollout]
        has_score = torch.zeros(tokens.n_rollouts, dtype=torch.bool).index_fill(
            0, tokens.rollout[is_scored], True
        )
        mixed = (1 - self._weight) * verifier_rewards + self._weight * preferred
        # A rollout without a token of the policy has no score and keeps the reward of the verifier.
        rewards = torch.where(
            has_score[tokens.rollout] & torch.isfinite(verifier_rewards), mixed, verifier_rewards
        )
        rewards = rewards + length_penalties(sample, *self._overlong)
        means, _ = rollout_means(verifier_rewards, is_scored, tokens.rollout)
        group = torch.zeros_like(tokens.rollout[: len(means)]).scatter(
            0, tokens.rollout, tokens.group
        )
        stats = {
            "n_scored": float(is_scored.sum()),
            **pair_statistics(scores, build_pairs(means, has_score, group)),
        }
        if bool(is_scored.any()):
            stats["reward_mean"] = float(rewards[is_scored].mean())
            stats["model_reward_mean"] = float(preferred[is_scored].mean())
        lengths = {"rewards": sample.lengths(VERIFIER_REWARDS)}
        out = SequenceSample.from_lengths(
            sample.ids,
            lengths,
            {"rewards": "f32"},
            {"rewards": ()},
            {"rewards": rewards.float()},
            {},
        )
        return out, stats


def truncate_after_policy(sample: SequenceSample, tokenizer: Any) -> SequenceSample:
    """Truncate every sequence after the last token of its mask and append an end token. The new
    mask selects only the end token.

    The value predicted for the end token is that of the state after the policy's last token. The
    result has ``packed_input_ids`` and ``loss_mask``. A sequence without a token in its mask is cut
    after its first token, and its end token is not in the mask.
    """
    end = (
        int(tokenizer.eos_token_id)
        if tokenizer is not None and tokenizer.eos_token_id is not None
        else 0
    )
    lengths = np.asarray(sample.lengths("packed_input_ids").values).tolist()
    rows = list[Tensor]()
    masks = list[Tensor]()
    new_lengths = list[int]()
    for ids, mask in zip(
        sample["packed_input_ids"].cpu().split(lengths),
        sample["loss_mask"].cpu().bool().split(lengths),
        strict=True,
    ):
        trained = torch.nonzero(mask[1:]).flatten()
        size = int(trained[-1]) + 2 if len(trained) else 1
        rows.append(torch.cat([ids[:size], ids.new_tensor([end])]))
        masks.append(torch.zeros(size + 1, dtype=torch.bool))
        masks[-1][-1] = bool(len(trained))
        new_lengths.append(size + 1)
    sizes = iter(new_lengths)
    nested = [[next(sizes) for _ in inner] for inner in sample.seqlens["packed_input_ids"]]
    tensors = {"packed_input_ids": torch.cat(rows), "loss_mask": torch.cat(masks)}
    return SequenceSample.from_tensors(sample.ids, tensors, dict.fromkeys(tensors, nested))


def _with_weights(sample: SequenceSample, weights: Tensor, keep: Tensor) -> SequenceSample:
    """Return the sequences in ``keep`` with ``loss_weights`` added; all sequences if ``keep`` is
    all False.

    An update is made in any case, so that optimizer and learning rate schedule advance.
    """
    part = select_weighted_part(sample, {WEIGHTS: weights.float()}, keep)
    return part if part is not None else replace_keys(sample, shifted={WEIGHTS: weights.float()})


def _weighted_loss(values: Tensor, part: SequenceSample) -> Tensor:
    """Return the sum of ``values`` (n,) times ``loss_weights`` over the mask, a scalar."""
    return weighted_sum(
        values,
        part[WEIGHTS].to(values.device),
        PredictedTokens.from_sample(part).mask.to(values.device),
    )
