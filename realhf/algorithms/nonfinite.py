"""Asks the run to stop when losses or gradients are not finite several times in a row."""

from __future__ import annotations

from realhf.api.model import TrainResult


class NonFiniteGuard:
    """Counts consecutive updates that the engine skipped; the run should stop when there are ``limit`` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_a_row = 0

    def observe(self, result: TrainResult) -> bool:
        """Count the result of an update; call it after every one. Returns False when this step should make no further
        update."""
        self.in_a_row = self.in_a_row + 1 if result.skipped else 0
        return self.in_a_row < self._limit

    def verdict(self) -> dict[str, str]:
        """Return what to add to the statistics of the step: ``stop``, the reason to end the run, or nothing. The master
        ends the run after it has written down what was skipped."""
        if self.in_a_row < self._limit:
            return {}
        return {"stop": f"loss or gradient not finite in {self.in_a_row} updates in a row; see nonfinite.jsonl"}
