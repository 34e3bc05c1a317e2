"""What happens when losses or gradients are not finite several times in a row: the run is asked to stop."""

from __future__ import annotations

from realhf.api.model import TrainResult


class NonFiniteGuard:
    """Counts updates in a row that the engine skipped; ``limit`` of them are too many."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_a_row = 0

    def observe(self, result: TrainResult) -> bool:
        """Call after every update. False: too many, make no further one in this step."""
        self.in_a_row = self.in_a_row + 1 if result.skipped else 0
        return self.in_a_row < self._limit

    def verdict(self) -> dict[str, str]:
        """To add to the statistics of the step: ``stop``, the reason to end the run, or nothing. The master ends
        it when it has written down what was skipped."""
        if self.in_a_row < self._limit:
            return {}
        return {"stop": f"loss or gradient not finite in {self.in_a_row} updates in a row; see nonfinite.jsonl"}
