"""Views the sequences of a batch as flat tensors, and chooses among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from realhf.api.sample import SequenceSample
from realhf.api.sequence_choice import choose_sequences

_NONE: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class PredictedTokens:
    """Describes the positions of the L-1 layout: ``mask`` bool (n,) is true where the predicted token is trainable;
    ``sequence`` i64 (n,) numbers the sequence of each position; ``group`` i64 (n_sequences,) numbers the sample of each
    sequence."""

    mask: Tensor
    sequence: Tensor
    group: Tensor

    @property
    def n_sequences(self) -> int:
        """The number of sequences of the batch."""
        return len(self.group)

    @staticmethod
    def of(sample: SequenceSample) -> PredictedTokens:
        """Read the positions from ``loss_mask`` (all True if absent) and the lengths of ``packed_input_ids``."""
        lengths = np.asarray(sample.lengths("packed_input_ids").values)
        sequence = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths - 1))
        group = torch.from_numpy(np.asarray(sample.group_index("packed_input_ids")))
        if "loss_mask" not in sample.keys:
            return PredictedTokens(torch.ones(len(sequence), dtype=torch.bool), sequence, group)
        return PredictedTokens(predicted(sample, "loss_mask").bool(), sequence, group)


def predicted(sample: SequenceSample, key: str) -> Tensor:
    """Return the entries of a per-token key for the predicted tokens, all but the first of each sequence: (n,) in the
    L-1 layout."""
    lengths = np.asarray(sample.lengths(key).values)
    starts = np.cumsum(lengths) - lengths
    later = np.ones(int(lengths.sum()), dtype=bool)
    later[starts[lengths > 0]] = False
    return sample[key].cpu()[torch.from_numpy(later)]


def replace_keys(
    sample: SequenceSample, *, per_token: Mapping[str, Tensor] = _NONE, shifted: Mapping[str, Tensor] = _NONE
) -> SequenceSample:
    """Return the sample with keys added or replaced: ``per_token`` has L entries per sequence, ``shifted`` L-1."""
    nested = sample.seqlens["packed_input_ids"]
    less_one = [[length - 1 for length in inner] for inner in nested]
    seqlens = {**dict.fromkeys(per_token, nested), **dict.fromkeys(shifted, less_one)}
    new = SequenceSample.from_tensors(sample.ids, {**per_token, **shifted}, seqlens)
    kept = [key for key in sample.keys if key not in seqlens]
    return sample.select(kept).update(new)


def select_sequences(sample: SequenceSample, keep: Tensor) -> SequenceSample | None:
    """Keep only the sequences where ``keep`` (bool, (n sequences,)) is True; returns None if there are none. A sample
    without any is left out. See ``choose_sequences``."""
    return choose_sequences(sample, keep.cpu().numpy().astype(bool))
