"""Adds up what the micro-batches of one train step returned, and what the ranks did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from realhf.backends.training.micro_batches import Part
from realhf.backends.training.ranks import Ranks

_LOSS, _BACKWARD, _KEPT = "loss", "backward", "kept/"


class StepAccount:
    """Collects losses, statistics and kept tensors of the micro-batches of a rank. ``size`` is the sum of L-1 over the
    sequences of the batch; ``backward`` says whether any loss had a gradient."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._loss = 0.0
        self._stats: dict[str, float] = {}
        self._kept: dict[str, Tensor] = {}
        self.backward = False

    def add(self, part: Part, loss: float, stats: Mapping[str, float], kept: Mapping[str, Tensor]) -> None:
        """Take one micro-batch into account."""
        self._loss += loss
        self._stats = combined([self._stats, stats])
        for name, values in kept.items():
            self._whole(name)[part.place] = values

    def summed(self, ranks: Ranks) -> tuple[dict[str, float], bool, dict[str, Tensor]]:
        """Return statistics with ``loss``, whether any rank had a gradient, and the kept tensors, fp32 (size,): all of
        the whole batch, the same on every rank."""
        own = {f"stats/{name}": value for name, value in self._stats.items()}
        names = {f"{_KEPT}{name}": 0.0 for name in self._kept}
        parts = ranks.gather({**own, **names, _LOSS: self._loss, _BACKWARD: float(self.backward)})
        totals = combined(parts)
        for name in sorted(name.removeprefix(_KEPT) for name in totals if name.startswith(_KEPT)):
            ranks.sum_(self._whole(name))
        stats = {name.removeprefix("stats/"): v for name, v in totals.items() if name.startswith("stats/")}
        return {**stats, "loss": totals[_LOSS]}, totals[_BACKWARD] > 0, self._kept

    def _whole(self, name: str) -> Tensor:
        return self._kept.setdefault(name, torch.zeros(self._size))


def combined(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add numbers of the same name up; of a name that ends in ``_max`` take the maximum."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            elif name.endswith("_max"):
                total[name] = max(total[name], value)
            else:
                total[name] += value
    return total
