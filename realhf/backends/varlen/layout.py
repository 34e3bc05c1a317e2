"""Says where the sequences of a packed row are, in the form that variable-length attention takes.

All sequences of a pass lie behind each other in one row, without padding. Each has queries, its own new tokens, and
keys, which may begin with tokens that an earlier sequence of the row has computed: what sequences have in common is
computed once. The last query of a sequence sees all of its keys, the one before all but the last, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from realhf.backends.varlen.kernel import Kernel


@dataclass(frozen=True)
class PackedLayout:
    """Holds the n sequences of a packed row. ``ends_q``, ``ends_k`` int32 (n + 1,): 0, then where the queries, and the
    keys, of each sequence end; ``longest_q``, ``longest_k``: the most of one sequence; ``keys`` int64 (all keys,): the
    column of each key, None where every sequence has its own columns only; ``kernel`` computes."""

    ends_q: Tensor
    ends_k: Tensor
    longest_q: int
    longest_k: int
    keys: Tensor | None
    kernel: Kernel

    def to(self, device: torch.device) -> PackedLayout:
        """Return the layout with its tensors on ``device``."""
        keys = None if self.keys is None else self.keys.to(device)
        return replace(self, ends_q=self.ends_q.to(device), ends_k=self.ends_k.to(device), keys=keys)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float) -> Tensor:
        """Return the outputs (columns, heads, dim) of causal attention within each sequence. ``query`` (columns, heads,
        dim), ``key`` and ``value`` (columns, kv heads, dim); ``window``: a token sees that many, itself included."""
        if self.keys is not None:
            key, value = _Taken.apply(key, self.keys), _Taken.apply(value, self.keys)
        return self.kernel(query, key, value, self.ends_q, self.ends_k, self.longest_q, self.longest_k, window, scale)


class _Taken(torch.autograd.Function):
    """Takes rows of (rows, heads, dim), some of them often. Their gradients add up in fp32 and are rounded once: what
    many branches give to a shared row would lose its digits in a narrow sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (rows,) = grads, ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        out = torch.zeros(ctx.shape, dtype=wide, device=grad.device)
        return out.index_add_(0, rows, grad.to(wide)).to(grad.dtype), None


def packed_layout(paths: Sequence[np.ndarray], shared: Sequence[int], kernel: Kernel) -> PackedLayout:
    """Lay out sequences, at least one. ``paths``: for each the column of each of its tokens, int64; ``shared``: how
    many of them, at its beginning, an earlier sequence computes. One that computes nothing itself has no queries.
    Raises ValueError where the columns of new tokens do not follow each other."""
    sizes_k = [len(path) for path in paths]
    sizes_q = [size - common for size, common in zip(sizes_k, shared, strict=True)]
    new = np.concatenate([path[common:] for path, common in zip(paths, shared, strict=True)])
    if not np.array_equal(new, np.arange(len(new))):
        raise ValueError("the new tokens of a packed row must lie behind each other")
    # A sequence without queries has nothing to compute, and kernels are not asked how they treat it.
    kept = [i for i, size in enumerate(sizes_q) if size]
    keys = None if not any(shared) else torch.from_numpy(np.concatenate([paths[i] for i in kept]).astype(np.int64))
    return PackedLayout(
        _ends([sizes_q[i] for i in kept]),
        _ends([sizes_k[i] for i in kept]),
        max(sizes_q[i] for i in kept),
        max(sizes_k[i] for i in kept),
        keys,
        kernel,
    )


def _ends(sizes: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
