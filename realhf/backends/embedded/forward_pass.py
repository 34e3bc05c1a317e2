"""Defines a forward pass over cache rows, and runs it through the modules of transformers.

A pass mixes two kinds of work: *decoding* feeds one token to each of many rows, *pieces* are the missing tokens of rows
that join.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from realhf.backends.embedded.attention_masks import AttentionMasks
from realhf.backends.embedded.kv_cache import RowCache
from realhf.backends.embedded.row_attention import row_decoding

_PASS_TOKENS = 4096
"""Largest number of padded tokens of one pass over pieces. It bounds the memory of the mask and the activations."""
_PADDING_TOKENS = 768  # computing this many padded tokens costs a small model as much as another pass


@dataclass(frozen=True)
class Decoding:
    """Feeds one token to each of ``rows`` int64 (n,), ascending: ``tokens`` int64 (n,) at ``positions`` int64 (n,).
    ``cached`` int64 (rows, columns) are the tokens of all cache rows; rows that begin alike may read their common part
    from one of them."""

    rows: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    cached: np.ndarray


@dataclass(frozen=True)
class Piece:
    """Feeds ``tokens`` int64 (m,) to ``row``, from position ``start`` on."""

    row: int
    start: int
    tokens: np.ndarray

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


class ForwardPass(Protocol):
    """Computes logits, and writes keys and values of all tokens into the cache it was built with."""

    def run(self, decoding: Decoding | None, pieces: Sequence[Piece]) -> Tensor:
        """Return logits (rows of decoding + pieces, vocabulary) after the last token of each, decoding first."""
        ...


class ModulePass:
    """Implements ``ForwardPass`` through any causal language model of transformers; the model has ``limit``
    positions."""

    def __init__(self, model: Any, cache: RowCache, limit: int) -> None:
        self._model = model
        self._cache = cache
        self._limit = limit
        self._masks = AttentionMasks(model.config, model.dtype)

    def run(self, decoding: Decoding | None, pieces: Sequence[Piece]) -> Tensor:
        """See ``ForwardPass``."""
        with row_decoding(self._model):
            logits = [] if decoding is None else [self._decode(decoding)]
            by_piece: list[Tensor | None] = [None] * len(pieces)
            for chunk in _chunks(pieces):
                for i, row_logits in zip(chunk, self._prefill([pieces[i] for i in chunk]), strict=True):
                    by_piece[i] = row_logits
        logits.extend(row[None] for row in by_piece if row is not None)
        return torch.cat(logits)

    def _decode(self, decoding: Decoding) -> Tensor:
        """Feed all rows up to the last one. Rows that do not decode are fed in their last column, which nothing reads:
        the last token of a sequence is drawn but never fed."""
        n, spare = int(decoding.rows[-1]) + 1, min(self._cache.columns, self._limit) - 1
        tokens, positions = np.zeros(n, dtype=np.int64), np.full(n, spare)
        tokens[decoding.rows], positions[decoding.rows] = decoding.tokens, decoding.positions
        width = int(decoding.positions.max()) + 1
        at = self._index(positions)
        self._cache.bind_decode(at, torch.arange(n, device=at.device), width)
        # A position beyond the others would let a rotary embedding that depends on the length take the text for longer.
        logits = self._forward(self._index(tokens)[:, None], at.clamp(max=width - 1)[:, None], width)
        return logits[self._index(decoding.rows)]

    def _prefill(self, pieces: Sequence[Piece]) -> Tensor:
        """Feed pieces padded on the left, so that the last query is the last token of every row."""
        starts, ends = np.array([p.start for p in pieces]), np.array([p.end for p in pieces])
        n_query, width = int((ends - starts).max()), int(ends.max())
        position = ends[:, None] - n_query + np.arange(n_query)
        valid = position >= starts[:, None]
        tokens = np.zeros((len(pieces), n_query), dtype=np.int64)
        tokens[valid] = np.concatenate([p.tokens for p in pieces])
        columns = self._index(np.where(valid, position, 0))
        rows = self._index([p.row for p in pieces])
        self._cache.bind_prefill(rows, columns, torch.as_tensor(valid, device=columns.device), width)
        return self._forward(self._index(tokens), columns, width)

    def _forward(self, tokens: Tensor, positions: Tensor, width: int) -> Tensor:
        """Feed ``tokens`` at ``positions``, int64 (n, n_query) each, over the first ``width`` columns of their rows."""
        out = self._model(
            input_ids=tokens,
            attention_mask=self._masks.of(positions, width),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _index(self, values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=self._model.device)


def _chunks(pieces: Sequence[Piece]) -> list[list[int]]:
    """Group the indices of pieces by number of tokens; a chunk ends where padding or the pass would grow too large."""
    sizes = [len(piece.tokens) for piece in pieces]
    chunks: list[list[int]] = []
    for i in sorted(range(len(pieces)), key=lambda i: (sizes[i], i)):
        current = chunks[-1] if chunks else []
        fits = current and (len(current) + 1) * sizes[i] <= _PASS_TOKENS
        padding = sum(sizes[i] - sizes[j] for j in current)
        if fits and padding <= _PADDING_TOKENS + sum(sizes[j] for j in current) // 4:
            current.append(i)
        else:
            chunks.append([i])
    return chunks
