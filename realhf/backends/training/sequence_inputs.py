"""Reads from a batch what has to go through the model: tokens of each sequence, and the positions that are scored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from realhf.api.sample import SequenceSample


@dataclass(frozen=True)
class SequenceInputs:
    """Describes every sequence of a batch. ``tokens``: int64, those that go through the model, up to the last one that
    a scored prediction depends on; ``asked``: int64, the positions in them whose prediction is scored; ``target``:
    int64, the predicted tokens; ``place``: int64, where the results stand in the packed L-1 layout, which has ``size``
    entries."""

    tokens: list[np.ndarray]
    asked: list[np.ndarray]
    target: list[np.ndarray]
    place: list[np.ndarray]
    size: int

    @property
    def scored(self) -> list[int]:
        """The sequences that have a position to score."""
        return [i for i, asked in enumerate(self.asked) if len(asked)]

    @staticmethod
    def of(sample: SequenceSample) -> SequenceInputs:
        """Read ``packed_input_ids`` and ``loss_mask`` (without one every prediction is scored). Raises ValueError on an
        empty sequence."""
        lengths = np.asarray(sample.lengths("packed_input_ids").values)
        if (lengths < 1).any():
            raise ValueError("packed_input_ids has an empty sequence")
        ids = sample["packed_input_ids"].cpu().numpy()
        wanted = sample["loss_mask"].cpu().numpy().astype(bool) if "loss_mask" in sample.keys else None
        found = SequenceInputs([], [], [], [], int((lengths - 1).sum()))
        start = output = 0
        for length in lengths.tolist():
            asked = np.arange(length - 1) if wanted is None else np.flatnonzero(wanted[start + 1 : start + length])
            found.tokens.append(ids[start : start + (int(asked[-1]) + 1 if len(asked) else 0)])
            found.asked.append(asked)
            found.target.append(ids[start + 1 + asked])
            found.place.append(output + asked)
            start, output = start + length, output + length - 1
        return found
