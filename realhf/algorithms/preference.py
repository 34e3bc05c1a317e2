"""Learns from pairs of played episodes of one task, of which one is better: a reward model, and a policy without one.

Both maximise the log-likelihood that the better episode is preferred, sigmoid(score(better) - score(worse)) (Bradley
and Terry 1952, Rank Analysis of Incomplete Block Designs): the score is that of a value head (Christiano et al. 2017;
Ouyang et al. 2022), or the policy's own, beta (log pi - log reference) (Rafailov et al. 2023, Direct Preference
Optimization).

The two episodes of a pair may be in different micro-batches, or on different workers. So a step first scores all of
them, and then trains on a sum of scores whose factors are the derivatives of the loss by each score: at the weights
that were scored, its gradient is that of the loss.
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
    weighted_part,
    weighted_sum,
)
from realhf.api.keys import VERIFIER_REWARDS
from realhf.api.model import CallContext, ForwardOutputs, Model
from realhf.api.sample import SequenceSample


@dataclass(frozen=True)
class Pairs:
    """Holds pairs of rollouts: ``better`` and ``worse`` i64 (p,) are their numbers in the batch, ``weight`` f64 (p,)
    what each pair counts. Every group counts as much as every other one; the weights add up to 1."""

    better: Tensor
    worse: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return len(self.better)


def pairs_of(rewards: Tensor, usable: Tensor, group: Tensor, *, pairing: str = ALL, min_gap: float = 0.0) -> Pairs:
    """Return the pairs of rollouts of one group whose rewards differ by more than ``min_gap``, the group's extremes
    alone where ``pairing`` says so (of equal ones the first). ``rewards`` f64 (n,), ``usable`` bool (n,) and ``group``
    i64 (n,) have an entry for each rollout; what is not ``usable`` is in no pair, whatever its reward."""
    better, worse, weight = list[Tensor](), list[Tensor](), list[Tensor]()
    for number in torch.unique(group[usable]).tolist():
        members = torch.nonzero(usable & (group == number)).flatten()
        if pairing == EXTREMES:
            members = torch.stack([members[rewards[members].argmax()], members[rewards[members].argmin()]])
        gap = rewards[members][:, None] - rewards[members][None, :]
        over, under = torch.nonzero(gap > min_gap, as_tuple=True)
        if len(over):
            better.append(members[over])
            worse.append(members[under])
            weight.append(torch.full((len(over),), 1 / len(over), dtype=torch.float64))
    if not better:
        none = torch.zeros(0, dtype=torch.int64)
        return Pairs(none, none, torch.zeros(0, dtype=torch.float64))
    return Pairs(torch.cat(better), torch.cat(worse), torch.cat(weight) / len(weight))


def pair_loss(margin: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return -(1 - s) log sigmoid(m) - s log sigmoid(-m) and its derivative by m, both of the shape of ``margin``.
    ``smoothing`` s is the probability that a label is wrong (Mitchell 2023, A note on DPO with noisy preferences)."""
    log_sigmoid = torch.nn.functional.logsigmoid
    loss = -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)
    return loss, torch.sigmoid(margin) - (1 - smoothing)


def held_out_groups(ids: Sequence[str], share: float) -> Tensor:
    """Return which samples train nothing and measure, bool (n,): about ``share`` of all, by their ids alone, so that a
    run that goes on makes the same choice."""
    digests = [hashlib.blake2b(f"held-out/{name}".encode("utf-8", "surrogatepass"), digest_size=8) for name in ids]
    return torch.tensor([int.from_bytes(d.digest(), "big") < share * 2**64 for d in digests], dtype=torch.bool)


class PairwiseInterface(ABC):
    """Trains one step on the pairs in the groups of a batch: ``packed_input_ids, loss_mask, rewards`` and, where
    present, ``outcome`` (0: valid) and ``rollout_index``.

    Only tokens of ``loss_mask``, the policy's own, are scored; the rows of one ``rollout_index`` make one score. About
    ``held_out`` of the groups train nothing and measure. ``pairing`` and ``min_gap``: see ``pairs_of``.
    """

    _smoothing = 0.0

    def __init__(
        self, *, held_out: float = 0.0, pairing: str = ALL, min_gap: float = 0.0, max_nonfinite_steps: int = 3
    ) -> None:
        if pairing not in PAIRINGS or not 0 <= held_out < 1 or not min_gap >= 0:
            raise ValueError("held_out in [0, 1), min_gap from 0 on, a known pairing")
        self._held_out, self._pairing, self._min_gap = held_out, pairing, min_gap
        self._guard = NonFiniteGuard(max_nonfinite_steps)

    @abstractmethod
    def row_scores(self, model: Model, sample: SequenceSample, context: CallContext) -> Tensor:
        """Return the score of each row, f64 (n sequences,), 0 where it has no token of the policy."""

    @abstractmethod
    def prepared(self, model: Model, sample: SequenceSample, factors: Tensor) -> SequenceSample:
        """Return the batch whose ``summed`` is the sum over rows of ``factors`` f64 (n sequences,) times score."""

    @abstractmethod
    def summed(self, outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        """Is the ``LossFn`` of what ``prepared`` returns."""

    def shares(self, tokens: PredictedTokens, has: Tensor) -> Tensor:
        """Return what the score of each row counts in that of its rollout, f64 (n sequences,): 1."""
        del tokens
        return has.double()

    def extra(self, scores: Tensor, pairs: Pairs) -> tuple[float, Tensor]:
        """Return a further term of the loss and its derivative by the score of each rollout, f64 (n rollouts,)."""
        del pairs
        return 0.0, torch.zeros_like(scores)

    def train_step(self, model: Model, sample: SequenceSample, context: CallContext) -> dict[str, Any]:
        """Train one step. Returns the loss and, of training and held-out pairs (``held_out_``), ``pair_accuracy``,
        ``pair_margin`` and ``n_pairs``, all before the update; ``stop`` after ``max_nonfinite_steps`` updates in a row
        without a finite gradient. A batch without a pair changes nothing."""
        tokens = PredictedTokens.of(sample)
        has = tokens.having(tokens.mask)
        pairs, held = self._parts(sample, tokens, has)
        involved = torch.zeros(tokens.n_rollouts, dtype=torch.bool)
        for part in (pairs, held):
            involved[part.better], involved[part.worse] = True, True
        lengths = torch.from_numpy(np.asarray(sample.lengths("packed_input_ids").values))
        chosen = sample["loss_mask"].cpu().bool() & torch.repeat_interleave(involved[tokens.rollout], lengths)
        scored = replace_keys(sample, per_token={"loss_mask": chosen})
        share = self.shares(tokens, has)
        rows = self.row_scores(model, scored, context)
        scores = torch.zeros(tokens.n_rollouts, dtype=torch.float64).index_add(0, tokens.rollout, share * rows)
        stats = {**statistics(scores, pairs), **statistics(scores, held, "held_out_")}
        if not len(pairs):
            return {**stats, "n_updates": 0.0, "skipped": 0.0}
        loss, slope = pair_loss(scores[pairs.better] - scores[pairs.worse], self._smoothing)
        more, factors = self.extra(scores, pairs)
        factors = factors.index_add(0, pairs.better, pairs.weight * slope)
        factors = factors.index_add(0, pairs.worse, -pairs.weight * slope)
        batch = self.prepared(model, scored, share * factors[tokens.rollout])
        result = model.engine.train_batch(batch, self.summed, mb_spec=context.mb_spec)
        self._guard.observe(result)
        return {
            **stats,
            "loss": float((pairs.weight * loss).sum()) + more,
            "grad_norm": result.grad_norm,
            "n_updates": float(not result.skipped),
            "skipped": float(result.skipped),
            **({"lr": result.stats["lr"]} if "lr" in result.stats else {}),
            **self._guard.verdict(),
        }

    def _parts(self, sample: SequenceSample, tokens: PredictedTokens, has: Tensor) -> tuple[Pairs, Pairs]:
        """Return the pairs to train on and those that measure. Raises ValueError on a valid reward that is not
        finite."""
        usable = valid_sequences(sample) & has
        rewards, known = rollout_means(sample["rewards"].cpu(), usable, tokens.rollout)
        if not bool(torch.isfinite(rewards[known]).all()):
            raise ValueError("a valid sequence has a reward that is not finite")
        group = torch.zeros_like(tokens.rollout[: len(rewards)]).scatter(0, tokens.rollout, tokens.group)
        held = held_out_groups(sample.ids, self._held_out)[group]
        options: dict[str, Any] = {"pairing": self._pairing, "min_gap": self._min_gap}
        return pairs_of(rewards, known & ~held, group, **options), pairs_of(rewards, known & held, group, **options)

    def state_dict(self) -> dict[str, Any]:
        """Return the count of consecutive updates without a finite gradient."""
        return {"nonfinite_in_a_row": self._guard.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. Raises KeyError without ``nonfinite_in_a_row``."""
        self._guard.in_a_row = int(state["nonfinite_in_a_row"])


def statistics(scores: Tensor, pairs: Pairs, prefix: str = "") -> dict[str, float]:
    """Return ``pair_accuracy`` (the fraction of pairs in which the better one scores higher, a draw counts half),
    ``pair_margin`` and ``n_pairs``, weighed as the loss is; the number alone where there is no pair."""
    found = {f"{prefix}n_pairs": float(len(pairs))}
    if len(pairs):
        margin = scores[pairs.better] - scores[pairs.worse]
        right = (margin > 0).double() + 0.5 * (margin == 0).double()
        found[f"{prefix}pair_accuracy"] = float((pairs.weight * right).sum())
        found[f"{prefix}pair_margin"] = float((pairs.weight * margin).sum())
    return found


class DPOInterface(PairwiseInterface):
    """Prefers the better episode of a pair by the policy itself: ``packed_ref_logprobs`` are a further input.

    The score of a rollout is ``beta`` times the sum over its policy's tokens, of all its rows, of log pi - log
    reference; logits are divided by ``temperature``.
    """

    def __init__(self, *, beta: float = 0.1, smoothing: float = 0.0, temperature: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        if not 0 < beta < math.inf or not temperature > 0 or not 0 <= smoothing < 0.5:
            raise ValueError("beta and temperature must be positive, smoothing in [0, 0.5)")
        self._beta, self._smoothing, self._temperature = beta, smoothing, temperature

    def row_scores(self, model: Model, sample: SequenceSample, context: CallContext) -> Tensor:
        """See ``PairwiseInterface``."""
        logprobs = model.engine.logprobs(sample, temperature=self._temperature, mb_spec=context.mb_spec)
        tokens = PredictedTokens.of(sample)
        apart = logprobs.cpu().double() - sample["packed_ref_logprobs"].cpu().double()
        blank = torch.zeros(tokens.n_sequences, dtype=torch.float64)
        return self._beta * blank.index_add(0, tokens.sequence, torch.where(tokens.mask, apart, 0.0))

    def prepared(self, model: Model, sample: SequenceSample, factors: Tensor) -> SequenceSample:
        """See ``PairwiseInterface``."""
        del model
        tokens = PredictedTokens.of(sample)
        weights = torch.where(tokens.mask, self._beta * factors[tokens.sequence], 0.0)
        return _weighed(sample.select({"packed_input_ids", "loss_mask"}), weights, factors != 0)

    def summed(self, outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        """See ``PairwiseInterface``."""
        logprobs = outputs.logprobs(temperature=self._temperature)[0]
        return _weighed_sum(logprobs, part), {}


class RewardModelInterface(PairwiseInterface):
    """Is the interface of a model with a value head that scores episodes (a reward model).

    It reads every row up to the policy's last token and scores the state behind that token; the score of a rollout is
    the mean of its rows'. With ``center`` c the loss also has c (score(better) + score(worse))^2, which keeps scores
    near 0, since the likelihood only knows differences (Eisenstein et al. 2023, Helping or Herding?).

    ``inference`` mixes it into the rewards of a verifier: (1 - ``weight``) times ``verifier_rewards`` plus ``weight``
    times sigmoid(score), the probability that the rollout is preferred to one of score 0; and, with
    ``overlong_length`` and ``overlong_buffer``, the penalty for length, which has no weight.
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
        self._center, self._weight = center, weight
        self._overlong = (overlong_length, overlong_buffer)

    def row_scores(self, model: Model, sample: SequenceSample, context: CallContext) -> Tensor:
        """See ``PairwiseInterface``. Raises ValueError on a model without a value head."""
        tokens = PredictedTokens.of(sample)
        ended = ended_rows(sample, model.tokenizer)
        values = model.engine.forward(ended, lambda outputs, _: outputs.values(), mb_spec=context.mb_spec)
        at_end = PredictedTokens.of(ended)
        scores = torch.zeros(at_end.n_sequences, dtype=torch.float64)
        scores[at_end.sequence[at_end.mask]] = values.cpu().double()[at_end.mask]
        return torch.where(tokens.having(tokens.mask), scores, 0.0)

    def prepared(self, model: Model, sample: SequenceSample, factors: Tensor) -> SequenceSample:
        """See ``PairwiseInterface``."""
        ended = ended_rows(sample, model.tokenizer)
        tokens = PredictedTokens.of(ended)
        return _weighed(ended, torch.where(tokens.mask, factors[tokens.sequence], 0.0), factors != 0)

    def summed(self, outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        """See ``PairwiseInterface``."""
        return _weighed_sum(outputs.values(), part), {}

    def shares(self, tokens: PredictedTokens, has: Tensor) -> Tensor:
        """Return one over the rows of the rollout that have a token of the policy."""
        count = torch.zeros(tokens.n_rollouts, dtype=torch.float64).index_add(0, tokens.rollout, has.double())
        return has.double() / count.clamp(min=1)[tokens.rollout]

    def extra(self, scores: Tensor, pairs: Pairs) -> tuple[float, Tensor]:
        """See ``PairwiseInterface``."""
        both = scores[pairs.better] + scores[pairs.worse]
        slope = 2 * self._center * pairs.weight * both
        slopes = torch.zeros_like(scores).index_add(0, pairs.better, slope).index_add(0, pairs.worse, slope)
        return self._center * float((pairs.weight * both.square()).sum()), slopes

    def inference(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return ``rewards`` f32, one per sequence, NaN where the verifier's are, and statistics: their mean, that of
        the model's part, and how often it agrees with the verifier on pairs of a group."""
        tokens = PredictedTokens.of(sample)
        verifier = sample[VERIFIER_REWARDS].cpu().double()
        has = tokens.having(tokens.mask) & torch.isfinite(verifier)
        rows = self.row_scores(model, sample, context)
        blank = torch.zeros(tokens.n_rollouts, dtype=torch.float64)
        scores = blank.index_add(0, tokens.rollout, self.shares(tokens, has) * rows)
        preferred = torch.sigmoid(scores)[tokens.rollout]
        known = torch.zeros(tokens.n_rollouts, dtype=torch.bool).index_fill(0, tokens.rollout[has], True)
        mixed = (1 - self._weight) * verifier + self._weight * preferred
        # A rollout without any token of the policy has nothing that could be scored.
        rewards = torch.where(known[tokens.rollout] & torch.isfinite(verifier), mixed, verifier)
        rewards = rewards + length_penalties(sample, *self._overlong)
        means, _ = rollout_means(verifier, has, tokens.rollout)
        group = torch.zeros_like(tokens.rollout[: len(means)]).scatter(0, tokens.rollout, tokens.group)
        stats = {"n_scored": float(has.sum()), **statistics(scores, pairs_of(means, known, group))}
        if bool(has.any()):
            stats["reward_mean"] = float(rewards[has].mean())
            stats["model_reward_mean"] = float(preferred[has].mean())
        lengths = {"rewards": sample.lengths(VERIFIER_REWARDS)}
        out = SequenceSample.from_lengths(
            sample.ids, lengths, {"rewards": "f32"}, {"rewards": ()}, {"rewards": rewards.float()}, {}
        )
        return out, stats


def ended_rows(sample: SequenceSample, tokenizer: Any) -> SequenceSample:
    """Return ``packed_input_ids`` and ``loss_mask`` of every row up to the last token of its mask and one token more,
    which alone is in the mask: what is predicted of it is said of the state behind the row's last. A row without a
    token of the mask is left with its first one and without a mask."""
    end = int(tokenizer.eos_token_id) if tokenizer is not None and tokenizer.eos_token_id is not None else 0
    lengths = np.asarray(sample.lengths("packed_input_ids").values)
    rows, masks, kept = list[Tensor](), list[Tensor](), list[int]()
    split = lengths.tolist()
    for ids, mask in zip(
        sample["packed_input_ids"].cpu().split(split), sample["loss_mask"].cpu().bool().split(split), strict=True
    ):
        trained = torch.nonzero(mask[1:]).flatten()
        size = int(trained[-1]) + 2 if len(trained) else 1
        rows.append(torch.cat([ids[:size], ids.new_tensor([end])]))
        masks.append(torch.zeros(size + 1, dtype=torch.bool))
        masks[-1][-1] = bool(len(trained))
        kept.append(size + 1)
    sizes = iter(kept)
    nested = [[next(sizes) for _ in inner] for inner in sample.seqlens["packed_input_ids"]]
    tensors = {"packed_input_ids": torch.cat(rows), "loss_mask": torch.cat(masks)}
    return SequenceSample.from_tensors(sample.ids, tensors, dict.fromkeys(tensors, nested))


def _weighed(sample: SequenceSample, weights: Tensor, keep: Tensor) -> SequenceSample:
    """Return the rows in ``keep`` with ``loss_weights``; all of them where none is, so that a step is made."""
    part = weighted_part(sample, {WEIGHTS: weights.float()}, keep)
    return part if part is not None else replace_keys(sample, shifted={WEIGHTS: weights.float()})


def _weighed_sum(values: Tensor, part: SequenceSample) -> Tensor:
    return weighted_sum(values, part[WEIGHTS].to(values.device), PredictedTokens.of(part).mask.to(values.device))
