"""Index of the queue by environment and size, so that forming batches and pacing producers do not
scan the queue.

Source: docs/reference/trajectory.md 2.5, 3.3.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from realhf.trajectory.records import GroupRecord


@dataclass(frozen=True, slots=True)
class Bundle:
    """Groups that left the mix buffer together (docs/reference/trajectory.md 3.5)."""

    order: int
    """Order of the first member."""
    size: int
    """Sequences of all members."""
    env_id: int | None
    """Environment of the members."""
    members: tuple[GroupRecord, ...]
    """The groups, oldest first."""


Unit = GroupRecord | Bundle
"""Smallest object that is packed: a single group or a bundle."""


class Lane:
    """Units of one environment and one size, oldest first. Deletion is lazy: a deleted unit is
    skipped, and dropped when it reaches either end or when half of the lane is deleted."""

    __slots__ = ("_dead", "_units")

    def __init__(self) -> None:
        self._units: deque[Unit] = deque()
        self._dead: set[int] = set()

    def __len__(self) -> int:
        return len(self._units) - len(self._dead)

    def __iter__(self) -> Iterator[Unit]:
        return (unit for unit in self._units if unit.order not in self._dead)

    def newest(self, count: int) -> list[Unit]:
        """Return the last ``count`` units, oldest first."""
        backwards = (unit for unit in reversed(self._units) if unit.order not in self._dead)
        return list(islice(backwards, count))[::-1]

    def add(self, unit: Unit) -> None:
        """Insert a unit by its order, which is at the end unless a change is being undone."""
        units = self._units
        if not units or unit.order > units[-1].order:
            units.append(unit)
        elif unit.order < units[0].order:
            units.appendleft(unit)
        else:
            self._units = deque(sorted((*self, unit), key=attrgetter("order")))
            self._dead.clear()

    def discard(self, order: int) -> None:
        """Delete the unit with this order."""
        units = self._units
        dead = self._dead
        dead.add(order)
        while units and units[0].order in dead:
            dead.remove(units.popleft().order)
        while units and units[-1].order in dead:
            dead.remove(units.pop().order)
        if len(dead) > 64 and len(dead) * 2 > len(units):
            self._units = deque(self)
            dead.clear()


class QueueIndex:
    """Index of the queued groups. ``groups``, ``sequences`` and ``nbytes`` are totals.

    Methods cost amortised O(1), except those that return a view by environment, which cost
    O(environments + sizes).
    """

    def __init__(self) -> None:
        self.groups = 0
        self.sequences = 0
        self.nbytes = 0
        self.lanes: dict[tuple[int | None, int], Lane] = {}
        self._sizes: Counter[int] = Counter()
        self._env_sizes: dict[int | None, Counter[int]] = {}
        self._env_sequences: dict[int | None, int] = {}
        self._open: dict[int, list[GroupRecord]] = {}
        self._bundles: dict[int, Bundle] = {}

    def add(self, record: GroupRecord) -> None:
        """Add a group, normally at the tail: its position follows from its order. A bundle becomes
        a unit when its last member is added."""
        self._count(record, 1)
        if record.bundle is None:
            self._lane(record.env_id, record.size).add(record)
            return
        first, members = record.bundle
        held = self._open.setdefault(first, [])
        held.append(record)
        if len(held) == members:
            del self._open[first]
            size = sum(member.size for member in held)
            self._bundles[first] = Bundle(
                first, size, record.env_id, tuple(sorted(held, key=attrgetter("order")))
            )
            self._lane(record.env_id, size).add(self._bundles[first])

    def remove(self, record: GroupRecord) -> None:
        """Remove a group. Removing any member of a bundle dissolves the bundle."""
        self._count(record, -1)
        if record.bundle is None:
            self._discard(record.env_id, record.size, record.order)
            return
        first = record.bundle[0]
        bundle = self._bundles.pop(first, None)
        if bundle is not None:
            self._discard(record.env_id, bundle.size, first)
        elif first in self._open:
            self._open[first].remove(record)
            if not self._open[first]:
                del self._open[first]

    def companions(self, record: GroupRecord) -> list[GroupRecord]:
        """Return the other members of a queued group's bundle."""
        bundle = self._bundles.get(record.bundle[0]) if record.bundle else None
        return [member for member in bundle.members if member.id != record.id] if bundle else []

    def sizes(self) -> KeysView[int]:
        """Return the sizes of the queued groups, in sequences."""
        return self._sizes.keys()

    def max_group_size(self) -> int:
        """Return the largest size of a queued group, in sequences; 0 for an empty queue."""
        return max(self._sizes, default=0)

    def env_max_group(self, env_id: int | None) -> int:
        """Return the largest size of a queued group of one environment; 0 if it has none."""
        return max(self._env_sizes.get(env_id, ()), default=0)

    def env_sequences(self) -> Mapping[int | None, int]:
        """Return the number of queued sequences of each environment that has queued groups."""
        return self._env_sequences

    def env_groups(self) -> dict[int | None, int]:
        """Return the number of queued groups of each environment that has any."""
        return {env_id: sizes.total() for env_id, sizes in self._env_sizes.items()}

    def _lane(self, env_id: int | None, size: int) -> Lane:
        lane = self.lanes.get((env_id, size))
        if lane is None:
            lane = self.lanes[(env_id, size)] = Lane()
        return lane

    def _discard(self, env_id: int | None, size: int, order: int) -> None:
        lane = self.lanes[(env_id, size)]
        lane.discard(order)
        if not len(lane):
            del self.lanes[(env_id, size)]

    def _count(self, record: GroupRecord, sign: int) -> None:
        self.groups += sign
        self.sequences += sign * record.size
        self.nbytes += sign * record.payload.nbytes
        env_sizes = self._env_sizes.setdefault(record.env_id, Counter())
        for sizes in (self._sizes, env_sizes):
            sizes[record.size] += sign
            if not sizes[record.size]:
                del sizes[record.size]
        self._env_sequences[record.env_id] = (
            self._env_sequences.get(record.env_id, 0) + sign * record.size
        )
        if not env_sizes:
            del self._env_sizes[record.env_id], self._env_sequences[record.env_id]
