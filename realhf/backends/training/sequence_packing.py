"""Packing of sequences into the rows of a pass: padded, concatenated, or with common prefixes
computed once.

A row is a tree of tokens in depth-first order: its sequences in lexicographic order, each without
the prefix that it shares with the one before it. A token attends to its ancestors and itself, at
the position that it has in its own sequence, so its hidden state is the same as in a separate row.
Where sequences branch, one hidden state predicts several tokens. This way the rollouts of a group
share their prompt and any equal turns that follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.api.sample import SequenceSample
from realhf.backends.embedded.attention import layer_masks
from realhf.backends.training.tree_attention import RowTrees
from realhf.backends.training.varlen_attention import Kernel, PackedLayout, build_packed_layout


@dataclass(frozen=True)
class SequenceInputs:
    """Inputs and targets of every sequence of a batch."""

    tokens: list[np.ndarray]
    """Input tokens of each sequence, int64, up to the last one that a scored prediction depends
    on."""
    scored_positions: list[np.ndarray]
    """Positions in ``tokens`` from which a scored prediction is made, int64."""
    target: list[np.ndarray]
    """Token that each of these positions predicts, int64."""
    place: list[np.ndarray]
    """Index of each of these predictions in the packed L-1 layout of the batch, int64."""
    size: int
    """Number of entries of the packed L-1 layout."""

    @property
    def scored(self) -> list[int]:
        """Indices of the sequences with at least one scored prediction."""
        return [i for i, positions in enumerate(self.scored_positions) if len(positions)]

    @staticmethod
    def from_sample(sample: SequenceSample) -> SequenceInputs:
        """Return the inputs of a batch; ``loss_mask`` selects the scored predictions. Without it,
        all are scored.

        Raises ValueError for an empty sequence.
        """
        lengths = np.asarray(sample.lengths("packed_input_ids").values)
        if (lengths < 1).any():
            raise ValueError("packed_input_ids has an empty sequence")
        ids = sample["packed_input_ids"].cpu().numpy()
        mask = (
            sample["loss_mask"].cpu().numpy().astype(bool) if "loss_mask" in sample.keys else None
        )
        inputs = SequenceInputs([], [], [], [], int((lengths - 1).sum()))
        start = output = 0
        for length in lengths.tolist():
            positions = (
                np.arange(length - 1)
                if mask is None
                else np.flatnonzero(mask[start + 1 : start + length])
            )
            inputs.tokens.append(
                ids[start : start + (int(positions[-1]) + 1 if len(positions) else 0)]
            )
            inputs.scored_positions.append(positions)
            inputs.target.append(ids[start + 1 + positions])
            inputs.place.append(output + positions)
            start = start + length
            output = output + length - 1
        return inputs


ROW_TOKENS = 768
"""Default maximum number of positions in a row with several sequences. A row's attention mask, and
the cost of attention with it, grow with the square."""


@dataclass(frozen=True)
class PackedRow:
    """Sequences that are computed in one row."""

    members: tuple[int, ...]
    """Indices of the sequences."""
    shared: tuple[int, ...]
    """Number of tokens that each sequence shares with the sequence before it, 0 for the first."""
    length: int
    """Number of positions of the row."""

    @property
    def is_single(self) -> bool:
        """Whether the row is a single sequence, which needs no mask."""
        return len(self.members) == 1


def build_single_rows(members: Sequence[int], inputs: Sequence[np.ndarray]) -> list[PackedRow]:
    """Return a row for each of the sequences ``members``; ``inputs`` are the input tokens of all
    sequences."""
    return [PackedRow((i,), (0,), len(inputs[i])) for i in members]


def pack_shared_rows(
    members: Sequence[int],
    inputs: Sequence[np.ndarray],
    max_tokens: int = ROW_TOKENS,
    longest: int = 0,
) -> list[PackedRow]:
    """Pack the sequences ``members`` into rows that compute common prefixes once.

    A sequence that shares no prefix with the row starts a new row. The result does not depend on
    the order of ``members``.

    Args:
        members: Indices of the sequences.
        inputs: Input tokens of all sequences.
        max_tokens: Maximum number of positions of a row with several sequences.
        longest: Up to this number of positions, a row may also have twice the positions of its
            first sequence. Otherwise a prefix of about ``max_tokens`` tokens would be computed for
            each sequence.
    """
    order = sorted(members, key=lambda i: (inputs[i].astype(">u4").tobytes(), i))
    rows: list[PackedRow] = []
    current: list[int] = []
    shared: list[int] = []
    length = 0
    for i in order:
        common = common_prefix(inputs[current[-1]], inputs[i]) if current else 0
        room = max(max_tokens, min(longest, 2 * len(inputs[current[0]]))) if current else 0
        if common and length + len(inputs[i]) - common <= room:
            current.append(i)
            shared.append(common)
            length += len(inputs[i]) - common
            continue
        if current:
            rows.append(PackedRow(tuple(current), tuple(shared), length))
        current = [i]
        shared = [0]
        length = len(inputs[i])
    if current:
        rows.append(PackedRow(tuple(current), tuple(shared), length))
    return rows


def split_row(row: PackedRow, inputs: Sequence[np.ndarray]) -> tuple[PackedRow, PackedRow]:
    """Split a row of several sequences into two of about equal length. Each of them computes the
    common prefix."""
    ends = np.cumsum([len(inputs[i]) - s for i, s in zip(row.members, row.shared, strict=True)])
    cut = int(np.clip(np.searchsorted(ends, row.length / 2) + 1, 1, len(row.members) - 1))
    return _row(row.members[:cut], row.shared[:cut], inputs), _row(
        row.members[cut:], (0, *row.shared[cut + 1 :]), inputs
    )


def _row(
    members: tuple[int, ...], shared: tuple[int, ...], inputs: Sequence[np.ndarray]
) -> PackedRow:
    """Return the row of these sequences, with its length."""
    return PackedRow(
        members, shared, sum(len(inputs[i]) - s for i, s in zip(members, shared, strict=True))
    )


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


@dataclass(frozen=True)
class RowLayout:
    """Layout of a row's columns: their tokens, positions and sequences."""

    tokens: np.ndarray
    """Token of each column, int64 (length,)."""
    depth: np.ndarray
    """Position of each column's token in its sequence, int64 (length,)."""
    columns: tuple[np.ndarray, ...]
    """Columns of each sequence's tokens, int64."""


def build_row_layout(row: PackedRow, inputs: Sequence[np.ndarray]) -> RowLayout:
    """Return the layout of the columns of a row."""
    tokens = np.empty(row.length, dtype=np.int64)
    depth = np.empty(row.length, dtype=np.int64)
    columns: list[np.ndarray] = []
    first = 0
    for i, shared in zip(row.members, row.shared, strict=True):
        own = np.arange(first, first + len(inputs[i]) - shared)
        columns.append(np.concatenate([columns[-1][:shared] if columns else own[:0], own]))
        tokens[own], depth[own] = inputs[i][shared:], np.arange(shared, len(inputs[i]))
        first += len(own)
    return RowLayout(tokens, depth, tuple(columns))


def build_visibility(row: PackedRow, row_layout: RowLayout, width: int) -> np.ndarray:
    """Return which key columns each query column attends to, bool (width, width), indexed [query,
    key]. A padding column attends to itself, because a softmax over nothing is NaN."""
    visible = np.eye(width, dtype=bool)
    for shared, path in zip(row.shared, row_layout.columns, strict=True):
        for_new = np.tril(np.ones((len(path) - shared, len(path)), dtype=bool), shared)
        visible[np.ix_(path[shared:], path)] = for_new
    return visible


BATCH_TOKENS = 4096
"""Default maximum number of positions in a batch. A larger batch is not faster, and on a CPU it is
slower because of the caches."""
_MAX_PADDING = 0.05
"""Maximum fraction of a batch's positions that may be padding."""
CHEAP_TOKENS = BATCH_TOKENS // 8
"""Number of positions up to which a batch costs hardly more than a pass as such. Such a batch may
have more padding than that, because padding costs less than another pass."""


def batch_packed_rows(lengths: Sequence[int], max_tokens: int | None = None) -> list[list[int]]:
    """Group rows of these lengths into batches without padding, from longest to shortest; return
    the rows' indices.

    There are few batches, of about equal size, because small ones are slower per token. A batch has
    at most ``max_tokens`` positions, unless it is a single longer row. Deterministic.
    """
    max_tokens = BATCH_TOKENS if max_tokens is None else max_tokens
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches = [[i] for i in order if lengths[i] > max_tokens]
    order = order[len(batches) :]
    n_left = sum(lengths[i] for i in order)
    n_batches = -(-n_left // max_tokens)
    size = target = max_tokens  # as if a batch before had been filled
    for i in order:
        if size + lengths[i] > max_tokens or size + lengths[i] / 2 > target:
            batches.append([])
            size = 0
            target = n_left / max(n_batches, 1)
            n_batches = n_batches - 1
        batches[-1].append(i)
        size = size + lengths[i]
        n_left = n_left - lengths[i]
    return batches


def batch_padded_rows(
    members: Sequence[int], lengths: np.ndarray, max_tokens: int | None = None
) -> list[list[int]]:
    """Group the rows ``members`` into batches to be padded, from longest to shortest.

    A batch has at most ``max_tokens`` positions and limited padding. A row longer than
    ``max_tokens`` is a separate batch. ``lengths`` int64 (n,) are the lengths of all rows.
    Deterministic.
    """
    max_tokens = BATCH_TOKENS if max_tokens is None else max_tokens
    batches: list[list[int]] = []
    for i in sorted(members, key=lambda i: (-lengths[i], i)):
        current = batches[-1] if batches else []
        tokens = int(lengths[current].sum()) + int(lengths[i])
        positions = tokens if not current else int(lengths[current[0]]) * (len(current) + 1)
        padding = positions - tokens
        if (
            current
            and positions <= max_tokens
            and (padding <= _MAX_PADDING * positions or positions <= CHEAP_TOKENS)
        ):
            current.append(i)
        else:
            batches.append([i])
    return batches


@dataclass(frozen=True)
class RowPass:
    """Inputs of one forward pass: n rows padded to a common width or, with ``packed`` or ``trees``,
    all rows concatenated into one."""

    tokens: Tensor
    """int64 (n, width)."""
    depth: Tensor
    """Position of each token in its sequence, int64 (n, width)."""
    visible: Tensor | None
    """Which columns each column attends to, bool (n, width, width). None with ``packed`` or
    ``trees``, and for rows of one sequence each, for which causal attention is correct."""
    column: Tensor
    """Column from which each scored prediction is read, numbered through all rows, int64 (m,)."""
    target: Tensor
    """Token of each scored prediction, int64 (m,)."""
    place: Tensor
    """Index of each scored prediction in the packed L-1 layout, int64 (m,)."""
    packed: PackedLayout | None = None
    """Layout for attention by a variable-length kernel, or None."""
    trees: RowTrees | None = None
    """Layout for attention over pieces of the rows, or None."""


def build_padded_pass(rows: Sequence[PackedRow], inputs: SequenceInputs) -> RowPass:
    """Return the padded pass of ``rows`` (at least one) over sequences of ``inputs``. It has
    ``visible`` if any row has several sequences.

    Each row is padded on the right with its first token, because the padding token may have a zero
    embedding, for which some models have no gradient (Gemma 3n).
    """
    width = max(row.length for row in rows)
    tokens, depth = np.zeros((2, len(rows), width), dtype=np.int64)
    columns: list[np.ndarray] = []
    layouts = [build_row_layout(row, inputs.tokens) for row in rows]
    for number, (row, row_layout) in enumerate(zip(rows, layouts, strict=True)):
        tokens[number] = row_layout.tokens[0]
        tokens[number, : row.length], depth[number, : row.length] = (
            row_layout.tokens,
            row_layout.depth,
        )
        columns += [
            number * width + path[inputs.scored_positions[i]]
            for i, path in zip(row.members, row_layout.columns, strict=True)
        ]
    members = [i for row in rows for i in row.members]
    visible = None
    if not all(row.is_single for row in rows):
        visible = np.stack(
            [
                build_visibility(row, row_layout, width)
                for row, row_layout in zip(rows, layouts, strict=True)
            ]
        )
    return RowPass(
        torch.from_numpy(tokens),
        torch.from_numpy(depth),
        None if visible is None else torch.from_numpy(visible),
        *_collect_targets(columns, members, inputs),
    )


def build_packed_pass(
    rows: Sequence[PackedRow], inputs: SequenceInputs, kernel: Kernel | None
) -> RowPass:
    """Return the pass of ``rows`` (at least one) concatenated without padding. Attention is
    computed by ``kernel``, or over pieces of the rows if it is None."""
    tokens: list[np.ndarray] = []
    depth: list[np.ndarray] = []
    paths: list[list[np.ndarray]] = []
    before = 0
    for row in rows:
        row_layout = build_row_layout(row, inputs.tokens)
        tokens.append(row_layout.tokens)
        depth.append(row_layout.depth)
        paths.append([before + path for path in row_layout.columns])
        before += row.length
    members = [i for row in rows for i in row.members]
    shared = [row.shared for row in rows]
    flat = list(chain.from_iterable(paths))
    columns = [path[inputs.scored_positions[i]] for i, path in zip(members, flat, strict=True)]
    return RowPass(
        torch.from_numpy(np.concatenate(tokens))[None],
        torch.from_numpy(np.concatenate(depth))[None],
        None,
        *_collect_targets(columns, members, inputs),
        packed=None
        if kernel is None
        else build_packed_layout(flat, list(chain.from_iterable(shared)), kernel),
        trees=RowTrees(paths, shared, before) if kernel is None else None,
    )


def _collect_targets(
    columns: list[np.ndarray], members: list[int], inputs: SequenceInputs
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``column``, ``target`` and ``place`` of a pass."""
    parts = (columns, [inputs.target[i] for i in members], [inputs.place[i] for i in members])
    column, target, place = (
        torch.from_numpy(np.concatenate(part).astype(np.int64)) for part in parts
    )
    return column, target, place


def build_masks(
    config: Any, visible: Tensor, depth: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Return additive masks (n, 1, width, width) of ``dtype`` for a model with this configuration:
    one mask, or one for each kind of layer if the model expects several. ``visible`` and ``depth``
    are those of a ``RowPass``."""
    outside_window = lambda window: depth[:, None, :, None] - depth[:, None, None, :] >= window
    return layer_masks(config, dtype, ~visible[:, None], outside_window)
