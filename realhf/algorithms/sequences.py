"""Views the sequences of a batch as flat tensors, and chooses among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from realhf.api.keys import ROLLOUT_KEY
from realhf.api.sample import SequenceSample
from realhf.api.sequence_choice import choose_sequences

_NONE: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class PredictedTokens:
    """Describes the positions of the L-1 layout: ``mask`` bool (n,) is true where the predicted token is trainable;
    ``sequence`` i64 (n,) numbers the sequence of each position; ``group`` i64 (n_sequences,) numbers the sample of each
    sequence, ``rollout`` i64 (n_sequences,) its rollout: the branches of an agent are sequences of one, and so are the
    parts of a conversation whose old reasoning was dropped."""

    mask: Tensor
    sequence: Tensor
    group: Tensor
    rollout: Tensor

    @property
    def n_sequences(self) -> int:
        """The number of sequences of the batch."""
        return len(self.group)

    @property
    def n_rollouts(self) -> int:
        """The number of rollouts of the batch: at most that of sequences."""
        return int(self.rollout.max()) + 1 if len(self.rollout) else 0

    @property
    def owner(self) -> Tensor:
        """The number of the rollout of each position, i64 (n,)."""
        return self.rollout[self.sequence]

    @staticmethod
    def of(sample: SequenceSample) -> PredictedTokens:
        """Read the positions from ``loss_mask`` (all True if absent), the lengths of ``packed_input_ids`` and
        ``rollout_index`` (if absent, each sequence is a rollout)."""
        lengths = np.asarray(sample.lengths("packed_input_ids").values)
        sequence = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths - 1))
        group = torch.from_numpy(np.asarray(sample.group_index("packed_input_ids")))
        mask = torch.ones(len(sequence), dtype=torch.bool)
        if "loss_mask" in sample.keys:
            mask = predicted(sample, "loss_mask").bool()
        return PredictedTokens(mask, sequence, group, rollouts(sample))


def rollouts(sample: SequenceSample) -> Tensor:
    """Return the number of each sequence's rollout, i64 (n sequences,), in the order of samples and of
    ``rollout_index``; without that key each sequence is one."""
    group = torch.from_numpy(np.asarray(sample.group_index("packed_input_ids")))
    if ROLLOUT_KEY not in sample.keys:
        return torch.arange(len(group))
    index = sample[ROLLOUT_KEY].cpu().long()
    if len(index) and int(index.min()) < 0:
        raise ValueError(f"{ROLLOUT_KEY}: the number of a rollout is not negative")
    return torch.unique(group * (int(index.max()) + 1 if len(index) else 1) + index, return_inverse=True)[1]


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
