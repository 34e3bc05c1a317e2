"""Divides a batch into micro-batches over the ranks of a role, and adds up what they returned."""

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
    ROW_TOKENS,
    SMALL,
    Row,
    SequenceInputs,
    packed_batches,
    plain_rows,
    row_batches,
    shared_rows,
    split_row,
)


class Ranks:
    """Joins the engines of one role, which all get the same calls with the same batch, in the same order. This one is
    alone: the role has one worker.

    Every method but ``own``, ``settle`` and ``abort`` is a collective: all ranks call it with tensors of the same
    shape. One that cannot end because a rank is lost raises within the deadline of the implementation.
    """

    rank: int = 0
    """The number of this rank, from 0."""
    size: int = 1

    @property
    def in_step(self) -> bool:
        """Whether the passes themselves are collectives (sharded weights), so that a rank which has nothing left to
        compute has to take part in those of the others."""
        return False

    def own(self, costs: Sequence[int]) -> list[int]:
        """Return which rows of sequences this rank computes, given the positions of each. Every row is that of one
        rank; a rank may have none."""
        return list(range(len(costs)))

    def sum_(self, tensor: Tensor) -> None:
        """Add ``tensor`` up over the ranks, in place: the same bits on all of them."""

    def gather(self, told: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what every rank tells, as JSON has it, in the order of ranks. Names may differ from rank to rank."""
        return [dict(told)]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of the parameters over the ranks. A gradient may be None on a rank that had nothing to
        compute; it counts as 0."""

    def settle(self) -> None:
        """Wait until what this rank has begun with the others is complete on its device. Raises where it was broken
        off meanwhile: a collective of a GPU that is broken off ends without an error, with a part of its sums."""

    def abort(self, reason: str = "") -> None:
        """Give up what the ranks have in common, so that nobody waits for this one."""


_log = logging.getLogger(__name__)
_WORTH = 0.85
"""Common prefixes are computed once when that leaves at most this share of the positions: a mask costs time too."""


@dataclass(frozen=True)
class Part:
    """Is a micro-batch: one pass through the model. ``sample`` has some of the batch's sequences; ``place`` i64 (sum of
    its L-1,) says where its packed L-1 entries stand in those of the batch; ``rows`` are computed, of sequences of
    ``sample``. None of them: there is nothing to compute. ``packed``: they lie behind each other, without padding."""

    sample: SequenceSample
    place: torch.Tensor
    rows: tuple[Row, ...]
    packed: bool = False

    @property
    def empty(self) -> bool:
        """Whether nothing is computed."""
        return not self.rows

    @property
    def positions(self) -> int:
        """How many positions are computed, padding included."""
        if self.packed:
            return sum(row.length for row in self.rows)
        return len(self.rows) * max((row.length for row in self.rows), default=0)


def parts_of(
    sample: SequenceSample,
    spec: MicroBatchSpec,
    ranks: Ranks,
    *,
    share: bool = False,
    packed: bool = False,
    row_tokens: int | None = ROW_TOKENS,
) -> list[Part]:
    """Return the micro-batches that this rank computes; none if there is nothing for it. A batch is cut by sequence,
    even within a group: what concerns groups or the whole batch is already in its keys. No part computes more than
    ``spec.max_tokens_per_mb`` positions, padding included (a single longer sequence is a part of its own, and logged),
    and there are at least ``spec.n_mbs`` parts as far as there are sequences. A sequence without a trainable token
    computes nothing; it goes with the first part. Deterministic; the largest part comes first.

    With
    ``share`` a prefix that sequences have in common is computed once where that saves enough; such sequences stay
    together in rows of up to ``row_tokens`` positions, or twice those of a sequence that is long itself (up to
    ``BATCH_TOKENS``), as far as ranks and ``spec`` let them; None: these alone bound a row. ``packed``: the rows of a
    pass need no padding."""
    inputs = SequenceInputs.of(sample)
    budget = spec.max_tokens_per_mb or BATCH_TOKENS
    most, longest = min(row_tokens or budget, budget), min(budget, BATCH_TOKENS)
    rows = _rows(inputs, ranks.size, most, longest) if share else None
    rows = plain_rows(inputs.scored, inputs.tokens) if rows is None else rows
    if ranks.size > 1:
        rows = [rows[i] for i in sorted(ranks.own([row.length for row in rows]))]
    idle = [i for i, asked in enumerate(inputs.asked) if not len(asked)] if ranks.rank == 0 else []
    passes = _passes(rows, inputs, spec, packed)
    if not passes and idle:
        passes = [[]]
    return [
        replace(_part(sample, inputs, chosen, [] if number else idle), packed=packed)
        for number, chosen in enumerate(passes)
    ]


def _rows(inputs: SequenceInputs, n_ranks: int, most: int, longest: int) -> list[Row] | None:
    """Return rows that compute common prefixes once, or None where that saves too little."""
    if len(inputs.scored) < 2:
        return None
    if n_ranks > 1:  # Small rows can be balanced.
        whole = sum(row.length for row in shared_rows(inputs.scored, inputs.tokens, most, longest))
        most = min(most, math.ceil(whole / (4 * n_ranks)))
    rows = shared_rows(inputs.scored, inputs.tokens, most, longest)
    apart = sum(len(inputs.tokens[i]) for i in inputs.scored)
    return rows if sum(row.length for row in rows) <= _WORTH * apart else None


def _passes(rows: list[Row], inputs: SequenceInputs, spec: MicroBatchSpec, packed: bool) -> list[list[Row]]:
    """Put rows of similar length together, as many as the budget holds; the pass with the most positions first."""
    cap = spec.max_tokens_per_mb
    if above := sum(row.length > cap for row in rows) if cap is not None else 0:
        _log.warning("%d sequences are longer than max_tokens_per_mb=%s: one micro-batch each", above, cap)
    if packed:
        passes = [[rows[i] for i in batch] for batch in packed_batches([row.length for row in rows], cap)]
    else:
        passes = []
        for kind in _by_kind(rows):
            batches = row_batches(range(len(kind)), np.asarray([row.length for row in kind]), cap)
            passes += [[kind[i] for i in batch] for batch in batches]
    while len(passes) < spec.n_mbs and any(_divisible(chosen) for chosen in passes):
        _halve_largest(passes, inputs)
    if packed:
        return sorted(passes, key=lambda chosen: -sum(row.length for row in chosen))
    return sorted(passes, key=lambda chosen: -len(chosen) * max(row.length for row in chosen))


def _by_kind(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Part rows into those that need a mask and those that do not, if the latter are worth passes of their own."""
    plain, shared = [row for row in rows if row.plain], [row for row in rows if not row.plain]
    if sum(row.length for row in plain) >= SMALL:
        return shared, plain
    return (rows, []) if shared else ([], rows)


def _divisible(chosen: Sequence[Row]) -> bool:
    return len(chosen) > 1 or not chosen[0].plain


def _halve_largest(passes: list[list[Row]], inputs: SequenceInputs) -> None:
    """Halve the pass with the most tokens among those with two sequences or more."""
    divisible = [i for i, chosen in enumerate(passes) if _divisible(chosen)]
    largest = max(divisible, key=lambda i: (sum(row.length for row in passes[i]), -i))
    chosen = passes[largest]
    if len(chosen) == 1:
        first, second = split_row(chosen[0], inputs.tokens)
        passes[largest : largest + 1] = [[first], [second]]
    else:
        passes[largest : largest + 1] = [chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]]


def _part(sample: SequenceSample, inputs: SequenceInputs, rows: list[Row], idle: list[int]) -> Part:
    lengths = np.asarray(sample.lengths("packed_input_ids").values)
    keep = np.zeros(len(lengths), dtype=bool)
    keep[[i for row in rows for i in row.members] + idle] = True
    chosen = sample if keep.all() else choose_sequences(sample, keep)
    assert chosen is not None
    number = np.cumsum(keep) - 1
    own = tuple(replace(row, members=tuple(int(number[i]) for i in row.members)) for row in rows)
    return Part(chosen, torch.from_numpy(np.flatnonzero(np.repeat(keep, lengths - 1))), own)


class StepAccount:
    """Collects losses, statistics and kept tensors of the micro-batches of a rank. ``size`` is the sum of L-1 over the
    sequences of the batch; ``backward`` says whether any loss had a gradient."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._loss = 0.0
        self._stats: dict[str, float] = {}
        self._kept: dict[str, Tensor] = {}
        self.backward = False

    def add(self, part: Part, loss: float, stats: Mapping[str, float], kept: Mapping[str, Tensor]) -> None:
        """Take one micro-batch into account."""
        self._loss += loss
        self._stats = combined([self._stats, stats])
        for name, values in kept.items():
            self._whole(name)[part.place] = values

    def summed(self, ranks: Ranks) -> tuple[dict[str, float], bool, dict[str, Tensor]]:
        """Return statistics with ``loss``, whether any rank had a gradient, and the kept tensors, fp32 (size,): all of
        the whole batch, the same on every rank."""
        own = {"stats": self._stats, "loss": self._loss, "backward": self.backward, "kept": [*self._kept]}
        parts = ranks.gather(own)
        for name in sorted({name for part in parts for name in part["kept"]}):
            ranks.sum_(self._whole(name))
        stats = {**combined(part["stats"] for part in parts), "loss": sum(part["loss"] for part in parts)}
        return stats, any(part["backward"] for part in parts), self._kept

    def _whole(self, name: str) -> Tensor:
        return self._kept.setdefault(name, torch.zeros(self._size))


def combined(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add numbers of the same name up; of a name that ends in ``_max`` take the maximum."""
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
