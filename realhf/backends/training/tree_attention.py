"""Attention over rows in which sequences share common prefixes, without the square of the row
length.

Such a row is a tree of tokens in depth-first order (``realhf.backends.training.sequence_packing``).
A column is the position of a token in the row. With a mask over the whole row, a kernel would
multiply all pairs of columns, although a token attends only to its own sequence (in a row of eight
rollouts to about a sixth of the columns). This module splits a row into *segments*: the columns
that one sequence adds after the prefix that it shares with the sequence before it. The keys of a
segment, the columns of its sequence, are gathered (copied), and segments of similar size are
computed in one batch.

Example: the sequences ABCD, ABEF and ABG make the row A B C D E F G. The segments are AB (keys AB),
CD (keys ABCD), EF (keys ABEF) and G (keys ABG).

Many short segments would copy a long prefix many times. Then adjacent segments are computed as one
*bundle* with one copy of the prefix: its keys are those of its first segment and the columns of all its
segments, and a mask hides the columns that a segment does not attend to.

The implementation is registered with transformers as ``row_tree``; for rows without trees it is
``sdpa``.
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

from realhf.backends.embedded.attention import IGNORED_ARGUMENTS, additive_mask

MAX_GATHERED_PER_COLUMN = 4
"""Maximum number of gathered key columns per column of the rows. Gathered columns stay in memory
until the backward pass."""
MAX_PADDING = 1.3
"""Maximum ratio of the (query, key) products computed in a padded batch to those of its bundles.
Less padding would need more batches, each of which costs kernel launches."""
BUNDLE_OVERHEADS = (1.0, 1.3, 2.0, 4.0, math.inf)
"""Maximum ratios of the (query, key) products in a bundle to those of its segments. They are tried
in this order until few enough columns are gathered. The first ratio allows no bundles; with the
last, each row is one bundle, which gathers no column twice."""
ROW_TREE = "row_tree"
"""Name of the attention implementation in transformers."""


@dataclass(frozen=True)
class TreeSegment:
    """Columns that one sequence adds to a row.

    Columns are numbered over all rows of a batch, one row after another.
    """

    start: int
    """First column."""
    end: int
    """Column after the last one."""
    before: np.ndarray
    """Columns of the same sequence that precede the segment, int64."""

    @property
    def own(self) -> int:
        """Number of columns in the segment."""
        return self.end - self.start

    @property
    def products(self) -> int:
        """Number of (query, key) pairs of the segment when no causal mask is applied."""
        return self.own * (self.own + len(self.before))


@dataclass(frozen=True)
class SegmentBundle:
    """One or more adjacent segments of a row that are computed together."""

    segments: tuple[TreeSegment, ...]
    """The segments in the order of their columns."""

    @property
    def start(self) -> int:
        """First column."""
        return self.segments[0].start

    @property
    def end(self) -> int:
        """Column after the last one."""
        return self.segments[-1].end

    @property
    def before(self) -> np.ndarray:
        """Columns outside the bundle that its segments attend to, int64.

        These are the columns before the first segment. They include those of all later segments,
        which branch off at these columns or within the bundle.
        """
        return self.segments[0].before

    @property
    def own(self) -> int:
        """Number of columns in the bundle, which are its queries."""
        return self.end - self.start

    @property
    def n_keys(self) -> int:
        """Number of keys: the columns in ``before`` plus the bundle's own columns."""
        return self.own + len(self.before)

    @property
    def products(self) -> int:
        """Number of (query, key) pairs of the bundle when no mask is applied."""
        return self.own * self.n_keys

    @property
    def causal(self) -> bool:
        """Whether plain causal attention is correct: the bundle is a single segment at the start of
        a row."""
        return len(self.segments) == 1 and not len(self.before)

    def visible(self) -> np.ndarray:
        """Return which keys each query of the bundle attends to, bool (own, n_keys).

        The keys are ``before``, followed by the bundle's own columns.
        """
        visible = np.zeros((self.own, self.n_keys), dtype=bool)
        head = len(self.before)
        for segment in self.segments:
            rows = slice(segment.start - self.start, segment.end - self.start)
            # Of the columns before the segment, the first n_outside are before the bundle, and the
            # same as the first ones of the bundle; the others are in the bundle.
            n_outside = int(np.searchsorted(segment.before, self.start))
            visible[rows, :n_outside] = True
            visible[rows, head + segment.before[n_outside:] - self.start] = True
            visible[rows, head + rows.start : head + rows.stop] = np.tri(segment.own, dtype=bool)
        return visible


def split_segments(
    paths: Sequence[Sequence[np.ndarray]], shared: Sequence[Sequence[int]]
) -> list[TreeSegment]:
    """Return the segments of rows in the order of their columns.

    The arguments are those of ``RowTrees``.
    """
    segments: list[TreeSegment] = []
    for row, common in zip(paths, shared, strict=True):
        # The first sequence is split where the second one branches off. Otherwise its single
        # segment would be much longer than the others, and batches of similar sizes would not be
        # possible.
        stem = min(common[1], len(row[0])) if len(row) > 1 else 0
        cuts = [(row[0], 0, stem), (row[0], stem, len(row[0]))]
        cuts += [
            (path, n_shared, len(path)) for path, n_shared in zip(row[1:], common[1:], strict=True)
        ]
        for path, n_shared, end in cuts:
            if end > n_shared:
                first = int(path[n_shared])
                segments.append(TreeSegment(first, first + end - n_shared, path[:n_shared]))
    return segments


def batch_segments(segments: Sequence[TreeSegment], columns: int) -> list[list[SegmentBundle]]:
    """Group the segments of rows with ``columns`` columns into batches of bundles.

    Segments are bundled only if gathering keys for each segment would exceed
    ``MAX_GATHERED_PER_COLUMN``; then the smallest of ``BUNDLE_OVERHEADS`` that suffices is used.
    The number of (query, key) products is at most this overhead times ``MAX_PADDING`` times the
    number that the segments need.
    """
    batches: list[list[SegmentBundle]] = []
    for overhead in BUNDLE_OVERHEADS:
        batches = _batch_bundles(_bundle_segments(segments, overhead))
        # All bundles of a batch are padded to the longest one.
        n_gathered = sum(
            len(bundles) * max(bundle.n_keys for bundle in bundles) for bundles in batches
        )
        if n_gathered <= MAX_GATHERED_PER_COLUMN * columns:
            break
    return batches


def _bundle_segments(segments: Sequence[TreeSegment], overhead: float) -> list[SegmentBundle]:
    """Group adjacent segments into bundles with at most ``overhead`` times the products of the
    segments.

    A row's first segment stays alone unless the overhead is unlimited: it needs no mask, so a
    causal kernel skips half of its products.
    """
    groups: list[list[TreeSegment]] = []
    # Products that the segments of the current bundle need, and number of its columns.
    needed = 0
    own = 0
    for segment in segments:
        first = groups[-1][0] if groups else segment
        if len(segment.before) and (len(first.before) or overhead == math.inf):
            products = (own + segment.own) * (len(first.before) + own + segment.own)
            if products <= overhead * (needed + segment.products):
                groups[-1].append(segment)
                needed += segment.products
                own += segment.own
                continue
        groups.append([segment])
        needed = segment.products
        own = segment.own
    return [SegmentBundle(tuple(group)) for group in groups]


def _batch_bundles(bundles: Sequence[SegmentBundle]) -> list[list[SegmentBundle]]:
    """Group bundles of similar size into batches; causal bundles are in separate batches."""
    batches: list[list[SegmentBundle]] = []
    needed = 0  # Products of the bundles of the current batch without padding.
    for bundle in sorted(
        bundles, key=lambda bundle: (not bundle.causal, -bundle.n_keys, bundle.start)
    ):
        current = batches[-1] if batches else []
        if current and current[0].causal == bundle.causal:
            own = max(max(other.own for other in current), bundle.own)
            if own * current[0].n_keys * (len(current) + 1) <= MAX_PADDING * (
                needed + bundle.products
            ):
                current.append(bundle)
                needed += bundle.products
                continue
        batches.append([bundle])
        needed = bundle.products
    return batches


class _Gathering:
    """Plan by which each batch of bundles gathers its columns.

    Every bundle of a batch gets the same number of columns; it is padded with its first own column.

    Attributes:
        shapes: (number of bundles, columns per bundle) of each batch.
        sizes: Number of gathered columns of each batch.
        index: Gathered columns of all batches, one after another, int64.
        place: For each column of the rows, the index in ``index`` at which it is gathered as a
            bundle's own column, int64 (columns,).
        before: Runs of consecutive columns before a bundle: (first index in ``index``, first
            column, number of columns).
        padding: Indices in ``index`` that are not in ``place``, int64.

    Args:
        batches: The batches of bundles.
        columns: Number of columns of the rows.
        keys: Whether to gather the keys of each bundle (the columns before it and its own columns)
            or only its own columns, the queries.
    """

    def __init__(
        self, batches: Sequence[Sequence[SegmentBundle]], columns: int, *, keys: bool
    ) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.before: list[tuple[int, int, int]] = []
        place = np.empty(columns, dtype=np.int64)
        parts: list[np.ndarray] = []
        offset = 0
        for bundles in batches:
            length = max(bundle.n_keys if keys else bundle.own for bundle in bundles)
            index = np.empty((len(bundles), length), dtype=np.int64)
            for row, bundle in zip(index, bundles, strict=True):
                head = len(bundle.before) if keys else 0
                row[:] = bundle.start
                row[:head] = bundle.before[:head]
                row[head : head + bundle.own] = np.arange(bundle.start, bundle.end)
                place[bundle.start : bundle.end] = offset + head + np.arange(bundle.own)
                for first, end in _find_runs(bundle.before) if keys else ():
                    self.before.append((offset + first, int(bundle.before[first]), end - first))
                offset += length
            parts.append(index.reshape(-1))
            self.shapes.append((len(bundles), length))
        self.sizes = [count * length for count, length in self.shapes]
        padding = np.ones(offset, dtype=bool)
        padding[place] = False
        self.padding = torch.from_numpy(np.flatnonzero(padding))
        self.index = torch.from_numpy(np.concatenate(parts))
        self.place = torch.from_numpy(place)

    def take(self, x: Tensor) -> list[Tensor]:
        """Gather the columns of ``x`` (columns, heads, dim); return (bundles, heads, columns per
        bundle, dim) for each batch."""
        parts = _GatherColumns.apply(x, self)
        return [
            part.view(*shape, *x.shape[1:]).transpose(1, 2)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def put(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the batches' results in the order of the rows' columns, (columns, heads, dim)."""
        flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        return _ScatterColumns.apply(flat[0] if len(flat) == 1 else torch.cat(flat), self)


def _find_runs(columns: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers in ``columns`` int64 (n,) as index pairs [first,
    end)."""
    if not len(columns):
        return []
    breaks = [0, *(np.flatnonzero(np.diff(columns) != 1) + 1).tolist(), len(columns)]
    return list(itertools.pairwise(breaks))


class _GatherColumns(torch.autograd.Function):
    """Autograd function that gathers columns of (columns, heads, dim). Its backward pass sums the
    gradients of all copies of a column.

    It adds whole runs of columns, which is faster than autograd's index_add.
    """

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
            # Accumulate the gradients of many branches in fp32 to avoid rounding errors.
            out = out.float()
        for place, column, number in gathering.before:
            out[column : column + number].add_(grad[place : place + number])
        return out.to(grad.dtype), None


class _ScatterColumns(torch.autograd.Function):
    """Autograd function that undoes the gathering of queries: it returns the results of all bundles
    in the order of the rows' columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathering: _Gathering) -> Tensor:
        ctx.gathering = gathering
        return x.index_select(0, gathering.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gathering: _Gathering = ctx.gathering
        out = grads[0].index_select(0, gathering.index)
        # Results at padding were dropped, so they have no gradient, although their index repeats a
        # column.
        return out.index_fill_(0, gathering.padding, 0.0) if len(gathering.padding) else out, None


class RowTrees:
    """Attention structure of a batch of rows whose sequences share prefixes.

    Args:
        paths: For each row, the columns of each of its sequences in order, int64.
        shared: For each sequence of each row, the number of columns that it shares with the
            sequence before it.
        columns: Number of columns of all rows.
    """

    def __init__(
        self, paths: Sequence[Sequence[np.ndarray]], shared: Sequence[Sequence[int]], columns: int
    ) -> None:
        self.columns = columns
        self._batches = batch_segments(split_segments(paths, shared), columns)
        self.queries = _Gathering(self._batches, columns, keys=False)
        self.keys = _Gathering(self._batches, columns, keys=True)
        self._masks: dict[torch.dtype, list[Tensor | None]] = {}

    def masks(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Return the additive mask of each batch, (bundles, 1, queries, keys), or None for causal
        attention.

        The masks are computed once and shared by all layers.
        """
        if dtype not in self._masks:
            sizes = zip(self._batches, self.queries.shapes, self.keys.shapes, strict=True)
            self._masks[dtype] = [
                _build_mask(bundles, n, m, dtype) for bundles, (_, n), (_, m) in sizes
            ]
        return self._masks[dtype]


def _build_mask(
    bundles: Sequence[SegmentBundle], queries: int, keys: int, dtype: torch.dtype
) -> Tensor | None:
    """Return the additive mask of a batch, (bundles, 1, queries, keys), or None for causal
    attention."""
    if all(bundle.causal for bundle in bundles):
        return None
    visible = np.zeros((len(bundles), queries, keys), dtype=bool)
    for mask, bundle in zip(visible, bundles, strict=True):
        mask[: bundle.own, : bundle.n_keys] = bundle.visible()
        mask[bundle.own :, 0] = True  # Padding queries need one key: a softmax over no key is NaN.
    return additive_mask(torch.from_numpy(~visible), dtype)[:, None]


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
    """Return the attention output (1, columns, heads, dim) over rows with the structure
    ``row_trees``.

    ``query`` is (1, heads, columns, dim), ``key`` and ``value`` are (1, kv heads, columns, dim).
    The second result is None (no attention weights), as transformers requires. Raises ValueError
    for a layer with features that this implementation does not support.
    """
    has_unsupported = any(v for k, v in kwargs.items() if k not in IGNORED_ARGUMENTS)
    n, heads, columns, _ = query.shape
    if row_trees is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if (
        has_unsupported
        or dropout
        or sliding_window is not None
        or (n, columns) != (1, row_trees.columns)
    ):
        raise ValueError(
            f"{type(module).__name__} needs features that attention over row trees lacks"
        )
    q, k, v = (
        gathering.take(x[0].transpose(0, 1))
        for x, gathering in zip(
            (query, key, value), (row_trees.queries, row_trees.keys, row_trees.keys), strict=True
        )
    )
    outputs = [
        F.scaled_dot_product_attention(
            *qkv,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=heads != key.shape[1],
        )
        for *qkv, mask in zip(q, k, v, row_trees.masks(query.dtype), strict=True)
    ]
    return row_trees.queries.put(outputs)[None], None


AttentionInterface.register(ROW_TREE, row_tree_attention)
