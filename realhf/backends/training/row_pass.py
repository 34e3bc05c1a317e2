"""Lays out the rows of one pass through the model as tensors: tokens, positions, masks or a packed layout, and what is
read from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.backends.attention.row_trees import RowTrees
from realhf.backends.embedded.attention_masks import sliding_window
from realhf.backends.training.sequence_inputs import SequenceInputs
from realhf.backends.training.shared_rows import Row, layout, visible
from realhf.backends.varlen.kernel import Kernel
from realhf.backends.varlen.layout import PackedLayout, packed_layout

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class RowPass:
    """Holds n rows of a common width. ``tokens``, ``depth`` int64 (n, width): token and its position in its sequence;
    ``seen`` bool (n, width, width): which column each column sees, None for rows of one sequence each, which causal
    attention serves, and where ``trees`` says it; ``column`` int64 (m,): the column, of all rows one after another,
    that each scored prediction is read from; ``target``, ``place`` int64 (m,). With ``packed`` all rows lie behind each
    other in one."""

    tokens: Tensor
    depth: Tensor
    seen: Tensor | None
    column: Tensor
    target: Tensor
    place: Tensor
    packed: PackedLayout | None = None
    trees: RowTrees | None = None


def row_pass(rows: Sequence[Row], inputs: SequenceInputs, *, by_trees: bool = False) -> RowPass:
    """Lay out ``rows`` (at least one), whose members are sequences of ``inputs``, padded on the right; with ``trees``
    or ``seen`` for those that hold several sequences."""
    width = max(row.length for row in rows)
    tokens, depth = np.zeros((2, len(rows), width), dtype=np.int64)
    columns: list[np.ndarray] = []
    layouts = [layout(row, inputs.tokens) for row in rows]
    for n, (row, lay) in enumerate(zip(rows, layouts, strict=True)):
        tokens[n, : row.length], depth[n, : row.length] = lay.tokens, lay.depth
        columns += [n * width + path[inputs.asked[i]] for i, path in zip(row.members, lay.columns, strict=True)]
    members = [i for row in rows for i in row.members]
    plain = all(row.plain for row in rows)
    trees = seen = None
    if not plain and by_trees:
        trees = RowTrees([lay.columns for lay in layouts], [row.shared for row in rows], width)
    elif not plain:
        seen = np.stack([visible(row, lay, width) for row, lay in zip(rows, layouts, strict=True)])
    parts = (columns, [inputs.target[i] for i in members], [inputs.place[i] for i in members])
    column, target, place = (torch.from_numpy(np.concatenate(part).astype(np.int64)) for part in parts)
    return RowPass(
        torch.from_numpy(tokens),
        torch.from_numpy(depth),
        None if seen is None else torch.from_numpy(seen),
        column,
        target,
        place,
        trees=trees,
    )


def packed_pass(rows: Sequence[Row], inputs: SequenceInputs, kernel: Kernel) -> RowPass:
    """Lay out ``rows`` (at least one) behind each other, without padding, for attention by ``kernel``."""
    tokens: list[np.ndarray] = []
    depth: list[np.ndarray] = []
    paths: list[np.ndarray] = []
    before = 0
    for row in rows:
        lay = layout(row, inputs.tokens)
        tokens.append(lay.tokens)
        depth.append(lay.depth)
        paths += [before + path for path in lay.columns]
        before += row.length
    members = [i for row in rows for i in row.members]
    columns = [path[inputs.asked[i]] for i, path in zip(members, paths, strict=True)]
    parts = (columns, [inputs.target[i] for i in members], [inputs.place[i] for i in members])
    column, target, place = (torch.from_numpy(np.concatenate(part).astype(np.int64)) for part in parts)
    return RowPass(
        torch.from_numpy(np.concatenate(tokens))[None],
        torch.from_numpy(np.concatenate(depth))[None],
        None,
        column,
        target,
        place,
        packed_layout(paths, [common for row in rows for common in row.shared], kernel),
    )


def masks(config: Any, seen: Tensor, depth: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Return additive masks (n, 1, width, width) of ``dtype`` for a model with this configuration: one, or one for each
    kind of layer where the model takes several. ``seen`` and ``depth`` are those of a ``RowPass``."""
    full = _additive(seen, dtype)
    window = sliding_window(config)
    if window is None:
        return full
    near = depth[:, :, None] - depth[:, None, :] < window
    windowed = _additive(seen & near, dtype)
    return {_FULL: full, _SLIDING: windowed} if getattr(config.get_text_config(), "layer_types", None) else windowed


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]
