"""Which cache row belongs to which slot, and which tokens each row holds. Plain numpy, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IntArray = np.ndarray

_MIN_DONATED = 8
"""Copying fewer tokens than this from another row costs more than computing them."""
_MAX_LEVELS = 3


@dataclass(frozen=True)
class PrefillItem:
    """``row`` takes its first ``start`` tokens from the cache (from row ``donor`` if that is not itself) and
    computes the rest, after all items of lower ``level``."""

    row: int
    start: int
    donor: int
    level: int


class RowTable:
    """Bookkeeping of cache rows. ``tokens`` int64 (rows, columns), of which ``lengths`` int64 (rows,) are
    cached."""

    def __init__(self) -> None:
        self.tokens: IntArray = np.full((0, 0), -1, dtype=np.int64)
        self.lengths: IntArray = np.zeros(0, dtype=np.int64)
        self._row_of_slot: dict[int, int] = {}

    @property
    def slots(self) -> dict[int, int]:
        """Slot to row (a copy)."""
        return dict(self._row_of_slot)

    def rows_of(self, slots: Sequence[int]) -> list[int]:
        return [self._row_of_slot[slot] for slot in slots]

    def free(self, slots: Sequence[int] | None) -> None:
        """Forget these slots (all when None); an unknown slot is fine."""
        for slot in self.slots if slots is None else slots:
            row = self._row_of_slot.pop(slot, None)
            if row is not None:
                self.lengths[row] = 0

    def resize(self, rows: int, columns: int) -> None:
        if self.tokens.shape == (rows, columns):
            return
        old, lengths = self.tokens, self.lengths
        self.tokens = np.full((rows, columns), -1, dtype=np.int64)
        self.tokens[: old.shape[0], : old.shape[1]] = old
        self.lengths = np.zeros(rows, dtype=np.int64)
        self.lengths[: len(lengths)] = lengths

    def rows_needed(self, slots: Sequence[int]) -> int:
        """Rows that hold these slots and all others that are in use."""
        return len(set(slots) | set(self._row_of_slot))

    def seat(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """Bring ``slots`` into the first len(slots) rows, so that a batch is a plain slice of the cache.

        Returns (source rows, target rows) of the row contents to copy, all at once. The table has room for
        ``rows_needed(slots)`` rows."""
        n, held, wanted = len(slots), self._row_of_slot, set(slots)
        occupant = {row: slot for slot, row in held.items()}
        fresh = [slot for slot in slots if slot not in held]
        movers = [slot for slot in slots if slot not in fresh and held[slot] >= n]
        seats = [row for row in range(n) if occupant.get(row) not in wanted]
        evicted = [occupant[row] for row in seats if row in occupant]
        refuges = [held[slot] for slot in movers]
        refuges += [row for row in range(n, len(self.lengths)) if row not in occupant]
        moves = [*zip(movers, seats, strict=False), *zip(evicted, refuges, strict=False)]
        source, target = [held[slot] for slot, _ in moves], [row for _, row in moves]
        held.update(moves)
        held.update(zip(fresh, seats[len(movers) :], strict=True))
        self._move(source, target)
        in_use = set(held.values()) - {held[slot] for slot in fresh}
        self.lengths[[row for row in range(len(self.lengths)) if row not in in_use]] = 0
        return source, target

    def _move(self, source: list[int], target: list[int]) -> None:
        self.tokens[target] = self.tokens[source]
        self.lengths[target] = self.lengths[source]

    def swap(self, first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
        """Exchange rows pairwise; returns (source, target) for the cache."""
        source, target = first + second, second + first
        renamed = dict(zip(source, target, strict=True))
        self._move(source, target)
        for slot, row in self._row_of_slot.items():
            self._row_of_slot[slot] = renamed.get(row, row)
        return source, target

    def plan_prefill(self, rows: Sequence[int], prefixes: Sequence[IntArray]) -> list[PrefillItem]:
        """How each of ``rows`` comes to hold its prefix (int64, at least one token); the last token is
        always computed, since its logits are needed. Records the prefixes as the rows' tokens.

        A row without a useful prefix of its own copies one from another row: rollouts of one group share
        their prompt, and all tasks share the system text."""
        plan: dict[int, PrefillItem] = {}
        for row, prefix in zip(rows, prefixes, strict=True):
            last = len(prefix) - 1
            start, donor, level = min(self._common(row, prefix), last), row, 0
            if start < last:
                shared = self._common_all(prefix)
                # A row of this batch that is not planned yet will be overwritten: not a donor.
                pending = [r for r in rows if r not in plan]
                shared[pending] = 0
                too_deep = [r for r, item in plan.items() if item.level + 1 >= _MAX_LEVELS]
                shared[too_deep] = 0
                best = int(shared.argmax())
                gain = min(int(shared[best]), last)
                if gain >= start + _MIN_DONATED:
                    start, donor = gain, best
                    level = plan[best].level + 1 if best in plan else 0
            plan[row] = PrefillItem(row, start, donor, level)
            self.tokens[row, : len(prefix)] = prefix
            self.lengths[row] = len(prefix)
        return list(plan.values())

    def _common(self, row: int, prefix: IntArray) -> int:
        n = min(int(self.lengths[row]), len(prefix))
        differs = self.tokens[row, :n] != prefix[:n]
        return int(differs.argmax()) if differs.any() else n

    def _common_all(self, prefix: IntArray) -> IntArray:
        """Common prefix length with what every row holds, int64 (rows,)."""
        same = self.tokens[:, : len(prefix)] == prefix
        run = np.where(same.all(1), same.shape[1], (~same).argmax(1))
        return np.minimum(run, self.lengths)
