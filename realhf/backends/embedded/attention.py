"""Attention over cached rows: the masks of a model's layers, and attention of one new token per
row.

For a single query the blocked kernel of ``scaled_dot_product_attention`` spends most of its time on
overhead; on a CPU with small heads, plain matrix products are two to five times faster. They are
registered with transformers as the attention implementation ``row_decode``, which delegates all
other cases to ``sdpa``.

Rows are processed in blocks. Each block is as wide as its longest row, and the rows of a block read
their common prefix only once: decoding of small models is bound by reading keys and values, and the
rollouts of a group share their prompt.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_FULL = "full_attention"
"""Layer type of a layer whose queries attend to all earlier tokens."""
_SLIDING = "sliding_attention"
"""Layer type of a layer with a sliding attention window."""


def layers_differ(config: Any) -> bool:
    """Return whether some options differ between the model's layers (``per_layer_config``), as in
    Gemma 4."""
    return bool(getattr(config.get_text_config(), "is_heterogeneous", False))


def layer_configs(config: Any) -> list[Any]:
    """Return the configuration of each layer. Options that differ between layers can be read only
    there."""
    text = config.get_text_config()
    return (
        list(text.per_layer_config)
        if layers_differ(config)
        else [text] * int(text.num_hidden_layers)
    )


def sliding_window(config: Any) -> int | None:
    """Return the size of the sliding window in tokens, including the query's own token; None if no
    layer has a window. Raises ValueError if the layers have windows of different sizes."""
    windows = {window for window in _windows(config) if window is not None}
    if len(windows) > 1:
        raise ValueError(
            f"{type(config).__name__}: layers have sliding windows of different sizes: "
            f"{sorted(windows)}"
        )
    return next(iter(windows), None)


def count_sliding_layers(config: Any) -> int:
    """Return the number of layers with a sliding window in a model with this configuration."""
    return sum(window is not None for window in _windows(config))


def _windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer in tokens, None for a layer that attends to all
    tokens."""
    kinds = getattr(config.get_text_config(), "layer_types", None)
    if layers_differ(config):
        windows = [_window(layer) for layer in layer_configs(config)]
    else:
        windows = [_window(config.get_text_config())] * int(
            config.get_text_config().num_hidden_layers
        )
    if not kinds:
        return windows
    return [
        window if kind == _SLIDING else None for window, kind in zip(windows, kinds, strict=False)
    ]


def _window(layer: Any) -> int | None:
    """Return the sliding window in the configuration of a layer, regardless of its layer type; None
    if it has no window."""
    window = getattr(layer, "sliding_window", None)
    slides = getattr(layer, "layer_types", None) or getattr(layer, "use_sliding_window", True)
    return int(window) if window and slides else None


def layer_masks(
    config: Any, dtype: torch.dtype, masked: Tensor, outside_window: Callable[[int], Tensor]
) -> Tensor | dict[str, Tensor]:
    """Return the additive attention mask of a model, 0 or -inf in ``dtype``, or a dict with one
    mask per layer type if the model expects that.

    Args:
        masked: bool, true for (query, key) pairs that are hidden in every layer.
        outside_window: Function that takes a window in tokens and returns bool, true for the pairs
            that are hidden in layers with that window.
    """
    full = additive_mask(masked, dtype)
    window = sliding_window(config)
    if window is None:
        return full
    windowed = additive_mask(masked | outside_window(window), dtype)
    return (
        {_FULL: full, _SLIDING: windowed}
        if getattr(config.get_text_config(), "layer_types", None)
        else windowed
    )


def check_layer_kinds(config: Any) -> None:
    """Raise ValueError for a layer type other than full attention and sliding-window attention."""
    kinds = frozenset(getattr(config.get_text_config(), "layer_types", None) or ())
    if unsupported := sorted(kinds - {_FULL, _SLIDING}):
        raise ValueError(
            f"{type(config).__name__}: layers of the kind {unsupported[0]} cannot generate from "
            "cached rows"
        )


def additive_mask(masked: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask in ``dtype``: -inf where bool ``masked`` is true, 0 elsewhere."""
    return torch.zeros(masked.shape, dtype=dtype, device=masked.device).masked_fill_(
        masked, float("-inf")
    )


@contextlib.contextmanager
def use_attention(config: Any, name: str) -> Iterator[None]:
    """Context manager that switches a model from the attention implementation ``sdpa`` to the
    registered implementation ``name``. A model with another implementation is left unchanged."""
    previous = config._attn_implementation
    if previous == "sdpa":
        config._attn_implementation = name
    try:
        yield
    finally:
        if previous == "sdpa":
            config._attn_implementation = previous


ROW_DECODE = "row_decode"
"""Name of the attention implementation for decoding."""
IGNORED_ARGUMENTS = frozenset(
    {"position_ids", "use_cache", "is_causal", "cache_position", "output_attentions"}
)
"""Keyword arguments that have no effect on attention when a mask or a layout defines which keys a
query attends to."""


def row_decode_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention implementation ``row_decode`` for transformers.

    Attends with ``query`` (n, heads, n_query, dim) over ``key``/``value`` (n, kv heads, width, dim)
    under the additive ``attention_mask`` (n, 1, n_query, width). Returns ((n, n_query, heads, dim),
    None). For a single query per row on a CPU it uses plain matrix products, otherwise ``sdpa``.
    """
    n, heads, n_query, dim = query.shape
    has_other_options = any(
        v for k, v in kwargs.items() if k not in IGNORED_ARGUMENTS and k != "sliding_window"
    )
    if n_query != 1 or attention_mask is None or dropout or has_other_options or query.is_cuda:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    kv_heads = key.shape[1]
    width = key.shape[2]
    scale = dim**-0.5 if scaling is None else scaling
    # Scores are fp32 for every dtype of the model, as in the kernels of the trainer.
    packed = (query.float() * scale).reshape(n * kv_heads, heads // kv_heads, dim)
    scores = torch.bmm(packed, key.flatten(0, 1).float().transpose(1, 2))
    scores.view(n, heads, width).add_(attention_mask[:, 0])
    weights = torch.softmax(scores, -1).to(value.dtype)
    mixed = torch.bmm(weights, value.flatten(0, 1))
    return mixed.view(n, 1, heads, value.shape[-1]), None


AttentionInterface.register(ROW_DECODE, row_decode_attention)


_MIN_SHARED = 64
"""Minimum number of common columns that a block reads only once. For fewer, the additional calls
cost more than the saved reads."""
_MIN_KEPT = 0.75
"""Minimum fraction of a block's common columns that a row must share to join the block; otherwise
the row starts a new block."""
_MAX_ROWS = 16
"""Maximum number of rows in a block without common columns."""


@dataclass(frozen=True)
class RowBlock:
    """Consecutive cache rows whose attention is computed together."""

    first: int
    """First row."""
    end: int
    """Index after the last row."""
    leader: int
    """Row whose first ``shared`` columns are read on behalf of all rows of the block."""
    shared: int
    """Number of columns that the decoding rows of the block have in common."""
    width: int
    """Number of columns of the longest row in the block."""


def row_blocks(tokens: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> list[RowBlock]:
    """Split the decoding ``rows`` int64 (n,), ascending, into blocks.

    Args:
        tokens: Tokens of all cache rows, int64 (rows, columns).
        rows: Cache rows that decode one token each.
        positions: Position of each row's new token, int64 (n,).
    """
    row_tokens = tokens[rows, : int(positions.max()) + 1]
    differs = row_tokens[1:] != row_tokens[:-1]
    common = np.where(differs.any(1), differs.argmax(1), row_tokens.shape[1])
    common = np.minimum(common, np.minimum(positions[1:], positions[:-1])).tolist()
    blocks = []
    first = 0
    shared = 0
    for i in range(1, len(rows) + 1):
        if i < len(rows):
            common_with_row = min(shared or common[i - 1], common[i - 1])
            joins_shared = common_with_row >= _MIN_SHARED and (
                i - first == 1 or (shared > 0 and common_with_row >= _MIN_KEPT * shared)
            )
            joins_unshared = shared == 0 and common[i - 1] < _MIN_SHARED and i - first < _MAX_ROWS
            if joins_shared or joins_unshared:
                shared = common_with_row if joins_shared else 0
                continue
        width = int(positions[first:i].max()) + 1
        blocks.append(
            RowBlock(int(rows[first]), int(rows[i - 1]) + 1, int(rows[first]), shared, width)
        )
        first = i
        shared = 0
    return blocks


def _multiply_wide(query: Tensor, keys: Tensor) -> Tensor:
    """Return ``query`` (b, n, dim) times the transpose of ``keys`` (b, width, dim), with fp32 sums
    and results: fp32 (b, n, width)."""
    if query.is_cuda and query.dtype == torch.bfloat16 and _multiplies_bf16_wide(query.device):
        # Products of two bf16 numbers are exact in fp32. Copies of all keys in fp32 would take
        # twice their memory, in every layer and for every token.
        return torch.bmm(query, keys.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(query.float(), keys.float().transpose(1, 2))


@functools.cache
def _multiplies_bf16_wide(device: torch.device) -> bool:
    """Return whether torch multiplies batches of bf16 matrices with fp32 sums and results on this
    device. This is tested, since not every release supports it on every GPU."""
    ones = torch.ones(2, 16, 16, dtype=torch.bfloat16, device=device)
    try:
        product = torch.bmm(ones, ones.transpose(1, 2), out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return product.dtype == torch.float32 and bool((product == 16).all())


def block_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, block: RowBlock, scale: float
) -> Tensor:
    """Attend with ``query`` (n, heads, dim) of the block's rows over their ``keys`` and ``values``.

    ``keys`` and ``values`` are (cache rows, kv heads, columns, dim); the additive ``mask`` is (n,
    1, 1, width or more). Returns (n, heads * dim). Scores and softmax are fp32 for every dtype, as
    in the trainer's kernels: rounding a score of 16 to bfloat16 changes its weight by six percent.
    """
    n = len(query)
    kv_heads = keys.shape[1]
    dim = query.shape[2]
    width = block.width
    grouped = query.view(n, kv_heads, -1, dim)
    own = slice(block.first, block.end), slice(None), slice(block.shared, width)
    own_keys = keys[own].flatten(0, 1)
    own_values = values[own].flatten(0, 1)
    packed = grouped.reshape(n * kv_heads, -1, dim)
    scores = _multiply_wide(packed, own_keys).view(n, kv_heads, -1, width - block.shared)
    if not block.shared:
        weights = torch.softmax(scores.mul_(scale).add_(mask[..., :width]), -1).to(values.dtype)
        return torch.bmm(weights.flatten(0, 1), own_values).view(n, -1)
    common_keys, common_values = (
        tensor[block.leader, :, : block.shared] for tensor in (keys, values)
    )
    by_head = grouped.transpose(0, 1).reshape(kv_heads, -1, dim)
    common = _multiply_wide(by_head, common_keys)
    common = common.view(kv_heads, n, -1, block.shared).transpose(0, 1)
    scores = torch.cat((common, scores), -1).mul_(scale).add_(mask[..., :width])
    weights = torch.softmax(scores, -1).to(values.dtype)
    common_weights = weights[..., : block.shared]
    own_weights = weights[..., block.shared :]
    mixed = torch.bmm(own_weights.reshape(n * kv_heads, -1, width - block.shared), own_values).view(
        grouped.shape
    )
    by_head = common_weights.transpose(0, 1).reshape(kv_heads, -1, block.shared)
    mixed += torch.bmm(by_head, common_values).view(kv_heads, n, -1, dim).transpose(0, 1)
    return mixed.view(n, -1)


def blocks_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    blocks: Sequence[RowBlock],
    scale: float,
) -> Tensor:
    """Attend with ``query`` (height, heads, dim), which covers all cache rows up to the last
    decoding one. Returns (height, heads * dim), with zeros for rows that belong to no block."""
    if len(blocks) == 1 and blocks[0].first == 0:
        return block_attention(query, keys, values, mask, blocks[0], scale)
    parts = []
    next_row = 0
    for block in blocks:
        if block.first > next_row:
            parts.append(query.new_zeros(block.first - next_row, query.shape[1] * query.shape[2]))
        rows = slice(block.first, block.end)
        parts.append(block_attention(query[rows], keys, values, mask[rows], block, scale))
        next_row = block.end
    return torch.cat(parts)
