"""A data source under the name ``counting``: sequences such as 7 8 9 0 1 2 that begin at a drawn token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from realhf.api.source import SampleResult, SourceItem
from realhf.registry import sources


@sources.register("counting")
class CountingSource:
    """Draws endless samples. Sample ``n`` depends on the seed and on ``n`` alone, so a resumed run draws the same."""

    def __init__(self, *, seed: int, vocabulary: int, length: int) -> None:
        self._seed, self._vocabulary, self._length = seed, vocabulary, length
        self._drawn = 0

    def next_batch(self, n: int) -> list[SourceItem]:
        """Return the next ``n`` samples of one sequence each."""
        self._drawn += n
        return [self._item(number) for number in range(self._drawn - n, self._drawn)]

    def _item(self, number: int) -> SourceItem:
        first = random.Random(f"{self._seed}/{number}").randrange(self._vocabulary)
        tokens = [(first + place) % self._vocabulary for place in range(self._length)]
        return SourceItem(f"{first}@{number}", {"first": first}, {"packed_input_ids": tokens})

    def record(self, results: Sequence[SampleResult]) -> None:
        """Ignore what became of the samples; a curriculum would learn from it what to draw next."""
        del results

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides the next draw."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was made."""
        self._drawn = int(state["drawn"])

    def stats(self) -> dict[str, float]:
        """Return the numbers that every step logs as ``source/<name>``."""
        return {"drawn": float(self._drawn)}
