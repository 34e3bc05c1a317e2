"""Keeps the sequence lengths of one key of a sample flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

IntArray = np.ndarray[Any, np.dtype[np.int64]]


class Lengths:
    """Holds lengths flat: ``values`` int64 (n sequences,) counts the rows of every sequence; ``offsets`` int64 (n
    samples + 1,) says where each sample's sequences begin. It is immutable. Raises ValueError on a negative length or
    offsets that do not rise from 0 to ``len(values)``."""

    __slots__ = ("_rows", "offsets", "values")

    def __init__(self, values: IntArray, offsets: IntArray) -> None:
        if values.size and np.minimum.reduce(values) < 0:
            raise ValueError("sequence lengths must be >= 0")
        ends_fit = offsets.size and offsets[0] == 0 and offsets[-1] == len(values)
        if not ends_fit or (len(offsets) > 2 and (np.diff(offsets) < 0).any()):
            raise ValueError("offsets of sequence lengths do not cover them in order")
        self.values, self.offsets = values, offsets
        self._rows: IntArray | None = None

    @staticmethod
    def of(nested: Sequence[Sequence[int]]) -> Lengths:
        """Build lengths from nested lists: for each sample, the lengths of its sequences."""
        flat = np.array([int(length) for inner in nested for length in inner], dtype=np.int64)
        return Lengths(flat, _cumulated(np.array([len(inner) for inner in nested], dtype=np.int64)))

    @staticmethod
    def join(parts: Sequence[Lengths]) -> Lengths:
        """Concatenate the samples of several lengths."""
        values = [part.values for part in parts]
        if all(len(part.offsets) == 2 for part in parts):
            counts = np.array([len(column) for column in values], dtype=np.int64)
        else:
            counts = np.concatenate([np.diff(part.offsets) for part in parts])
        return Lengths(np.concatenate(values), _cumulated(counts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lengths):
            return NotImplemented
        return np.array_equal(self.values, other.values) and np.array_equal(self.offsets, other.offsets)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def nested(self) -> list[list[int]]:
        """Return the lengths as nested lists: for each sample, those of its sequences."""
        values = self.values.tolist()
        return [values[a:b] for a, b in pairwise(self.offsets.tolist())]

    def total(self) -> int:
        """Return the number of rows of the packed tensor."""
        return int(self.cumulated()[-1])

    def cumulated(self) -> IntArray:
        """Return the first row of every sequence and, last, the total: int64 (n sequences + 1,)."""
        if self._rows is None:
            self._rows = _cumulated(self.values)
        return self._rows

    def rows(self) -> IntArray:
        """Return the first row of every sample and, last, the total: int64 (n samples + 1,)."""
        return self.cumulated()[self.offsets]

    def take(self, samples: IntArray) -> Lengths:
        """Return the lengths of the samples at these positions."""
        starts = self.offsets[samples]
        counts = self.offsets[samples + 1] - starts
        return Lengths(self.values[ranges(starts, counts)], _cumulated(counts))

    def take_rows(self, samples: IntArray) -> IntArray:
        """Return the row numbers of the samples at these positions, in their order."""
        starts = self.cumulated()[self.offsets[samples]]
        return ranges(starts, self.cumulated()[self.offsets[samples + 1]] - starts)

    def row_span(self, first: int, last: int) -> tuple[int, int]:
        """Return the begin and end row of the samples ``first`` to ``last`` inclusive."""
        rows = self.cumulated()
        return int(rows[self.offsets[first]]), int(rows[self.offsets[last + 1]])


def joined_lengths(parts: Sequence[Mapping[str, Lengths]]) -> dict[str, Lengths]:
    """Join the lengths of every key over all parts; keys that share theirs in every part go on sharing."""
    joined: dict[tuple[int, ...], Lengths] = {}
    out: dict[str, Lengths] = {}
    for key in parts[0]:
        columns = [part[key] for part in parts]
        known = tuple(map(id, columns))
        if known not in joined:
            joined[known] = Lengths.join(columns)
        out[key] = joined[known]
    return out


def ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Concatenate ``arange(start, start + count)`` over the pairs."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


def _cumulated(values: IntArray) -> IntArray:
    out = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=out[1:])
    return out


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Join all rows, one tensor after the other."""
    import torch

    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def take_rows(tensor: Tensor, lengths: Lengths, positions: IntArray) -> Tensor:
    """Return the rows of the samples at ``positions``; a view when these are consecutive."""
    if len(positions) == 1 or bool((np.diff(positions) == 1).all()):
        begin, end = lengths.row_span(int(positions[0]), int(positions[-1]))
        return tensor[begin:end]
    import torch

    return tensor.index_select(0, torch.from_numpy(lengths.take_rows(positions)).to(tensor.device))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape are equal to the bit, NaN payloads included."""
    import torch

    if not a.numel():
        return True
    flat_a, flat_b = a.cpu().reshape(-1), b.cpu().reshape(-1)
    return torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8))
