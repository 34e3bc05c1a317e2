"""Packs: equal units that together make one pack unit, and the order in which they are drawn.

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
    """A batch: ``groups`` in the order of delivery, and what its environments are charged for it."""

    groups: list[GroupRecord]
    served: dict[int | None, int]
    times: dict[int | None, float]
    clock: float


@dataclass(frozen=True)
class NotSelected:
    """Why no batch can be formed: a value of ``X-Batch-Reason``."""

    reason: str


Pack = list[Unit]


def chunks(units: Iterable[Unit], length: int) -> Iterator[Pack]:
    """Complete packs of ``length`` units; an incomplete rest is left out."""
    iterator = iter(units)
    while len(pack := list(islice(iterator, length))) == length:
        yield pack


class FairDraw:
    """Draws the oldest pack of the environment with the smallest time, again and again. Sources yield packs in the
    order of their oldest member; a pack counts for the environment of that member and is charged to each."""

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
        """The next pack and the source it came from, which no longer takes part until it is offered again."""
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
        """The pack goes into the batch."""
        key = self.ledger.key(pack[0].env_id)
        self.ledger.clock = self.ledger.time(key)
        for unit in pack:
            self.ledger.charge(unit.env_id, unit.size)
        self._queue_turn(key)

    def skip(self, pack: Pack) -> None:
        """The pack does not fit: its environment keeps its turn."""
        self._queue_turn(self.ledger.key(pack[0].env_id))

    def _queue_turn(self, key: int | None) -> None:
        """One turn for each environment that has packs; one that was overtaken is not ``_current`` any more."""
        if not (heads := self._heads.get(key)):
            self._current.pop(key, None)
            return
        turn = self.ledger.time(key), heads[0][0]
        if self._current.get(key) != turn:
            self._current[key] = turn
            heapq.heappush(self._turns, (*turn, next(self._ticket), key))


def delivered(packs: list[Pack], ledger: Ledger) -> Selected:
    """The batch of these packs, ordered by their oldest members."""
    packs = sorted(packs, key=lambda pack: pack[0].order)
    groups = [member for pack in packs for unit in pack for member in unit.members]
    return Selected(groups, ledger.served, ledger.times, ledger.clock)
