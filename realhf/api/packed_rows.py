"""Rows of packed tensors: joining, taking, comparing. torch is imported when a tensor is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from realhf.api.lengths import IntArray, Lengths

if TYPE_CHECKING:
    from torch import Tensor


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """All rows, one tensor after the other."""
    import torch

    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def take_rows(tensor: Tensor, lengths: Lengths, positions: IntArray) -> Tensor:
    """Rows of the samples at ``positions``; a view when they are one run."""
    if len(positions) == 1 or bool((np.diff(positions) == 1).all()):
        begin, end = lengths.row_span(int(positions[0]), int(positions[-1]))
        return tensor[begin:end]
    import torch

    return tensor.index_select(0, torch.from_numpy(lengths.take_rows(positions)).to(tensor.device))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal to the bit, NaN payloads included."""
    import torch

    if not a.numel():
        return True
    flat_a, flat_b = a.cpu().reshape(-1), b.cpu().reshape(-1)
    return torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8))
