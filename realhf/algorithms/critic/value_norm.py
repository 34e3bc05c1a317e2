"""Keeps the mean and the standard deviation of returns, in whose units a critic predicts."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

_SMALLEST_STD = 1e-2


class ReturnMoments:
    """Holds exponential means of the returns and of their squares, corrected for having started at nothing:
    ``observe`` gives the newest batch the share 1 - ``decay``. Before the first batch the mean is 0 and the standard
    deviation 1; it is never below 0.01. fp64."""

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"critic.value_norm_decay={decay}: must be at least 0 and below 1")
        self._decay = decay
        self._sum = self._squares = self._weight = 0.0

    def observe(self, returns: Tensor) -> None:
        """Take in the returns of a batch, (n,); an empty one changes nothing. Raises ValueError where one is not
        finite."""
        if not len(returns):
            return
        values = returns.double()
        mean, square = float(values.mean()), float(values.square().mean())
        if not math.isfinite(mean) or not math.isfinite(square):
            raise ValueError("critic: a return is not finite")
        share = 1 - self._decay
        self._sum += share * (mean - self._sum)
        self._squares += share * (square - self._squares)
        self._weight += share * (1 - self._weight)

    @property
    def mean(self) -> float:
        """The mean of the returns so far."""
        return self._sum / self._weight if self._weight else 0.0

    @property
    def std(self) -> float:
        """The standard deviation of the returns so far, at least 0.01."""
        if not self._weight:
            return 1.0
        return max(_SMALLEST_STD, math.sqrt(max(0.0, self._squares / self._weight - self.mean**2)))

    def normalised(self, values: Tensor) -> Tensor:
        """Return ``values`` in the units that the critic predicts in, f32 of the same shape."""
        return ((values.double() - self.mean) / self.std).float()

    def restored(self, predicted: Tensor) -> Tensor:
        """Return what the critic predicted in the units of rewards, f32 of the same shape."""
        return (predicted.double() * self.std + self.mean).float()

    def state_dict(self) -> dict[str, Any]:
        """Return the moments."""
        return {"sum": self._sum, "squares": self._squares, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. Raises KeyError where one is missing."""
        self._sum, self._squares, self._weight = (float(state[name]) for name in ("sum", "squares", "weight"))
