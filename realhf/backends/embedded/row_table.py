"""Records which cache row belongs to which slot, and which tokens each row holds. Plain numpy, no model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

IntArray = np.ndarray

_MIN_DONATED = 8
"""Least number of tokens worth copying from another row; for fewer computing them is cheaper."""
_MAX_LEVELS = 3
"""Number of levels of items: a row may copy from one that itself waits for another, but not further."""


@dataclass(frozen=True)
class PrefillItem:
    """Plans how ``row`` is filled: it takes its first ``start`` tokens from the cache (from row ``donor`` if that is
    another row) and computes the rest, after all items of lower ``level``."""

    row: int
    start: int
    donor: int
    level: int


class RowTable:
    """Keeps the books of cache rows. Of ``tokens`` int64 (rows, columns), the first ``lengths`` int64 (rows,) are
    cached. ``max_rows`` bounds the rows; slots that wait longest for their next turn lose theirs."""

    def __init__(self, max_rows: int | None = None) -> None:
        self.tokens: IntArray = np.full((0, 0), -1, dtype=np.int64)
        self.lengths: IntArray = np.zeros(0, dtype=np.int64)
        self.max_rows = max_rows
        self._row_of_slot: dict[int, int] = {}  # in the order of use, the least recent first

    @property
    def slots(self) -> dict[int, int]:
        """Return the row of every slot (a copy)."""
        return dict(self._row_of_slot)

    def row_of(self, slot: int) -> int:
        """Return the row of a slot. Raises KeyError on a slot without a row."""
        return self._row_of_slot[slot]

    def free(self, slots: Collection[int] | None) -> None:
        """Forget these slots (all when None); an unknown slot is fine."""
        for slot in self.slots if slots is None else slots:
            row = self._row_of_slot.pop(slot, None)
            if row is not None:
                self.lengths[row] = 0

    def forget_tokens(self) -> None:
        """Forget what is cached; slots keep their rows."""
        self.lengths[:] = 0

    def resize(self, rows: int, columns: int) -> None:
        """Enlarge the table to that many rows and columns; what it holds stays."""
        if self.tokens.shape == (rows, columns):
            return
        old, lengths = self.tokens, self.lengths
        self.tokens = np.full((rows, columns), -1, dtype=np.int64)
        self.tokens[: old.shape[0], : old.shape[1]] = old
        self.lengths = np.zeros(rows, dtype=np.int64)
        self.lengths[: len(lengths)] = lengths

    def seat(self, slots: Sequence[int], busy: Collection[int]) -> list[int]:
        """Return rows for these slots, or for the first of them if there are not enough.

        A slot keeps its own row, else it gets the first that is free, else that of the slot not in ``busy`` (nor in
        ``slots``) which was used least recently. A row may lie beyond the table: ``resize`` it then.
        """
        held = self._row_of_slot
        taken, kept = set(held.values()), {*busy, *slots}
        idle = iter([slot for slot in held if slot not in kept])
        rows, lowest = [], 0
        for slot in slots:
            row = held.pop(slot, None)
            if row is None:
                while lowest in taken:
                    lowest += 1
                if self.max_rows is None or lowest < self.max_rows:
                    row = lowest
                elif (victim := next(idle, None)) is not None:
                    row = held.pop(victim)
                else:
                    break
                taken.add(row)
                if row < len(self.lengths):
                    self.lengths[row] = 0
            held[slot] = row
            rows.append(row)
        return rows

    def compact(self, live: Collection[int]) -> tuple[list[int], list[int]]:
        """Bring the rows ``live`` to the front. Return (source, target) rows of the contents to copy, all at once."""
        slot_of = {row: slot for slot, row in self._row_of_slot.items()}
        holes = [row for row in range(len(live)) if row not in live]
        far = sorted(row for row in live if row >= len(live))
        source, target = [*far], [*holes]
        for hole, row in zip(holes, far, strict=True):
            if hole in slot_of:
                source.append(hole)
                target.append(row)
        self.tokens[target], self.lengths[target] = self.tokens[source], self.lengths[source]
        self.lengths[[row for row in far if row not in target]] = 0
        for old, new in zip(source, target, strict=True):
            self._row_of_slot[slot_of[old]] = new
        return source, target

    def plan(self, row: int, prefix: IntArray, planned: Mapping[int, PrefillItem]) -> PrefillItem:
        """Plan how ``row`` comes to hold ``prefix`` (int64, at least one token), and record the prefix as the row's
        tokens.

        The last token is always computed, since its logits are needed; when only the last is missing, it does not count
        as cached yet.

        A row without a useful prefix of its own copies one from another row: rollouts of one group share their prompt,
        and all tasks share the system text. ``planned``: the items of the same batch so far. Items of level 0 copy
        before anything is computed, so a row that is planned later still is a donor.
        """
        last = len(prefix) - 1
        start, donor, level = min(self._common(row, prefix), last), row, 0
        if start < last:
            shared = self._common_all(prefix)
            shared[[r for r, item in planned.items() if item.level + 1 >= _MAX_LEVELS]] = 0
            best = int(shared.argmax())
            gain = min(int(shared[best]), last)
            if gain >= start + _MIN_DONATED:
                start, donor = gain, best
                level = planned[best].level + 1 if best in planned else 0
        self.tokens[row, : len(prefix)] = prefix
        self.lengths[row] = last if start == last else len(prefix)
        return PrefillItem(row, start, donor, level)

    def _common(self, row: int, prefix: IntArray) -> int:
        n = min(int(self.lengths[row]), len(prefix))
        differs = self.tokens[row, :n] != prefix[:n]
        return int(differs.argmax()) if differs.any() else n

    def _common_all(self, prefix: IntArray) -> IntArray:
        """Return the length of the common prefix with each row, int64 (rows,)."""
        same = self.tokens[:, : len(prefix)] == prefix
        run = np.where(same.all(1), same.shape[1], (~same).argmax(1))
        return np.minimum(run, self.lengths)
