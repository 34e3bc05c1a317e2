"""Holds what the train steps of all algorithms share: views of a batch, minibatches, token weights of the loss, and
the guard against non-finite updates.

Source: docs/reference/dataflow.md 10.
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
"""The key of the weight of every predicted token in the loss, f32 (L-1)."""
RL, KL, CE = "rl_weights", "kl_weights", "ce_weights"
COMPONENTS: Mapping[str, float] = MappingProxyType({RL: 1.0, KL: 1.0, CE: 0.0})
"""The components of a loss: the key, f32 (L-1), in which a batch says how much each predicted token counts there, and
what every token of ``loss_mask`` counts in a batch without the key. Each component is aggregated over the tokens that
count in it, so that none dilutes another. What a micro-batch has under the key is that number times the weight of the
aggregation (``component_weights``)."""
_NONE: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class PredictedTokens:
    """Describes the positions of the L-1 layout: ``mask`` bool (n,) is true where the predicted token is trainable;
    ``sequence`` i64 (n,) numbers the sequence of each position; ``group`` i64 (n_sequences,) numbers the sample of each
    sequence, ``rollout`` i64 (n_sequences,) its rollout: the branches of an agent are sequences of one, and so are the
    parts of a conversation whose old reasoning was dropped."""

    mask: Tensor
    sequence: Tensor
    group: Tensor
    rollout: Tensor

    @property
    def n_sequences(self) -> int:
        """The number of sequences of the batch."""
        return len(self.group)

    @property
    def n_rollouts(self) -> int:
        """The number of rollouts of the batch: at most that of sequences."""
        return int(self.rollout.max()) + 1 if len(self.rollout) else 0

    @property
    def owner(self) -> Tensor:
        """The number of the rollout of each position, i64 (n,)."""
        return self.rollout[self.sequence]

    def having(self, positions: Tensor) -> Tensor:
        """Return which sequences have one of ``positions``, bool (n,) in and bool (n_sequences,) out."""
        found = torch.zeros(self.n_sequences, dtype=torch.bool)
        found[self.sequence[positions]] = True
        return found

    @staticmethod
    def of(sample: SequenceSample) -> PredictedTokens:
        """Read the positions from ``loss_mask`` (all True if absent), the lengths of ``packed_input_ids`` and
        ``rollout_index`` (if absent, each sequence is a rollout)."""
        lengths = np.asarray(sample.lengths("packed_input_ids").values)
        sequence = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths - 1))
        group = torch.from_numpy(np.asarray(sample.group_index("packed_input_ids")))
        mask = torch.ones(len(sequence), dtype=torch.bool)
        if "loss_mask" in sample.keys:
            mask = predicted(sample, "loss_mask").bool()
        return PredictedTokens(mask, sequence, group, rollouts(sample))


def rollouts(sample: SequenceSample) -> Tensor:
    """Return the number of each sequence's rollout, i64 (n sequences,), in the order of samples and of
    ``rollout_index``; without that key each sequence is one."""
    group = torch.from_numpy(np.asarray(sample.group_index("packed_input_ids")))
    if ROLLOUT_KEY not in sample.keys:
        return torch.arange(len(group))
    index = sample[ROLLOUT_KEY].cpu().long()
    if len(index) and int(index.min()) < 0:
        raise ValueError(f"{ROLLOUT_KEY}: the number of a rollout is not negative")
    return torch.unique(group * (int(index.max()) + 1 if len(index) else 1) + index, return_inverse=True)[1]


def predicted(sample: SequenceSample, key: str) -> Tensor:
    """Return the entries of a per-token key for the predicted tokens, all but the first of each sequence: (n,) in the
    L-1 layout."""
    lengths = np.asarray(sample.lengths(key).values)
    starts = np.cumsum(lengths) - lengths
    later = np.ones(int(lengths.sum()), dtype=bool)
    later[starts[lengths > 0]] = False
    return sample[key].cpu()[torch.from_numpy(later)]


def replace_keys(
    sample: SequenceSample, *, per_token: Mapping[str, Tensor] = _NONE, shifted: Mapping[str, Tensor] = _NONE
) -> SequenceSample:
    """Return the sample with keys added or replaced: ``per_token`` has L entries per sequence, ``shifted`` L-1."""
    nested = sample.seqlens["packed_input_ids"]
    less_one = [[length - 1 for length in inner] for inner in nested]
    seqlens = {**dict.fromkeys(per_token, nested), **dict.fromkeys(shifted, less_one)}
    new = SequenceSample.from_tensors(sample.ids, {**per_token, **shifted}, seqlens)
    kept = [key for key in sample.keys if key not in seqlens]
    return sample.select(kept).update(new)


def shifted_sample(sample: SequenceSample, key: str, values: Tensor) -> SequenceSample:
    """Return a sample of ``values`` alone, which have L-1 entries per sequence of ``sample``."""
    less_one = [[length - 1 for length in inner] for inner in sample.seqlens["packed_input_ids"]]
    return SequenceSample.from_tensors(sample.ids, {key: values}, {key: less_one})


def minibatches(sample: SequenceSample, n: int, seed: tuple[int, ...]) -> list[SequenceSample]:
    """Cut ``sample`` into ``n`` parts, or into as many as there are rollouts; deterministic in ``seed``.

    Groups are cut too, so whatever a loss needs of a group must be in the keys already; the sequences of a rollout stay
    together. In shuffled order each rollout joins the part with the fewest tokens so far: parts differ by at most the
    longest rollout.
    """
    rollout = rollouts(sample).numpy()
    lengths = np.bincount(rollout, weights=sample.lengths("packed_input_ids").values).astype(np.int64)
    owner, load = np.zeros(len(lengths), dtype=np.int64), np.zeros(n, dtype=np.int64)
    for i in np.random.default_rng(seed).permutation(len(lengths)):
        owner[i] = load.argmin()
        load[owner[i]] += lengths[i]
    parts = [choose_sequences(sample, owner[rollout] == number) for number in range(n)]
    return [part for part in parts if part is not None]


def updates_of(sample: SequenceSample, n: int, passes: int, seed: int) -> list[SequenceSample]:
    """Return what each update of a train step gets: in every pass ``n`` parts, cut anew."""
    if n * passes == 1:
        return [sample]
    return [part for number in range(passes) for part in minibatches(sample, n, (seed, number))]


def weighted_part(part: SequenceSample, weights: Mapping[str, Tensor], keep: Tensor) -> SequenceSample | None:
    """Return the sequences of a minibatch in ``keep``, bool (n sequences,), as a loss takes them, with the keys
    ``weights``; None without any."""
    kept = part.select(part.keys - {ROLLOUT_KEY, TURN_IDS})
    return choose_sequences(replace_keys(kept, shifted=weights), keep.numpy())


def component_weights(part: SequenceSample, aggregation: str, loss_scale_len: int = 1) -> dict[str, Tensor]:
    """Return what multiplies the loss of every predicted token of a minibatch: ``loss_weights`` of all trained tokens,
    and for each key of ``COMPONENTS`` in ``part`` the weights of the tokens that have one there, times it."""
    tokens = PredictedTokens.of(part)
    turn = predicted(part, TURN_IDS) if TURN_IDS in part.keys else None
    found = {WEIGHTS: token_weights(tokens, aggregation, loss_scale_len, turn)}
    for key in COMPONENTS:
        if key in part.keys:
            own = replace(tokens, mask=counting(part, key, tokens.mask))
            share = torch.where(own.mask, part[key].cpu(), 0.0)
            found[key] = token_weights(own, aggregation, loss_scale_len, turn) * share
    return found


def counting(sample: SequenceSample, component: str, mask: Tensor) -> Tensor:
    """Return the tokens of ``mask``, bool (n,), that count in a component."""
    if component in sample.keys:
        return mask & (sample[component].to(mask.device) != 0)
    return mask if COMPONENTS[component] else torch.zeros_like(mask)


def component_sum(values: Tensor, part: SequenceSample, component: str) -> Tensor:
    """Return the sum of ``values`` (n,) over the tokens of a micro-batch that count in a component, by their weights
    there: a scalar with the graph of ``values`` attached. Where they count nothing ``values`` may be anything."""
    mask = counting(part, component, PredictedTokens.of(part).mask.to(values.device))
    return weighted_sum(values, part[component if component in part.keys else WEIGHTS].to(values.device), mask)


def token_weights(
    tokens: PredictedTokens, aggregation: str, loss_scale_len: int = 1, turn: Tensor | None = None
) -> Tensor:
    """Return the weight of every token such that the sum of weight * loss is the aggregated loss: f32 (n,), 0 outside
    the mask. ``turn`` i (n,) numbers the turn of each token within its sequence. Raises ValueError for an aggregation
    that does not exist, and without ``turn`` for one that counts turns.

    The weights are computed over a whole minibatch, so that it can be cut into microbatches afterwards, and before any
    sequence is left out for having no advantage: normalisers count those too.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {aggregation!r}")
    prompt = tokens.group[tokens.sequence]
    counts = TokenCounts(
        tokens.mask,
        Unit(tokens.owner, tokens.n_rollouts),
        Unit(prompt, int(prompt.max()) + 1 if len(prompt) else 0),
        None if turn is None else _turns(tokens.sequence, turn),
        loss_scale_len,
    )
    weight = AGGREGATIONS[aggregation].weight(counts)
    return torch.where(tokens.mask, weight, 0.0).float()


def _turns(sequence: Tensor, turn: Tensor) -> Unit:
    """Number the turns of all sequences; what lies in no turn (-1) of a sequence counts as one more."""
    index = sequence * (int(turn.max()) + 2 if len(turn) else 1) + turn.long() + 1
    found, index = torch.unique(index, return_inverse=True)
    return Unit(index, len(found))


def weighted_sum(values: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of weights * values over the mask, a scalar with the graph of ``values`` attached."""
    return torch.where(mask, values * weights, 0.0).sum()


class NonFiniteGuard:
    """Counts consecutive updates that the engine skipped; the run should stop when there are ``limit`` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_a_row = 0

    def observe(self, result: TrainResult) -> bool:
        """Count the result of an update; call it after every one. Returns False when this step should make no further
        update."""
        self.in_a_row = self.in_a_row + 1 if result.skipped else 0
        return self.in_a_row < self._limit

    def verdict(self) -> dict[str, str]:
        """Return what to add to the statistics of the step: ``stop``, the reason to end the run, or nothing. The master
        ends the run after it has written down what was skipped."""
        if self.in_a_row < self._limit:
            return {}
        return {"stop": f"loss or gradient not finite in {self.in_a_row} updates in a row; see nonfinite.jsonl"}


_OF_FIRST = ("mismatch_kl", "mismatch_abs")
_TOTALS = ("clamped_exponents", "n_trained_tokens")
WEIGHT_SUMS = ("weights_n", "weights_sum", "weights_squares", "weighed_sequences", "rejected_sequences")
"""Of the behaviour weights of a micro-batch: how many, their sum and that of their squares, and of how many sequences,
of which so many were left out."""


def summary(results: Sequence[TrainResult]) -> dict[str, float]:
    """Summarise a train step. Per-token means and losses (``loss``, and ``loss_<name>`` of a component) are averaged
    over minibatches; the mismatch is that of the first minibatch, the only one that ran before any update."""
    skipped = float(sum(result.skipped for result in results))
    out = {"n_updates": len(results) - skipped, "skipped": skipped, "n_trained_tokens": 0.0, "grad_norm": 0.0}
    if not results:
        return out
    n_tokens = sum(result.stats.get("n_trained_tokens", 0.0) for result in results)
    names = {name for result in results for name in result.stats}
    if names.issuperset(WEIGHT_SUMS):
        out |= _weight_figures(results)
    for name in sorted(names.difference(WEIGHT_SUMS)):
        values = [result.stats[name] for result in results if name in result.stats]
        if name in _TOTALS:
            out[name] = sum(values)
        elif name in _OF_FIRST:
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


def _weight_figures(results: Sequence[TrainResult]) -> dict[str, float]:
    """Return the effective sample size of the behaviour weights as a fraction, (sum w)^2 / (n sum w^2), 0 where all are
    0 (Kish 1965), and the fraction of sequences that were left out."""
    n, total, squares, sequences, rejected = (
        sum(result.stats.get(name, 0.0) for result in results) for name in WEIGHT_SUMS
    )
    return {
        "effective_sample_size": total**2 / (n * squares) if squares > 0 else 0.0,
        "rejected_sequences": rejected / max(1.0, sequences),
    }
