"""Collects what a train step sees of every token, for who keeps rollouts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.objective import ADVANTAGES, CLIPPED, CURRENT, PROXIMAL, RATIO
from realhf.algorithms.sequences import PredictedTokens, replace_keys
from realhf.api.sample import SequenceSample
from realhf.api.trace import TrainedRows

PLACE = "place"
"""The key that says where in the batch each predicted token of a minibatch stands, i64 (L-1)."""


class RecordedStep:
    """Is train step ``step`` on ``batch``, which has the keys of ``PolicyGradientInterface.prepare``. ``batch`` is the
    one to train on: its sequences may be cut into minibatches and left out as one likes."""

    def __init__(self, step: int, batch: SequenceSample) -> None:
        self._step = step
        tokens = PredictedTokens.of(batch)
        size = len(tokens.mask)
        self._tokens, self._advantages = tokens, batch[ADVANTAGES].cpu()
        self._behaviour = batch["packed_logprobs"].cpu()
        self._lengths = np.asarray(batch.lengths("packed_input_ids").values) - 1
        self.batch = replace_keys(batch, shifted={PLACE: torch.arange(size)})
        self._before, self._current = torch.full((size,), torch.nan), torch.full((size,), torch.nan)
        self._ratio, self._clipped = torch.ones(size), torch.zeros(size, dtype=torch.bool)
        self._updated = False

    def add(self, part: SequenceSample, kept: Mapping[str, Tensor]) -> None:
        """Take a minibatch that was trained on, and what its loss kept. A later pass replaces an earlier one."""
        place = part[PLACE].cpu()
        if PROXIMAL in part.keys:
            self._before[place] = part[PROXIMAL].cpu().float()
        elif not self._updated:
            self._before[place] = kept[CURRENT]
        self._updated = True
        self._current[place], self._ratio[place] = kept[CURRENT], kept[RATIO]
        self._clipped[place] = kept[CLIPPED] > 0

    def rows(self, versions: Tensor | None) -> TrainedRows:
        """Return what was collected; ``versions`` i32 (n,) sampled each token of the batch."""
        tokens = self._tokens
        return TrainedRows(
            self._step,
            self.batch.ids,
            np.bincount(tokens.group.numpy(), minlength=len(self.batch.ids)),
            self._lengths,
            tokens.mask.numpy(),
            self._behaviour.numpy(),
            self._before.numpy(),
            self._current.numpy(),
            self._ratio.numpy(),
            self._advantages.numpy(),
            self._clipped.numpy(),
            None if versions is None else versions.cpu().numpy(),
        )
