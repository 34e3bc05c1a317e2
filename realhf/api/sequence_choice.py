"""Chooses some of a batch's sequences, whatever groups they are in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from realhf.api.lengths import Lengths
from realhf.api.sample import SequenceSample

if TYPE_CHECKING:
    from torch import Tensor

Bools = np.ndarray[Any, np.dtype[np.bool_]]


def choose_sequences(sample: SequenceSample, keep: Bools) -> SequenceSample | None:
    """Keep only the sequences of ``packed_input_ids`` where ``keep`` bool (n sequences,) is True, in their order;
    returns None if there are none.

    A sample without any is left out, and so is its metadata. A key with one entry per sample stays with its sample.
    Raises ValueError on a key that has neither one entry per sequence nor one per sample.
    """
    if not keep.any():
        return None
    offsets = sample.lengths("packed_input_ids").offsets
    count = np.diff(np.cumsum(np.concatenate(([0], keep)))[offsets])
    member = count > 0
    ends = np.concatenate(([0], np.cumsum(count[member]))).astype(np.int64)
    tensors: dict[str, Tensor] = {}
    lengths: dict[str, Lengths] = {}
    for key in sorted(sample.keys):
        held = sample.lengths(key)
        if np.array_equal(held.offsets, offsets):
            chosen, bounds = keep, ends
        elif len(held.values) == len(sample) and (np.diff(held.offsets) == 1).all():
            chosen, bounds = member, np.arange(int(member.sum()) + 1, dtype=np.int64)
        else:
            raise ValueError(f"key {key!r} does not have one length per sequence")
        tensors[key] = _rows(sample[key], np.repeat(chosen, held.values))
        lengths[key] = Lengths(held.values[chosen], bounds)
    where = np.flatnonzero(member).tolist()
    return SequenceSample.from_lengths(
        [sample.ids[i] for i in where],
        lengths,
        sample.dtypes,
        sample.trailing_shapes,
        tensors,
        {name: [column[i] for i in where] for name, column in sample.metadata.items()},
    )


def _rows(packed: Tensor, chosen: Bools) -> Tensor:
    import torch

    return packed if chosen.all() else packed[torch.from_numpy(chosen).to(packed.device)]
