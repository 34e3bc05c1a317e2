"""Packs sequences that begin alike into rows in which every common prefix is computed once.

A row is a tree of tokens in depth-first order: the sequences in lexicographic order, each without what it has in common
with the one before it. A token sees its ancestors and itself, at the position it has in its own sequence, so its hidden
state is the one it has there; where sequences part, one hidden state predicts several tokens. The rollouts of a group
share their prompt this way, and turns that went alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROW_TOKENS = 768
"""Most positions of a row that holds several sequences: a mask has the square of it, and attention computes all of
that."""


@dataclass(frozen=True)
class Row:
    """Holds sequences that are computed in one row. ``members`` numbers them; ``shared`` says how many tokens each has
    in common with the one before it (0 for the first); ``length`` counts positions."""

    members: tuple[int, ...]
    shared: tuple[int, ...]
    length: int

    @property
    def plain(self) -> bool:
        """Whether the row is a single sequence, which needs no mask."""
        return len(self.members) == 1


def plain_rows(members: Sequence[int], inputs: Sequence[np.ndarray]) -> list[Row]:
    """Return a row for each of the sequences ``members``, from ``inputs``, the tokens of every sequence that go through
    the model."""
    return [Row((i,), (0,), len(inputs[i])) for i in members]


def shared_rows(
    members: Sequence[int], inputs: Sequence[np.ndarray], most: int = ROW_TOKENS, longest: int = 0
) -> list[Row]:
    """Pack the sequences ``members`` into rows of at most ``most`` positions, unless one alone is longer. A sequence
    that has nothing in common with a row starts another one. Up to ``longest`` positions, a row may also have twice
    those of its first sequence: prefixes as long as ``most`` would be computed for each sequence otherwise.
    Deterministic, whatever the order of ``members``."""
    order = sorted(members, key=lambda i: (inputs[i].astype(">u4").tobytes(), i))
    rows: list[Row] = []
    current: list[int] = []
    shared: list[int] = []
    length = 0
    for i in order:
        common = common_prefix(inputs[current[-1]], inputs[i]) if current else 0
        room = max(most, min(longest, 2 * len(inputs[current[0]]))) if current else 0
        if common and length + len(inputs[i]) - common <= room:
            current.append(i)
            shared.append(common)
            length += len(inputs[i]) - common
            continue
        if current:
            rows.append(Row(tuple(current), tuple(shared), length))
        current, shared, length = [i], [0], len(inputs[i])
    if current:
        rows.append(Row(tuple(current), tuple(shared), length))
    return rows


def split_row(row: Row, inputs: Sequence[np.ndarray]) -> tuple[Row, Row]:
    """Cut a row of several sequences into two of about equal length; what the halves share is computed in both."""
    ends = np.cumsum([len(inputs[i]) - s for i, s in zip(row.members, row.shared, strict=True)])
    cut = int(np.clip(np.searchsorted(ends, row.length / 2) + 1, 1, len(row.members) - 1))
    return _row(row.members[:cut], row.shared[:cut], inputs), _row(
        row.members[cut:], (0, *row.shared[cut + 1 :]), inputs
    )


def _row(members: tuple[int, ...], shared: tuple[int, ...], inputs: Sequence[np.ndarray]) -> Row:
    return Row(members, shared, sum(len(inputs[i]) - s for i, s in zip(members, shared, strict=True)))


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many tokens two sequences have in common from their start."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


@dataclass(frozen=True)
class RowLayout:
    """Says where the tokens of a row's sequences are. ``tokens`` and ``depth`` int64 (length,): the token of each
    column, and its position in its sequence; ``columns``: for each member the column of each of its tokens."""

    tokens: np.ndarray
    depth: np.ndarray
    columns: tuple[np.ndarray, ...]


def layout(row: Row, inputs: Sequence[np.ndarray]) -> RowLayout:
    """Lay out the columns of a row."""
    tokens, depth = np.empty(row.length, dtype=np.int64), np.empty(row.length, dtype=np.int64)
    columns: list[np.ndarray] = []
    at = 0
    for i, shared in zip(row.members, row.shared, strict=True):
        own = np.arange(at, at + len(inputs[i]) - shared)
        columns.append(np.concatenate([columns[-1][:shared] if columns else own[:0], own]))
        tokens[own], depth[own] = inputs[i][shared:], np.arange(shared, len(inputs[i]))
        at += len(own)
    return RowLayout(tokens, depth, tuple(columns))


def visible(row: Row, lay: RowLayout, width: int) -> np.ndarray:
    """Return bool (width, width): which column (second) each column (first) sees. A column beyond the row sees itself,
    because a softmax over nothing is not a number."""
    seen = np.eye(width, dtype=bool)
    for shared, path in zip(row.shared, lay.columns, strict=True):
        for_new = np.tril(np.ones((len(path) - shared, len(path)), dtype=bool), shared)
        seen[np.ix_(path[shared:], path)] = for_new
    return seen
