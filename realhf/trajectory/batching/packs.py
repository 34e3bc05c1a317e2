"""Draws packs in order; a pack is a set of equal units that together make one pack unit.

Source: docs/reference/trajectory.md 3.3, 3.6.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice

from realhf.trajectory.base.records import GroupRecord
from realhf.trajectory.batching.fair_share import Ledger
from realhf.trajectory.batching.queue_index import Unit


@dataclass(frozen=True)
class Selected:
    """Holds a batch: ``groups`` in the order of delivery, and what its environments are charged for it."""

    groups: list[GroupRecord]
    served: dict[int | None, int]
    times: dict[int | None, float]
    clock: float


@dataclass(frozen=True)
class NotSelected:
    """Says why no batch can be formed: ``reason`` is a value of ``X-Batch-Reason``."""

    reason: str


Pack = list[Unit]


def chunks(units: Iterable[Unit], length: int) -> Iterator[Pack]:
    """Yield complete packs of ``length`` units; an incomplete rest is left out."""
    iterator = iter(units)
    while len(pack := list(islice(iterator, length))) == length:
        yield pack


class FairDraw:
    """Draws the oldest pack of the environment with the smallest time, again and again.

    Sources yield packs in the order of their oldest member. A pack takes the turn of that member's environment, and
    each environment is charged for its own members.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._heads: dict[int | None, list[tuple[int, int, Pack, Iterator[Pack]]]] = {}
        self._turns: list[tuple[float, int, int, int | None]] = []
        self._current: dict[int | None, tuple[float, int]] = {}
        self._ticket = count()

    def offer(self, source: Iterator[Pack]) -> None:
        """Let a source take part, from its next pack on."""
        pack = next(source, None)
        if pack is None:
            return
        key = self.ledger.key(pack[0].env_id)
        heads = self._heads.setdefault(key, [])
        heapq.heappush(heads, (pack[0].order, next(self._ticket), pack, source))
        self._queue_turn(key)

    def draw(self) -> tuple[Pack, Iterator[Pack]] | None:
        """Return the next pack and the source it came from, which no longer takes part until it is offered again; None
        when all packs are drawn."""
        while self._turns:
            time, order, _, key = heapq.heappop(self._turns)
            if self._current.get(key) != (time, order):
                continue
            del self._current[key]
            heads = self._heads[key]
            if (time, order) != (self.ledger.time(key), heads[0][0]):
                self._queue_turn(key)
                continue
            _, _, pack, source = heapq.heappop(heads)
            return pack, source
        return None

    def charge(self, pack: Pack) -> None:
        """Take the pack into the batch and charge its environments."""
        key = self.ledger.key(pack[0].env_id)
        self.ledger.clock = self.ledger.time(key)
        for unit in pack:
            self.ledger.charge(unit.env_id, unit.size)
        self._queue_turn(key)

    def skip(self, pack: Pack) -> None:
        """Leave out a pack that does not fit: its environment keeps its turn."""
        self._queue_turn(self.ledger.key(pack[0].env_id))

    def _queue_turn(self, key: int | None) -> None:
        """Queue one turn for each environment that has packs; a turn that was overtaken is not in ``_current`` any
        more."""
        if not (heads := self._heads.get(key)):
            self._current.pop(key, None)
            return
        turn = self.ledger.time(key), heads[0][0]
        if self._current.get(key) != turn:
            self._current[key] = turn
            heapq.heappush(self._turns, (*turn, next(self._ticket), key))


def delivered(packs: list[Pack], ledger: Ledger) -> Selected:
    """Make the batch of these packs, ordered by their oldest members."""
    packs = sorted(packs, key=lambda pack: pack[0].order)
    groups = [member for pack in packs for unit in pack for member in unit.members]
    return Selected(groups, ledger.served, ledger.times, ledger.clock)
