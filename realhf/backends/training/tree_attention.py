"""Computes attention of rows in which sequences share their common prefixes, without the square of a row.

Such a row is a tree of tokens in depth-first order (see ``realhf.backends.training.sequence_packing``). Under a mask a
kernel multiplies all pairs of its columns, although a token sees only its own sequence: of a row with eight rollouts, a
sixth. Here each *piece*, the columns that one sequence adds to the row, attends to the columns of its sequence, which
are gathered; pieces of similar size are computed in one batch. Where many short pieces would copy a long prefix too
often, a run of neighbours is computed as one *bundle* with one copy: its keys are what its first piece sees and the
columns of all of them, and a mask hides what a piece does not see. Registered with transformers as the attention
implementation ``row_tree``, which without such rows is ``sdpa``.
"""

from __future__ import annotations

import itertools
import math
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

from realhf.backends.embedded.attention import HARMLESS, additive_mask

MOST_GATHERED = 4
"""Columns of keys that may be copied, per column of the rows: copies are kept for the backward pass."""
MOST_PADDING = 1.3
"""A batch may have this many times the products that its bundles have: a further batch costs calls."""
WASTES = (1.0, 1.3, 2.0, 4.0, math.inf)
"""A bundle may have this many times the products that its pieces need. The first that copies few enough columns is
taken: with the first there are no bundles, with the last every row is one, which copies no column twice."""


@dataclass(frozen=True)
class Piece:
    """Is what one sequence adds to a row: columns [start, end) of all rows one after another; ``before`` int64: the
    columns of its sequence before them."""

    start: int
    end: int
    before: np.ndarray

    @property
    def own(self) -> int:
        """Number of its columns."""
        return self.end - self.start

    @property
    def products(self) -> int:
        """Pairs of a column of it and one that it may see."""
        return self.own * (self.own + len(self.before))


@dataclass(frozen=True)
class Bundle:
    """Holds neighbouring pieces of a row, at least one."""

    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        """Its first column."""
        return self.pieces[0].start

    @property
    def end(self) -> int:
        """The column behind its last one."""
        return self.pieces[-1].end

    @property
    def before(self) -> np.ndarray:
        """The columns outside of it that its pieces see, int64."""
        return self.pieces[0].before

    @property
    def own(self) -> int:
        """Number of its columns."""
        return self.end - self.start

    @property
    def seen(self) -> int:
        """Number of its keys: columns of its own and before it."""
        return self.own + len(self.before)

    @property
    def products(self) -> int:
        """Pairs of a column of it and one of its keys."""
        return self.own * self.seen

    @property
    def causal(self) -> bool:
        """Whether its columns see what lies before them, and nothing else is there to be hidden."""
        return len(self.pieces) == 1 and not len(self.before)

    def visible(self) -> np.ndarray:
        """Return bool (own, seen): which of its keys, ``before`` and then its own, each of its columns sees."""
        seen = np.zeros((self.own, self.seen), dtype=bool)
        head = len(self.before)
        for piece in self.pieces:
            rows = slice(piece.start - self.start, piece.end - self.start)
            outside = int(np.searchsorted(piece.before, self.start))
            seen[rows, :outside] = True
            seen[rows, head + piece.before[outside:] - self.start] = True
            seen[rows, head + rows.start : head + rows.stop] = np.tri(piece.own, dtype=bool)
        return seen


def pieces_of(paths: Sequence[Sequence[np.ndarray]], shared: Sequence[Sequence[int]]) -> list[Piece]:
    """Return the pieces of rows in the order of their columns; see ``RowTrees`` for what is given."""
    pieces: list[Piece] = []
    for row, common in zip(paths, shared, strict=True):
        # The part of the first sequence that the second shares is a piece of its own, or it would be the longest.
        stem = min(common[1], len(row[0])) if len(row) > 1 else 0
        cuts = [(row[0], 0, stem), (row[0], stem, len(row[0]))]
        cuts += [(path, have, len(path)) for path, have in zip(row[1:], common[1:], strict=True)]
        for path, have, end in cuts:
            if end > have:
                first = int(path[have])
                pieces.append(Piece(first, first + end - have, path[:have]))
    return pieces


def batches_of(pieces: Sequence[Piece], columns: int) -> list[list[Bundle]]:
    """Batch the pieces of rows with so many ``columns``: in bundles where they would copy more than ``MOST_GATHERED``
    keys for each of them. Products are then at most ``MOST_PADDING`` times the first of ``WASTES`` that suffices, times
    what the pieces need."""
    batches: list[list[Bundle]] = []
    for waste in WASTES:
        batches = _batches(_bundles(pieces, waste))
        if sum(len(bundles) * max(bundle.seen for bundle in bundles) for bundles in batches) <= MOST_GATHERED * columns:
            break
    return batches


def _bundles(pieces: Sequence[Piece], waste: float) -> list[Bundle]:
    """Join neighbours as long as a bundle has at most ``waste`` times the products that its pieces need. What begins a
    row stays alone if it can: it needs no mask, which spares half of its products."""
    found: list[list[Piece]] = []
    need = own = 0
    for piece in pieces:
        first = found[-1][0] if found else piece
        if len(piece.before) and (len(first.before) or waste == math.inf):
            products = (own + piece.own) * (len(first.before) + own + piece.own)
            if products <= waste * (need + piece.products):
                found[-1].append(piece)
                need, own = need + piece.products, own + piece.own
                continue
        found.append([piece])
        need, own = piece.products, piece.own
    return [Bundle(tuple(joined)) for joined in found]


def _batches(bundles: Sequence[Bundle]) -> list[list[Bundle]]:
    """Put bundles of similar size together, those that need no mask apart."""
    found: list[list[Bundle]] = []
    need = 0
    for bundle in sorted(bundles, key=lambda bundle: (not bundle.causal, -bundle.seen, bundle.start)):
        current = found[-1] if found else []
        if current and current[0].causal == bundle.causal:
            own = max(max(other.own for other in current), bundle.own)
            if own * current[0].seen * (len(current) + 1) <= MOST_PADDING * (need + bundle.products):
                current.append(bundle)
                need += bundle.products
                continue
        found.append([bundle])
        need = bundle.products
    return found


ROW_TREE = "row_tree"


class _Gathering:
    """Says in what order bundles take columns, ``count`` and ``length`` columns for each batch of them; padded
    with columns that are there anyway. ``index`` int64: the columns, of all batches one after another. ``place`` int64
    (columns,): where each column of the rows stands in that order as one of a piece's own. ``before``: (place in the
    order, first column, number) of runs that stand there for other bundles' columns."""

    def __init__(self, batches: Sequence[Sequence[Bundle]], columns: int, *, whole: bool) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.before: list[tuple[int, int, int]] = []
        place, parts, at = np.empty(columns, dtype=np.int64), [], 0
        for bundles in batches:
            length = max(bundle.seen if whole else bundle.own for bundle in bundles)
            index = np.empty((len(bundles), length), dtype=np.int64)
            for row, bundle in zip(index, bundles, strict=True):
                head = len(bundle.before) if whole else 0
                row[:] = bundle.start
                row[:head] = bundle.before[:head]
                row[head : head + bundle.own] = np.arange(bundle.start, bundle.end)
                place[bundle.start : bundle.end] = at + head + np.arange(bundle.own)
                for first, end in _runs(bundle.before) if whole else ():
                    self.before.append((at + first, int(bundle.before[first]), end - first))
                at += length
            parts.append(index.reshape(-1))
            self.shapes.append((len(bundles), length))
        self.sizes = [count * length for count, length in self.shapes]
        padding = np.ones(at, dtype=bool)
        padding[place] = False
        self.padding = torch.from_numpy(np.flatnonzero(padding))
        self.index, self.place = torch.from_numpy(np.concatenate(parts)), torch.from_numpy(place)

    def take(self, x: Tensor) -> list[Tensor]:
        """Return the columns (columns, heads, dim) for each batch: (count, heads, length, dim)."""
        parts = _Gathered.apply(x, self)
        return [part.view(*shape, *x.shape[1:]).transpose(1, 2) for part, shape in zip(parts, self.shapes, strict=True)]

    def put(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the columns of the rows, (columns, heads, dim), of what was made of each batch."""
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
        return x.index_select(0, gathering.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gathering: _Gathering = ctx.gathering
        out = grads[0].index_select(0, gathering.index)
        # Padding repeats a column, whose gradient must count once.
        return out.index_fill_(0, gathering.padding, 0.0) if len(gathering.padding) else out, None


class RowTrees:
    """Says what the columns of rows see that lie behind each other, ``columns`` in all. ``paths``: for each row the
    columns of each of its sequences in order (int64); ``shared``: for each how many it has in common with the one
    before."""

    def __init__(self, paths: Sequence[Sequence[np.ndarray]], shared: Sequence[Sequence[int]], columns: int) -> None:
        self.columns = columns
        self._batches = batches_of(pieces_of(paths, shared), columns)
        self.queries = _Gathering(self._batches, columns, whole=False)
        self.keys = _Gathering(self._batches, columns, whole=True)
        self._masks: dict[torch.dtype, list[Tensor | None]] = {}

    def masks(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Return the additive masks of the batches, (bundles, 1, queries, keys), made once for all layers; None for
        pieces without anything before them, for which causal attention is right."""
        if dtype not in self._masks:
            sizes = zip(self._batches, self.queries.shapes, self.keys.shapes, strict=True)
            self._masks[dtype] = [_mask(bundles, n, m, dtype) for bundles, (_, n), (_, m) in sizes]
        return self._masks[dtype]


def _mask(bundles: Sequence[Bundle], queries: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    if all(bundle.causal for bundle in bundles):
        return None
    seen = np.zeros((len(bundles), queries, keys), dtype=bool)
    for each, bundle in zip(seen, bundles, strict=True):
        each[: bundle.own, : bundle.seen] = bundle.visible()
        each[bundle.own :, 0] = True  # A query that is padding sees something: a softmax over nothing is not a number.
    return additive_mask(torch.from_numpy(~seen), dtype)[:, None]


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
    """Attend with ``query`` (1, heads, columns, dim) over ``key``/``value`` (1, kv heads, columns, dim) as
    ``row_trees`` says; return ((1, columns, heads, dim), None). Raises ValueError for a layer that wants more."""
    odd = any(v for k, v in kwargs.items() if k not in HARMLESS)
    n, heads, columns, _ = query.shape
    if row_trees is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if odd or dropout or sliding_window is not None or (n, columns) != (1, row_trees.columns):
        raise ValueError(f"{type(module).__name__} asks for more than attention over trees of rows")
    q, k, v = (
        gathering.take(x[0].transpose(0, 1))
        for x, gathering in zip((query, key, value), (row_trees.queries, row_trees.keys, row_trees.keys), strict=True)
    )
    found = [
        F.scaled_dot_product_attention(
            *qkv, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=heads != key.shape[1]
        )
        for *qkv, mask in zip(q, k, v, row_trees.masks(query.dtype), strict=True)
    ]
    return row_trees.queries.put(found)[None], None


AttentionInterface.register(ROW_TREE, row_tree_attention)
