"""Key-value cache with preallocated rows that implements the ``Cache`` interface of transformers.

A *row* holds one sequence; the entry of token position ``t`` is in column ``t``. Before every
forward pass the owner binds the rows of the pass and the targets of the new tokens
(``bind_decode``, ``bind_prefill``). The attention layers then write there and read only the used
columns. Columns after the length of a row contain arbitrary finite values, which the owner's
attention mask has to hide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_COLUMN_BLOCK = 64
"""Columns are allocated in multiples of this number."""


@dataclass
class _Access:
    """Cache rows that the current forward pass reads, and the positions to which it writes its new
    tokens."""

    rows: Tensor | None = None
    """Rows of the pass, int64 (n,), or None for the first ``count`` rows."""
    count: int = 0
    """Number of rows of the pass if ``rows`` is None."""
    width: int = 0
    """Number of columns that the pass reads."""
    row_of: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Row of every new token, int64 (n_new,)."""
    column_of: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Column of every new token, int64 (n_new,)."""
    source: Tensor | None = None
    """Index of every new token in the flattened (n, n_query) input, int64 (n_new,), or None for all
    in order."""
    targets: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Cached results of ``target``."""

    def target(self, heads: int, columns: int) -> Tensor:
        """Return the indices of the new entries in the flattened (row, head, column) storage, int64
        (n_new * heads,).

        They are computed once per pass for all layers of the same shape.
        """
        target = self.targets.get((heads, columns))
        if target is None:
            head = torch.arange(heads, device=self.row_of.device)
            target = (
                (self.row_of[:, None] * heads + head) * columns + self.column_of[:, None]
            ).reshape(-1)
            self.targets[heads, columns] = target
        return target


@dataclass
class _Shared:
    """State that all layers of a cache share."""

    rows: int = 0
    """Number of allocated rows."""
    columns: int = 0
    """Number of allocated columns."""
    access: _Access = field(default_factory=_Access)
    """Rows and write positions of the current pass."""


class RowLayer(CacheLayerMixin):
    """Keys and values of one attention layer, (rows, heads, columns, head_dim) each."""

    keys: Any
    values: Any

    def __init__(self, shared: _Shared) -> None:
        super().__init__()
        self._shared = shared

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the rows with the dtype and device of the first keys and values."""
        # Zeros, not empty: a masked column still enters softmax-weighted sums, and 0 * nan is nan.
        shared = self._shared
        self.keys = key_states.new_zeros(
            shared.rows, key_states.shape[1], shared.columns, key_states.shape[3]
        )
        self.values = value_states.new_zeros(
            shared.rows, value_states.shape[1], shared.columns, value_states.shape[3]
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new entries (n, heads, n_query, head_dim). Returns the keys and the values of
        the pass's rows, (n, heads, width, head_dim) each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        access = self._shared.access
        return self._store(self.keys, key_states, access), self._store(
            self.values, value_states, access
        )

    @staticmethod
    def _store(cached: Tensor, new: Tensor, access: _Access) -> Tensor:
        heads = new.shape[1]
        dim = new.shape[3]
        flat = new.transpose(1, 2).reshape(-1, heads, dim)
        if access.source is not None:
            flat = flat.index_select(0, access.source)
        cached.view(-1, dim).index_copy_(
            0, access.target(heads, cached.shape[2]), flat.reshape(-1, dim)
        )
        if access.rows is None:
            return cached[: access.count, :, : access.width]
        return cached[:, :, : access.width].index_select(0, access.rows)

    def resize(self, rows: int, columns: int) -> None:
        """Enlarge the layer, keeping its contents. Does nothing before the first use."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)

    def copy_rows(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Copy the first ``columns`` columns of rows ``source`` to rows ``target``. All sources are
        read first."""
        if self.is_initialized:
            for tensor in (self.keys, self.values):
                used = tensor[:, :, :columns]
                used.index_copy_(0, target, used.index_select(0, source))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the width and the offset of the attention mask: this pass reads the columns from 0
        on."""
        return self._shared.access.width, 0

    def get_seq_length(self) -> int:
        """Return the number of columns that this pass reads."""
        return self._shared.access.width

    def get_max_length(self) -> int:
        """Return -1, which means no limit."""
        return -1


class RowCache(Cache):
    """transformers ``Cache`` with preallocated rows. All index tensors are on the model's
    device."""

    layers: list[Any]

    def __init__(self) -> None:
        self._shared = _Shared()
        super().__init__(layer_class_to_replicate=cast(Any, partial(RowLayer, self._shared)))

    @property
    def rows(self) -> int:
        """Number of allocated rows."""
        return self._shared.rows

    @property
    def columns(self) -> int:
        """Number of allocated columns."""
        return self._shared.columns

    @property
    def nbytes(self) -> int:
        """Number of bytes of the stored keys and values."""
        return sum(
            t.nbytes for layer in self.layers for t in (layer.keys, layer.values) if t is not None
        )

    def storage(self, layer: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, (rows, heads, columns, dim) each, for a forward
        pass that writes them itself. They have the dtype and device of ``like``."""
        while len(self.layers) <= layer:
            self.layers.append(RowLayer(self._shared))
        row_layer = self.layers[layer]
        if not row_layer.is_initialized:
            blank = like.new_empty(0, heads, 0, dim)
            row_layer.lazy_initialization(blank, blank)
        return row_layer.keys, row_layer.values

    def columns_after_reserve(self, columns: int) -> int:
        """Return the number of columns that ``reserve`` would allocate for ``columns``."""
        allocated = self._shared.columns
        if columns <= allocated:
            return allocated
        return -(-max(columns, allocated + allocated // 4) // _COLUMN_BLOCK) * _COLUMN_BLOCK

    def reserve(self, rows: int, columns: int) -> None:
        """Enlarge the cache to at least this number of rows and columns, keeping its contents.
        Columns grow in blocks, and by at least a quarter."""
        shared = self._shared
        if rows <= shared.rows and columns <= shared.columns:
            return
        shared.columns = self.columns_after_reserve(columns)
        shared.rows = max(rows, shared.rows)
        for layer in self.layers:
            layer.resize(shared.rows, shared.columns)

    def clear(self) -> None:
        """Drop all contents and free the memory."""
        self._shared.rows = self._shared.columns = 0
        self._shared.access = _Access()
        self.layers.clear()

    def bind_decode(self, positions: Tensor, row_of: Tensor, width: int) -> None:
        """Prepare a pass that feeds one token to each of the first n rows, at column ``positions``
        (n,)."""
        self._shared.access = _Access(None, len(positions), width, row_of, positions)

    def bind_prefill(self, rows: Tensor, columns: Tensor, valid: Tensor, width: int) -> None:
        """Prepare a pass that feeds tokens at ``columns`` (n, n_query) to ``rows`` (n,), where
        ``valid`` bool (n, n_query) is true."""
        source = valid.reshape(-1).nonzero()[:, 0]
        row_of = rows[:, None].expand_as(columns).reshape(-1)[source]
        self._shared.access = _Access(
            rows, len(rows), width, row_of, columns.reshape(-1)[source], source
        )

    def copy_rows(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Copy the first ``columns`` columns of row ``source[i]`` to row ``target[i]``; all sources
        are read first."""
        for layer in self.layers:
            layer.copy_rows(source, target, columns)
