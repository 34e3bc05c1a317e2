"""Computes attention of one new token per row, block by block of rows.

Each block is as wide as its longest row, and rows of a block that begin alike read their common part once. For small
models decoding is bound by reading keys and values, and the rollouts of a group have their prompt in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MIN_SHARED = 64
"""Least number of columns worth sharing; for fewer the additional calls cost more than reading less saves."""
_MIN_KEPT = 0.75
"""Least part of a block's common columns that a row must keep; a row that keeps less begins a new block."""
_MAX_ROWS = 16
"""Largest number of rows of a block that shares nothing."""


@dataclass(frozen=True)
class RowBlock:
    """Describes cache rows [first, end). Those of them that decode have their first ``shared`` columns in common with
    row ``leader``; none reads beyond ``width``."""

    first: int
    end: int
    leader: int
    shared: int
    width: int


def row_blocks(tokens: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> list[RowBlock]:
    """Divide the decoding ``rows`` int64 (n,), ascending, into blocks. Their new tokens stand at ``positions`` int64
    (n,); ``tokens`` int64 (rows, columns) are those of the cache."""
    held = tokens[rows, : int(positions.max()) + 1]
    differs = held[1:] != held[:-1]
    common = np.where(differs.any(1), differs.argmax(1), held.shape[1])
    common = np.minimum(common, np.minimum(positions[1:], positions[:-1])).tolist()
    blocks, first, shared = [], 0, 0
    for i in range(1, len(rows) + 1):
        if i < len(rows):
            both = min(shared or common[i - 1], common[i - 1])
            grows = both >= _MIN_SHARED and (i - first == 1 or (shared > 0 and both >= _MIN_KEPT * shared))
            alone = shared == 0 and common[i - 1] < _MIN_SHARED and i - first < _MAX_ROWS
            if grows or alone:
                shared = both if grows else 0
                continue
        width = int(positions[first:i].max()) + 1
        blocks.append(RowBlock(int(rows[first]), int(rows[i - 1]) + 1, int(rows[first]), shared, width))
        first, shared = i, 0
    return blocks


def block_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, block: RowBlock, scale: float) -> Tensor:
    """Attend with ``query`` (n, heads, dim) of the block's rows over their ``keys`` and ``values``.

    ``keys`` and ``values`` are (rows of the cache, kv heads, columns, dim), the additive ``mask`` is (n, 1, 1, width or
    more); returns (n, heads * dim). Scores and softmax are fp32 in any type, as in the kernels of the trainer: rounding
    a score of 16 to bfloat16 changes its weight by six percent.
    """
    n, kv_heads, dim, width = len(query), keys.shape[1], query.shape[2], block.width
    grouped = query.view(n, kv_heads, -1, dim)
    own = slice(block.first, block.end), slice(None), slice(block.shared, width)
    own_keys, own_values = keys[own].flatten(0, 1), values[own].flatten(0, 1)
    packed = grouped.reshape(n * kv_heads, -1, dim)
    scores = torch.bmm(packed.float(), own_keys.float().transpose(1, 2)).view(n, kv_heads, -1, width - block.shared)
    if not block.shared:
        weights = torch.softmax(scores.mul_(scale).add_(mask[..., :width]), -1).to(values.dtype)
        return torch.bmm(weights.flatten(0, 1), own_values).view(n, -1)
    common_keys, common_values = (held[block.leader, :, : block.shared] for held in (keys, values))
    by_head = grouped.transpose(0, 1).reshape(kv_heads, -1, dim)
    common = torch.bmm(by_head.float(), common_keys.float().transpose(1, 2))
    common = common.view(kv_heads, n, -1, block.shared).transpose(0, 1)
    scores = torch.cat((common, scores), -1).mul_(scale).add_(mask[..., :width])
    weights = torch.softmax(scores, -1).to(values.dtype)
    common_weights, own_weights = weights[..., : block.shared], weights[..., block.shared :]
    mixed = torch.bmm(own_weights.reshape(n * kv_heads, -1, width - block.shared), own_values).view(grouped.shape)
    by_head = common_weights.transpose(0, 1).reshape(kv_heads, -1, block.shared)
    mixed += torch.bmm(by_head, common_values).view(kv_heads, n, -1, dim).transpose(0, 1)
    return mixed.view(n, -1)


def blocks_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, blocks: Sequence[RowBlock], scale: float
) -> Tensor:
    """Attend with ``query`` (height, heads, dim) of all rows up to the last that decodes; return (height, heads * dim),
    zeros for rows between blocks."""
    if len(blocks) == 1 and blocks[0].first == 0:
        return block_attention(query, keys, values, mask, blocks[0], scale)
    parts, at = [], 0
    for block in blocks:
        if block.first > at:
            parts.append(query.new_zeros(block.first - at, query.shape[1] * query.shape[2]))
        rows = slice(block.first, block.end)
        parts.append(block_attention(query[rows], keys, values, mask[rows], block, scale))
        at = block.end
    return torch.cat(parts)
