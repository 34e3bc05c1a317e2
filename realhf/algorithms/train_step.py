"""Parts of a train step that all algorithms share.

Views of a batch, minibatches, token weights of the loss, summed statistics and the guard against
non-finite updates (docs/reference/dataflow.md 10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from realhf.algorithms.aggregation import AGGREGATIONS, TokenCounts, Unit
from realhf.api.keys import ROLLOUT_KEY, TURN_IDS
from realhf.api.model import POSITIONS, TrainResult
from realhf.api.sample import SequenceSample, choose_sequences

WEIGHTS = "loss_weights"
"""Key of every predicted token's weight in the loss, f32 (L-1)."""
RL = "rl_weights"
"""Key of every predicted token's weight in the policy loss, f32 (L-1)."""
KL = "kl_weights"
"""Key of every predicted token's weight in the KL to the reference, f32 (L-1)."""
CE = "ce_weights"
"""Key of every predicted token's weight in the cross-entropy loss, f32 (L-1)."""
COMPONENTS: Mapping[str, float] = MappingProxyType({RL: 1.0, KL: 1.0, CE: 0.0})
"""Components of a loss: the key of each component's token weights, and the weight that every token
of ``loss_mask`` has if a batch lacks that key.

Each component is aggregated over its own tokens only, so that the number of tokens of one component
does not scale another. In a microbatch the key holds the token weight times the aggregation's
weight (``component_weights``).
"""
WEIGHT_SUMS = (
    "weights_n",
    "weights_sum",
    "weights_squares",
    "weighed_sequences",
    "rejected_sequences",
)
"""Sums over the behaviour weights of a microbatch: the number of weights, their sum, the sum of
their squares, the number of sequences with a trained token, and the number of those that were
rejected."""
_FROM_FIRST_MINIBATCH = ("mismatch_kl", "mismatch_abs")
"""Statistics of a train step that are taken from its first minibatch, before any update."""
_TOTALS = ("clamped_exponents", "n_trained_tokens")
"""Statistics that are summed over the minibatches of a train step."""
_NONE: Mapping[str, Tensor] = MappingProxyType({})
"""Default of ``replace_keys``: no keys."""


@dataclass(frozen=True)
class PredictedTokens:
    """Positions of the predicted tokens of a batch: all but the first token of each sequence
    (L-1)."""

    mask: Tensor
    """Which predicted tokens are trainable, bool (n,)."""
    sequence: Tensor
    """Index of the sequence of each position, i64 (n,)."""
    group: Tensor
    """Index of the sample (group of rollouts) of each sequence, i64 (n_sequences,)."""
    rollout: Tensor
    """Index of the rollout of each sequence, i64 (n_sequences,). A rollout has several sequences
    where an agent branches, or where reasoning of earlier turns was dropped from the
    conversation."""

    @property
    def n_sequences(self) -> int:
        """Number of sequences of the batch."""
        return len(self.group)

    @property
    def n_rollouts(self) -> int:
        """Number of rollouts of the batch, at most the number of sequences."""
        return int(self.rollout.max()) + 1 if len(self.rollout) else 0

    @property
    def owner(self) -> Tensor:
        """Index of the rollout of each position, i64 (n,)."""
        return self.rollout[self.sequence]

    def sequences_with(self, positions: Tensor) -> Tensor:
        """Return which sequences contain one of ``positions`` bool (n,): bool (n_sequences,)."""
        has_position = torch.zeros(self.n_sequences, dtype=torch.bool)
        has_position[self.sequence[positions]] = True
        return has_position

    @staticmethod
    def from_sample(sample: SequenceSample) -> PredictedTokens:
        """Return the predicted tokens of a batch.

        Reads ``loss_mask`` (all True if absent), the lengths of ``packed_input_ids`` and
        ``rollout_index`` (if absent, each sequence is a rollout).
        """
        lengths = np.asarray(sample.lengths("packed_input_ids").values)
        sequence = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths - 1))
        group = torch.from_numpy(np.asarray(sample.group_index("packed_input_ids")))
        mask = torch.ones(len(sequence), dtype=torch.bool)
        if "loss_mask" in sample.keys:
            mask = drop_first_tokens(sample, "loss_mask").bool()
        return PredictedTokens(mask, sequence, group, rollouts(sample))


def rollouts(sample: SequenceSample) -> Tensor:
    """Return the index of each sequence's rollout, i64 (n_sequences,).

    Rollouts are numbered in the order of samples, then of ``rollout_index``; without that key each
    sequence is a rollout. Raises ValueError for a negative ``rollout_index``.
    """
    group = torch.from_numpy(np.asarray(sample.group_index("packed_input_ids")))
    if ROLLOUT_KEY not in sample.keys:
        return torch.arange(len(group))
    index = sample[ROLLOUT_KEY].cpu().long()
    if len(index) and int(index.min()) < 0:
        raise ValueError(f"{ROLLOUT_KEY}: the number of a rollout is not negative")
    return torch.unique(
        group * (int(index.max()) + 1 if len(index) else 1) + index, return_inverse=True
    )[1]


def drop_first_tokens(sample: SequenceSample, key: str) -> Tensor:
    """Return the entries of a per-token key without the first token of each sequence, (n,)."""
    lengths = np.asarray(sample.lengths(key).values)
    starts = np.cumsum(lengths) - lengths
    is_predicted = np.ones(int(lengths.sum()), dtype=bool)
    is_predicted[starts[lengths > 0]] = False
    return sample[key].cpu()[torch.from_numpy(is_predicted)]


def replace_keys(
    sample: SequenceSample,
    *,
    per_token: Mapping[str, Tensor] = _NONE,
    shifted: Mapping[str, Tensor] = _NONE,
) -> SequenceSample:
    """Return the sample with keys added or replaced.

    Values of ``per_token`` have L entries per sequence, those of ``shifted`` L-1.
    """
    nested = sample.seqlens["packed_input_ids"]
    shifted_lengths = [[length - 1 for length in inner] for inner in nested]
    seqlens = {**dict.fromkeys(per_token, nested), **dict.fromkeys(shifted, shifted_lengths)}
    new = SequenceSample.from_tensors(sample.ids, {**per_token, **shifted}, seqlens)
    other_keys = [key for key in sample.keys if key not in seqlens]
    return sample.select(other_keys).update(new)


def build_shifted_sample(sample: SequenceSample, key: str, values: Tensor) -> SequenceSample:
    """Return a sample with the single key ``key``, whose ``values`` have L-1 entries per sequence
    of ``sample``."""
    shifted_lengths = [
        [length - 1 for length in inner] for inner in sample.seqlens["packed_input_ids"]
    ]
    return SequenceSample.from_tensors(sample.ids, {key: values}, {key: shifted_lengths})


def minibatches(sample: SequenceSample, n: int, seed: tuple[int, ...]) -> list[SequenceSample]:
    """Split ``sample`` into ``n`` minibatches of similar token counts, deterministic in ``seed``.

    With fewer than ``n`` rollouts there are as many minibatches as rollouts. The sequences of a
    rollout stay together. A group may be split, so values that depend on the group have to be
    computed before. In shuffled order each rollout joins the minibatch with the fewest tokens:
    their sizes differ by at most the longest rollout.
    """
    rollout = rollouts(sample).numpy()
    lengths = np.bincount(rollout, weights=sample.lengths("packed_input_ids").values).astype(
        np.int64
    )
    part_of = np.zeros(len(lengths), dtype=np.int64)
    part_tokens = np.zeros(n, dtype=np.int64)
    for i in np.random.default_rng(seed).permutation(len(lengths)):
        part_of[i] = part_tokens.argmin()
        part_tokens[part_of[i]] += lengths[i]
    parts = [choose_sequences(sample, part_of[rollout] == number) for number in range(n)]
    return [part for part in parts if part is not None]


def split_updates(sample: SequenceSample, n: int, passes: int, seed: int) -> list[SequenceSample]:
    """Return the minibatch of each update of a train step: ``n`` minibatches in each of ``passes``
    passes, shuffled separately in every pass."""
    if n * passes == 1:
        return [sample]
    return [part for number in range(passes) for part in minibatches(sample, n, (seed, number))]


def select_weighted_part(
    part: SequenceSample, weights: Mapping[str, Tensor], keep: Tensor
) -> SequenceSample | None:
    """Return the sequences in ``keep``, bool (n_sequences,), with the keys ``weights``; None if
    empty.

    Keys that a loss does not read (``rollout_index``, ``turn_ids``) are dropped.
    """
    loss_inputs = part.select(part.keys - {ROLLOUT_KEY, TURN_IDS})
    return choose_sequences(replace_keys(loss_inputs, shifted=weights), keep.numpy())


def component_weights(
    part: SequenceSample, aggregation: str, loss_scale_len: int = 1
) -> dict[str, Tensor]:
    """Return the weight of each token in the loss and its components, f32 (L-1) each.

    ``loss_weights`` has the aggregation weights over all trained tokens. For each key of
    ``COMPONENTS`` in ``part`` there are aggregation weights over the component's own tokens, those
    with a nonzero ``part[key]``, times ``part[key]``.
    """
    tokens = PredictedTokens.from_sample(part)
    turn = drop_first_tokens(part, TURN_IDS) if TURN_IDS in part.keys else None
    weights = {WEIGHTS: token_weights(tokens, aggregation, loss_scale_len, turn)}
    for key in COMPONENTS:
        if key in part.keys:
            component_tokens = replace(tokens, mask=component_mask(part, key, tokens.mask))
            given_weights = torch.where(component_tokens.mask, part[key].cpu(), 0.0)
            weights[key] = (
                token_weights(component_tokens, aggregation, loss_scale_len, turn) * given_weights
            )
    return weights


def component_mask(sample: SequenceSample, component: str, mask: Tensor) -> Tensor:
    """Return which tokens of ``mask``, bool (n,), have a nonzero weight in a component."""
    if component in sample.keys:
        return mask & (sample[component].to(mask.device) != 0)
    return mask if COMPONENTS[component] else torch.zeros_like(mask)


def component_sum(values: Tensor, part: SequenceSample, component: str) -> Tensor:
    """Return the weighted sum of ``values`` (n,) over a component's tokens of a microbatch, a
    scalar.

    The result keeps the graph of ``values``. Values at other tokens are ignored, NaN included.
    """
    mask = component_mask(part, component, PredictedTokens.from_sample(part).mask.to(values.device))
    return weighted_sum(
        values, part[component if component in part.keys else WEIGHTS].to(values.device), mask
    )


def token_weights(
    tokens: PredictedTokens, aggregation: str, loss_scale_len: int = 1, turn: Tensor | None = None
) -> Tensor:
    """Return the weight of every token such that sum(weight * loss) is the aggregated loss, f32
    (n,).

    The weights are 0 outside the mask. They are computed over a whole minibatch, so that it can be
    split into microbatches afterwards, and before sequences without an advantage are dropped,
    because the normalisers count those too.

    Args:
        tokens: The predicted tokens of the minibatch.
        aggregation: A key of ``AGGREGATIONS``.
        loss_scale_len: The divisor of the aggregation ``constant``, tokens.
        turn: Index of each token's turn within its sequence, int (n,), -1 outside turns.

    Raises ValueError for an unknown aggregation, and without ``turn`` for an aggregation by turn.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {aggregation!r}")
    prompt = tokens.group[tokens.sequence]
    counts = TokenCounts(
        tokens.mask,
        Unit(tokens.owner, tokens.n_rollouts),
        Unit(prompt, int(prompt.max()) + 1 if len(prompt) else 0),
        None if turn is None else _number_turns(tokens.sequence, turn),
        loss_scale_len,
    )
    weight = AGGREGATIONS[aggregation].weight(counts)
    return torch.where(tokens.mask, weight, 0.0).float()


def _number_turns(sequence: Tensor, turn: Tensor) -> Unit:
    """Number the turns of all sequences. Tokens of a sequence outside its turns (-1) form one more
    turn."""
    key = sequence * (int(turn.max()) + 2 if len(turn) else 1) + turn.long() + 1
    unique_keys, index = torch.unique(key, return_inverse=True)
    return Unit(index, len(unique_keys))


def weighted_sum(values: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of weights * values over the mask, a scalar that keeps the graph of
    ``values``."""
    return torch.where(mask, values * weights, 0.0).sum()


class NonFiniteGuard:
    """Counter of consecutive skipped updates, which ends the run after ``limit`` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_a_row = 0

    def observe(self, result: TrainResult) -> bool:
        """Count the result of an update. Call it after every update of a step.

        Returns whether the step may continue with further updates.
        """
        self.in_a_row = self.in_a_row + 1 if result.skipped else 0
        return self.in_a_row < self._limit

    def stop_statistics(self) -> dict[str, str]:
        """Return ``{"stop": reason}`` if the run has to end, otherwise an empty dict.

        The caller adds it to the statistics of the step; the master ends the run after recording
        them.
        """
        if self.in_a_row < self._limit:
            return {}
        return {
            "stop": f"loss or gradient not finite in {self.in_a_row} updates in a row; see "
            f"nonfinite.jsonl"
        }


def summary(results: Sequence[TrainResult]) -> dict[str, float]:
    """Return the statistics of a train step from those of its updates.

    Losses (``loss``, and ``loss_<name>`` of a component) and ``lr`` are averaged over the updates,
    statistics per token over the trained tokens of all updates. The mismatch is that of the first
    minibatch only, because it is the one computed before any update.
    """
    skipped = float(sum(result.skipped for result in results))
    out = {
        "n_updates": len(results) - skipped,
        "skipped": skipped,
        "n_trained_tokens": 0.0,
        "grad_norm": 0.0,
    }
    if not results:
        return out
    n_tokens = sum(result.stats.get("n_trained_tokens", 0.0) for result in results)
    names = {name for result in results for name in result.stats}
    if names.issuperset(WEIGHT_SUMS):
        out |= _weight_statistics(results)
    for name in sorted(names.difference(WEIGHT_SUMS)):
        values = [result.stats[name] for result in results if name in result.stats]
        if name in _TOTALS:
            out[name] = sum(values)
        elif name in _FROM_FIRST_MINIBATCH:
            out[name] = values[0] / max(1.0, results[0].stats["n_trained_tokens"])
        elif name.endswith("_max"):
            out[name] = max(values)
        elif name == POSITIONS:
            out["positions_per_token"] = sum(values) / max(1.0, n_tokens)
        elif name == "lr" or name.startswith("loss"):
            out[name] = sum(values) / len(values)
        else:
            out[name] = sum(values) / max(1.0, n_tokens)
    out["grad_norm"] = sum(result.grad_norm for result in results) / len(results)
    return out


def _weight_statistics(results: Sequence[TrainResult]) -> dict[str, float]:
    """Return the effective sample size of the behaviour weights and the fraction of rejected
    sequences.

    The effective sample size is a fraction, (sum w)^2 / (n sum w^2), and 0 if all weights are 0
    (Kish 1965).
    """
    n, total, squares, sequences, rejected = (
        sum(result.stats.get(name, 0.0) for result in results) for name in WEIGHT_SUMS
    )
    return {
        "effective_sample_size": total**2 / (n * squares) if squares > 0 else 0.0,
        "rejected_sequences": rejected / max(1.0, sequences),
    }
