"""Is the data source of a streamed run: it names the places of the next batch and knows nothing else.

The trajectory server decides which groups fill them when the batch is pulled, on a model worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realhf.api.source import SampleResult, SourceItem


class BatchSlotSource:
    """Names places without end. Ids are ``slot<i>@<n>`` with n counting from 0; no values, no metadata."""

    def __init__(self, seed: int) -> None:
        del seed
        self._drawn = 0

    def next_batch(self, n: int) -> list[SourceItem]:
        """Return exactly ``n`` places."""
        first, self._drawn = self._drawn, self._drawn + n
        return [SourceItem(f"slot{index}@{first + index}") for index in range(n)]

    def record(self, results: Sequence[SampleResult]) -> None:
        """Do nothing: the producer of a group does not wait for its result."""

    def state_dict(self) -> dict[str, Any]:
        """Return how many places were drawn."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the places that a saved state had drawn."""
        self._drawn = int(state["drawn"])

    def stats(self) -> dict[str, float]:
        """Return no statistics."""
        return {}
