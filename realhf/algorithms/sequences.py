"""The sequences of a batch as flat tensors, and choosing among them."""

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
    """Positions of the L-1 layout. ``mask`` bool (n,): the predicted token is trainable; ``sequence`` i64
    (n,): which sequence; ``group`` i64 (n_sequences,): which sample."""

    mask: Tensor
    sequence: Tensor
    group: Tensor

    @property
    def n_sequences(self) -> int:
        return len(self.group)

    @staticmethod
    def of(sample: SequenceSample) -> PredictedTokens:
        """Reads ``loss_mask`` (all True if absent) and the lengths of ``packed_input_ids``."""
        lengths = np.asarray(sample.lengths("packed_input_ids").values)
        sequence = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths - 1))
        group = torch.from_numpy(np.asarray(sample.group_index("packed_input_ids")))
        if "loss_mask" not in sample.keys:
            return PredictedTokens(torch.ones(len(sequence), dtype=torch.bool), sequence, group)
        starts = np.cumsum(lengths) - lengths
        later = np.ones(int(lengths.sum()), dtype=bool)
        later[starts[lengths > 0]] = False
        mask = sample["loss_mask"].cpu().bool()[torch.from_numpy(later)]
        return PredictedTokens(mask, sequence, group)


def replace_keys(
    sample: SequenceSample, *, per_token: Mapping[str, Tensor] = _NONE, shifted: Mapping[str, Tensor] = _NONE
) -> SequenceSample:
    """The sample with these keys added or exchanged: ``per_token`` of L entries per sequence, ``shifted`` of
    L-1."""
    nested = sample.seqlens["packed_input_ids"]
    less_one = [[length - 1 for length in inner] for inner in nested]
    seqlens = {**dict.fromkeys(per_token, nested), **dict.fromkeys(shifted, less_one)}
    new = SequenceSample.from_tensors(sample.ids, {**per_token, **shifted}, seqlens)
    kept = [key for key in sample.keys if key not in seqlens]
    return sample.select(kept).update(new)


def select_sequences(sample: SequenceSample, keep: Tensor) -> SequenceSample | None:
    """Only the sequences where ``keep`` (bool, (n sequences,)) is True; None if there are none. A sample
    without any is left out. See ``choose_sequences``."""
    return choose_sequences(sample, keep.cpu().numpy().astype(bool))
