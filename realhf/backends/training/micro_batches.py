"""Micro-batches: splitting a batch over the ranks of a role, and summing their losses and
statistics."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from realhf.api.sample import MicroBatchSpec, SequenceSample, choose_sequences
from realhf.backends.training.sequence_packing import (
    BATCH_TOKENS,
    CHEAP_TOKENS,
    ROW_TOKENS,
    PackedRow,
    SequenceInputs,
    batch_packed_rows,
    batch_padded_rows,
    build_single_rows,
    pack_shared_rows,
    split_row,
)

_log = logging.getLogger(__name__)
_MAX_SHARED_FRACTION = 0.85
"""Common prefixes are computed once only if that reduces the number of positions to at most this
fraction. With smaller savings, the cost of the attention mask would prevail."""


class Ranks:
    """Communication among the engines of one role. This base class serves a role with a single
    worker.

    All engines of a role get the same calls with the same batch, in the same order. Every method
    but ``select_rows``, ``settle`` and ``abort`` is a collective: all ranks call it with tensors of
    the same shape. If a rank is lost, it raises within the timeout of the implementation.
    """

    rank: int = 0
    """Index of this rank, from 0."""
    size: int = 1
    """Number of ranks."""

    @property
    def passes_are_collective(self) -> bool:
        """Whether forward and backward passes are collectives (sharded weights).

        A rank that has computed all its rows then still has to take part in the other ranks'
        passes.
        """
        return False

    def select_rows(self, costs: Sequence[int]) -> list[int]:
        """Return the indices of the rows that this rank computes. ``costs`` are the positions of
        each row.

        Every row belongs to exactly one rank; a rank may have none.
        """
        return list(range(len(costs)))

    def sum_(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place. The result has the same bits on all ranks."""

    def gather(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the ``values`` (JSON types) of every rank, in the order of ranks. Ranks may have
        different names."""
        return [dict(values)]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of the parameters over the ranks. A gradient that is None counts as
        0."""

    def settle(self) -> None:
        """Wait until this rank's collectives are complete on its device.

        Raises if they were aborted: an aborted GPU collective ends without an error, but with
        partial sums.
        """

    def abort(self, reason: str = "") -> None:
        """Abort all collectives of this rank, so that no other rank keeps waiting for it."""


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that are computed in one pass through the model."""

    sample: SequenceSample
    """Sequences of the micro-batch."""
    place: torch.Tensor
    """Index in the batch of each entry of ``sample``'s packed L-1 layout, i64 (sum of L-1,)."""
    rows: tuple[PackedRow, ...]
    """Rows to compute, made of sequences of ``sample``; empty if none needs computing."""
    packed: bool = False
    """Whether the rows are concatenated without padding."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.rows

    @property
    def positions(self) -> int:
        """Number of computed positions, padding included."""
        if self.packed:
            return sum(row.length for row in self.rows)
        return len(self.rows) * max((row.length for row in self.rows), default=0)


def split_micro_batches(
    sample: SequenceSample,
    spec: MicroBatchSpec,
    ranks: Ranks,
    *,
    share: bool = False,
    packed: bool = False,
    row_tokens: int | None = ROW_TOKENS,
) -> list[MicroBatch]:
    """Return the micro-batches of this rank, the largest first; deterministic.

    A batch is split by sequence, also within a group: values that depend on groups or the whole
    batch are already in its keys. No micro-batch has more than ``spec.max_tokens_per_mb``
    positions, padding included; a single longer sequence gets its own micro-batch, which is logged.
    There are at least ``spec.n_mbs`` micro-batches if there are enough sequences. Sequences without
    a trainable token are not computed; they belong to the first micro-batch.

    Args:
        sample: The batch.
        spec: Limits of the micro-batches.
        ranks: The ranks of the role.
        share: Whether to compute common prefixes of sequences only once if that saves enough.
        packed: Whether the rows of a pass are concatenated without padding.
        row_tokens: With ``share``, maximum positions of a row, or twice those of a longer sequence
            (up to ``BATCH_TOKENS``). None: a row is bounded only by ``spec`` and by the number of
            ranks.
    """
    inputs = SequenceInputs.from_sample(sample)
    budget = spec.max_tokens_per_mb or BATCH_TOKENS
    max_row = min(row_tokens or budget, budget)
    longest = min(budget, BATCH_TOKENS)
    rows = _build_shared_rows(inputs, ranks.size, max_row, longest) if share else None
    rows = build_single_rows(inputs.scored, inputs.tokens) if rows is None else rows
    if ranks.size > 1:
        rows = [rows[i] for i in sorted(ranks.select_rows([row.length for row in rows]))]
    unscored = (
        [i for i, positions in enumerate(inputs.scored_positions) if not len(positions)]
        if ranks.rank == 0
        else []
    )
    passes = _split_passes(rows, inputs, spec, packed)
    if not passes and unscored:
        passes = [[]]
    return [
        replace(
            _build_micro_batch(sample, inputs, pass_rows, [] if number else unscored), packed=packed
        )
        for number, pass_rows in enumerate(passes)
    ]


def _build_shared_rows(
    inputs: SequenceInputs, n_ranks: int, max_row: int, longest: int
) -> list[PackedRow] | None:
    """Return rows that compute common prefixes once, or None if that saves too little."""
    if len(inputs.scored) < 2:
        return None
    if n_ranks > 1:
        # At least four rows per rank, so that the ranks can be balanced.
        total = sum(
            row.length for row in pack_shared_rows(inputs.scored, inputs.tokens, max_row, longest)
        )
        max_row = min(max_row, math.ceil(total / (4 * n_ranks)))
    rows = pack_shared_rows(inputs.scored, inputs.tokens, max_row, longest)
    unshared = sum(len(inputs.tokens[i]) for i in inputs.scored)
    return rows if sum(row.length for row in rows) <= _MAX_SHARED_FRACTION * unshared else None


def _split_passes(
    rows: list[PackedRow], inputs: SequenceInputs, spec: MicroBatchSpec, packed: bool
) -> list[list[PackedRow]]:
    """Split rows into passes within the token limit. Rows of a pass have similar lengths; the pass
    with the most positions comes first."""
    cap = spec.max_tokens_per_mb
    if n_longer := sum(row.length > cap for row in rows) if cap is not None else 0:
        _log.warning(
            "%d sequences are longer than max_tokens_per_mb=%s: one micro-batch each", n_longer, cap
        )
    if packed:
        passes = [
            [rows[i] for i in batch]
            for batch in batch_packed_rows([row.length for row in rows], cap)
        ]
    else:
        passes = []
        for kind in _split_by_mask(rows):
            batches = batch_padded_rows(
                range(len(kind)), np.asarray([row.length for row in kind]), cap
            )
            passes += [[kind[i] for i in batch] for batch in batches]
    while len(passes) < spec.n_mbs and any(_is_divisible(pass_rows) for pass_rows in passes):
        _halve_largest(passes, inputs)
    if packed:
        return sorted(passes, key=lambda chosen: -sum(row.length for row in chosen))
    return sorted(passes, key=lambda chosen: -len(chosen) * max(row.length for row in chosen))


def _split_by_mask(rows: list[PackedRow]) -> tuple[list[PackedRow], list[PackedRow]]:
    """Split rows into those that need an attention mask and those that do not.

    If the rows without a mask have fewer than ``CHEAP_TOKENS`` tokens, they are not worth a pass of
    their own, and all rows are returned in one list.
    """
    unmasked = [row for row in rows if row.is_single]
    masked = [row for row in rows if not row.is_single]
    if sum(row.length for row in unmasked) >= CHEAP_TOKENS:
        return masked, unmasked
    return (rows, []) if masked else ([], rows)


def _is_divisible(pass_rows: Sequence[PackedRow]) -> bool:
    """Return whether a pass has at least two sequences."""
    return len(pass_rows) > 1 or not pass_rows[0].is_single


def _halve_largest(passes: list[list[PackedRow]], inputs: SequenceInputs) -> None:
    """Split the pass with the most tokens among those with at least two sequences, in place."""
    divisible = [i for i, pass_rows in enumerate(passes) if _is_divisible(pass_rows)]
    largest = max(divisible, key=lambda i: (sum(row.length for row in passes[i]), -i))
    chosen = passes[largest]
    if len(chosen) == 1:
        first, second = split_row(chosen[0], inputs.tokens)
        passes[largest : largest + 1] = [[first], [second]]
    else:
        passes[largest : largest + 1] = [chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]]


def _build_micro_batch(
    sample: SequenceSample, inputs: SequenceInputs, rows: list[PackedRow], unscored: list[int]
) -> MicroBatch:
    """Return the micro-batch that computes these rows and also contains the ``unscored`` sequences,
    which are not computed."""
    lengths = np.asarray(sample.lengths("packed_input_ids").values)
    keep = np.zeros(len(lengths), dtype=bool)
    keep[[i for row in rows for i in row.members] + unscored] = True
    chosen = sample if keep.all() else choose_sequences(sample, keep)
    assert chosen is not None
    number = np.cumsum(keep) - 1
    kept_rows = tuple(
        replace(row, members=tuple(int(number[i]) for i in row.members)) for row in rows
    )
    return MicroBatch(
        chosen, torch.from_numpy(np.flatnonzero(np.repeat(keep, lengths - 1))), kept_rows
    )


class StepAccount:
    """Accumulator of losses, statistics and kept tensors over a rank's micro-batches.

    Attributes:
        backward: Whether any loss had a gradient.

    Args:
        size: Sum of L-1 over the sequences of the batch.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._loss = 0.0
        self._stats: dict[str, float] = {}
        self._kept: dict[str, Tensor] = {}
        self.backward = False

    def add(
        self, part: MicroBatch, loss: float, stats: Mapping[str, float], kept: Mapping[str, Tensor]
    ) -> None:
        """Add the results of one micro-batch."""
        self._loss += loss
        self._stats = sum_statistics([self._stats, stats])
        for name, values in kept.items():
            self._kept_tensor(name)[part.place] = values

    def sum_over(self, ranks: Ranks) -> tuple[dict[str, float], bool, dict[str, Tensor]]:
        """Return the results of the whole batch, equal on every rank.

        These are the statistics including ``loss``, whether any rank had a gradient, and the kept
        tensors, fp32 (size,).
        """
        own = {
            "stats": self._stats,
            "loss": self._loss,
            "backward": self.backward,
            "kept": [*self._kept],
        }
        parts = ranks.gather(own)
        for name in sorted({name for part in parts for name in part["kept"]}):
            ranks.sum_(self._kept_tensor(name))
        stats = {
            **sum_statistics(part["stats"] for part in parts),
            "loss": sum(part["loss"] for part in parts),
        }
        return stats, any(part["backward"] for part in parts), self._kept

    def _kept_tensor(self, name: str) -> Tensor:
        """Return the tensor kept under a name, with 0 where this rank has no value."""
        return self._kept.setdefault(name, torch.zeros(self._size))


def sum_statistics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum each statistic over ``parts``; take the maximum of those whose name ends in ``_max``."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            elif name.endswith("_max"):
                total[name] = max(total[name], value)
            else:
                total[name] += value
    return total
