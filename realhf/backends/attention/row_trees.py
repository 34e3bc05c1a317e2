"""Computes the attention of rows in which several sequences share their common prefixes, without the square of a row.

Such a row is a tree of tokens in depth-first order (see ``realhf.backends.training.shared_rows``). Under a mask a
kernel multiplies all pairs of its columns, although a token sees only its own sequence: of a row with eight rollouts, a
sixth. Here each *piece*, the columns that one sequence adds to the row, attends to the columns of its sequence, which
are gathered; pieces of similar size are computed in one batch. Registered with transformers as the attention
implementation ``row_tree``, which without such rows is ``sdpa``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from realhf.backends.attention.given import attending_by

_NAME = "row_tree"
_KNOWN = frozenset({"position_ids", "use_cache", "is_causal", "cache_position", "output_attentions"})
"""Keyword arguments that do not change this computation."""
_MOST_PADDING = 1.3
"""A batch of pieces may have this many times the products that they need: a further batch costs calls."""


@dataclass(frozen=True)
class _Piece:
    """Is what one sequence adds to a row: columns [start, end) of all rows one after another; ``before`` int64: the
    columns of its sequence before them."""

    start: int
    end: int
    before: np.ndarray

    @property
    def own(self) -> int:
        return self.end - self.start

    @property
    def seen(self) -> int:
        return self.own + len(self.before)


class _Gathering:
    """Says in what order pieces take columns, ``count`` and ``length`` columns for each batch of them; padded with
    columns that are there anyway. ``index`` int64: the columns, of all batches one after another. ``place`` int64
    (columns,): where each column of the rows stands in that order as one of a piece's own, 0 for those in ``idle``,
    which no piece has. ``before``: (place in the order, first column, number) of runs that stand there for other
    pieces' columns."""

    def __init__(self, batches: Sequence[Sequence[_Piece]], columns: int, *, whole: bool) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.before: list[tuple[int, int, int]] = []
        place, parts, at = np.full(columns, -1, dtype=np.int64), [], 0
        for pieces in batches:
            length = max(piece.seen if whole else piece.own for piece in pieces)
            index = np.empty((len(pieces), length), dtype=np.int64)
            for row, piece in zip(index, pieces, strict=True):
                head = len(piece.before) if whole else 0
                row[:] = piece.start
                row[:head] = piece.before[:head]
                row[head : head + piece.own] = np.arange(piece.start, piece.end)
                place[piece.start : piece.end] = at + head + np.arange(piece.own)
                for first, end in _runs(piece.before) if whole else ():
                    self.before.append((at + first, int(piece.before[first]), end - first))
                at += length
            parts.append(index.reshape(-1))
            self.shapes.append((len(pieces), length))
        self.sizes = [count * length for count, length in self.shapes]
        self.index, idle = torch.from_numpy(np.concatenate(parts)), np.flatnonzero(place < 0)
        padding = np.ones(at, dtype=bool)
        padding[place[place >= 0]] = False
        self.padding = torch.from_numpy(np.flatnonzero(padding))
        self.place, self.idle = torch.from_numpy(np.maximum(place, 0)), torch.from_numpy(idle)

    def take(self, x: Tensor) -> list[Tensor]:
        """Return the columns (columns, heads, dim) for each batch: (count, heads, length, dim)."""
        parts = _Gathered.apply(x, self)
        return [part.view(*shape, *x.shape[1:]).transpose(1, 2) for part, shape in zip(parts, self.shapes, strict=True)]

    def put(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the columns of the rows, (columns, heads, dim), of what was made of each batch; 0 for idle ones."""
        flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        return _Placed.apply(flat[0] if len(flat) == 1 else torch.cat(flat), self)


def _runs(columns: np.ndarray) -> list[tuple[int, int]]:
    """Return the [first, end) of the runs of consecutive numbers."""
    if not len(columns):
        return []
    breaks = [0, *(np.flatnonzero(np.diff(columns) != 1) + 1).tolist(), len(columns)]
    return list(itertools.pairwise(breaks))


class _Gathered(torch.autograd.Function):
    """Takes columns (columns, heads, dim) in the order of a gathering; its gradient adds whole runs of columns up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathering: _Gathering) -> tuple[Tensor, ...]:
        ctx.gathering = gathering
        return x.index_select(0, gathering.index).split(gathering.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gathering: _Gathering = ctx.gathering
        grad = grads[0] if len(grads) == 1 else torch.cat(grads)
        out = grad.index_select(0, gathering.place)
        if len(gathering.idle):
            out.index_fill_(0, gathering.idle, 0.0)
        if gathering.before and grad.dtype.itemsize < 4:
            out = out.float()  # What many branches give to a shared column would lose its digits in a narrow sum.
        for place, column, number in gathering.before:
            out[column : column + number].add_(grad[place : place + number])
        return out.to(grad.dtype), None


class _Placed(torch.autograd.Function):
    """Puts what was computed for the pieces, all of them one after another, into the columns of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathering: _Gathering) -> Tensor:
        ctx.gathering = gathering
        out = x.index_select(0, gathering.place)
        return out.index_fill_(0, gathering.idle, 0.0) if len(gathering.idle) else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gathering: _Gathering = ctx.gathering
        out = grads[0].index_select(0, gathering.index)
        # Padding repeats a column, whose gradient must count once.
        return out.index_fill_(0, gathering.padding, 0.0) if len(gathering.padding) else out, None


class RowTrees:
    """Says what the columns of rows see. ``paths``: for each row the columns of each of its sequences in order (int64);
    ``shared``: for each how many it has in common with the one before; ``width``: columns of a padded row."""

    def __init__(self, paths: Sequence[Sequence[np.ndarray]], shared: Sequence[Sequence[int]], width: int) -> None:
        pieces: list[_Piece] = []
        self.shape = len(paths), width
        for n, (row, common) in enumerate(zip(paths, shared, strict=True)):
            # The part of the first sequence that the second shares is a piece of its own, or it would be the longest.
            stem = min(common[1], len(row[0])) if len(row) > 1 else 0
            cuts = [(row[0], 0, stem), (row[0], stem, len(row[0]))]
            cuts += [(path, have, len(path)) for path, have in zip(row[1:], common[1:], strict=True)]
            for path, have, end in cuts:
                if end > have:
                    first = n * width + int(path[have])
                    pieces.append(_Piece(first, first + end - have, n * width + path[:have]))
        batches, columns = _batches(pieces), len(paths) * width
        self.queries = _Gathering(batches, columns, whole=False)
        self.keys = _Gathering(batches, columns, whole=True)
        self._batches = batches
        self._masks: dict[torch.dtype, list[Tensor | None]] = {}

    @property
    def columns_gathered(self) -> int:
        """How many columns of keys are copied out of the rows."""
        return len(self.keys.index)

    def masks(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Return the additive masks of the batches, (pieces, 1, queries, keys), made once for all layers; None for
        pieces without anything before them, for which causal attention is right."""
        if dtype not in self._masks:
            sizes = zip(self._batches, self.queries.shapes, self.keys.shapes, strict=True)
            self._masks[dtype] = [_mask(pieces, n, m, dtype) for pieces, (_, n), (_, m) in sizes]
        return self._masks[dtype]


def _mask(pieces: Sequence[_Piece], queries: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    if not any(len(piece.before) for piece in pieces):
        return None
    # A query that is padding sees something too: a softmax over nothing is not a number.
    last = np.arange(queries)[:, None] + np.array([len(piece.before) for piece in pieces])[:, None, None]
    closed = torch.from_numpy(np.arange(keys) > last)
    return torch.zeros(closed.shape, dtype=dtype).masked_fill_(closed, float("-inf"))[:, None]


def _batches(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Put pieces of similar size together, those without anything before them apart."""
    found: list[list[_Piece]] = []
    need = 0
    for piece in sorted(pieces, key=lambda piece: (len(piece.before) > 0, -piece.seen, piece.start)):
        current = found[-1] if found else []
        if current and bool(len(current[0].before)) == bool(len(piece.before)):
            most = max(p.own for p in (*current, piece)) * max(p.seen for p in (*current, piece)) * (len(current) + 1)
            if most <= _MOST_PADDING * (need + piece.own * piece.seen):
                current.append(piece)
                need += piece.own * piece.seen
                continue
        found.append([piece])
        need = piece.own * piece.seen
    return found


def row_tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    row_trees: RowTrees | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with ``query`` (n, heads, width, dim) over ``key``/``value`` (n, kv heads, width, dim) as ``row_trees``
    says; return ((n, width, heads, dim), None). Raises ValueError for a layer that wants more than that."""
    odd = any(v for k, v in kwargs.items() if k not in _KNOWN)
    n, heads, width, _ = query.shape
    if row_trees is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if odd or dropout or sliding_window is not None or (n, width) != row_trees.shape:
        raise ValueError(f"{type(module).__name__} asks for more than attention over trees of rows")
    q, k, v = (
        gathering.take(x.transpose(1, 2).reshape(n * width, x.shape[1], x.shape[3]))
        for x, gathering in zip((query, key, value), (row_trees.queries, row_trees.keys, row_trees.keys), strict=True)
    )
    found = [
        F.scaled_dot_product_attention(
            *qkv, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=heads != key.shape[1]
        )
        for *qkv, mask in zip(q, k, v, row_trees.masks(query.dtype), strict=True)
    ]
    return row_trees.queries.put(found).view(n, width, heads, value.shape[-1]), None


AttentionInterface.register(_NAME, row_tree_attention)


def by_trees(model: Any) -> contextlib.AbstractContextManager[None]:
    """Let a model on the ``sdpa`` implementation attend by ``row_tree_attention`` within the block."""
    return attending_by(model, _NAME)
