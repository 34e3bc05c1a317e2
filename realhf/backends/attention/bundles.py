"""Decides which columns of rows that share prefixes are computed together: pieces, bundles of them, batches of bundles.

The pieces of a row follow each other in depth-first order, so whatever a piece sees outside a run of neighbours, the
first of them sees, too. A *bundle* is such a run: its keys are what its first piece sees and the columns of all of
them, and a mask hides what a piece does not see. It copies a prefix once for all of its pieces, and multiplies pairs
that none of them needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


def pieces_of(paths: Sequence[Sequence[np.ndarray]], shared: Sequence[Sequence[int]], width: int) -> list[Piece]:
    """Return the pieces of rows in the order of their columns; see ``RowTrees`` for what is given."""
    pieces: list[Piece] = []
    for n, (row, common) in enumerate(zip(paths, shared, strict=True)):
        # The part of the first sequence that the second shares is a piece of its own, or it would be the longest.
        stem = min(common[1], len(row[0])) if len(row) > 1 else 0
        cuts = [(row[0], 0, stem), (row[0], stem, len(row[0]))]
        cuts += [(path, have, len(path)) for path, have in zip(row[1:], common[1:], strict=True)]
        for path, have, end in cuts:
            if end > have:
                first = n * width + int(path[have])
                pieces.append(Piece(first, first + end - have, n * width + path[:have]))
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
