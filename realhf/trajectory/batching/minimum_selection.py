"""Forms a batch in which environments get their minimum allocations.

Source: docs/reference/trajectory.md 3.4.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil, floor, lcm

from realhf.trajectory.batching.exact_selection import unservable
from realhf.trajectory.batching.fair_share import FairShare, Ledger
from realhf.trajectory.batching.packs import FairDraw, NotSelected, Pack, Selected, delivered
from realhf.trajectory.batching.queue_index import QueueIndex, Unit

Minimums = Sequence[tuple[int, float]]
Lanes = dict[int | None, dict[int, list[Unit]]]


def select_with_minimums(
    index: QueueIndex,
    batch_size: int,
    fair: FairShare,
    minimums: Minimums,
    *,
    rounding: str = "floor",
    recheck: bool = True,
) -> Selected | NotSelected:
    """Select the minimums first, in order of registration, then fill the batch by weight from all environments.

    ``minimums``: (env_id, fraction of the batch). While no batch results, it tries again without the largest size; when
    all fail, the first reason is returned.
    """
    sizes = sorted({size for _, size in index.lanes if unservable(size, batch_size, strict=False) is None})
    if index.sequences < batch_size:
        return NotSelected("not_enough_sequences" if index.groups else "empty")
    first: NotSelected | None = None
    while sizes:
        attempt = _Attempt(batch_size, Ledger(fair), _packable(index, sizes, batch_size))
        result = attempt.run(needs(batch_size, minimums, rounding), recheck)
        if isinstance(result, Selected):
            return result
        first = first or result
        sizes.pop()
    return first or NotSelected("no_complete_packs")


def needs(batch_size: int, minimums: Minimums, rounding: str) -> dict[int, int]:
    """Return how many sequences each environment must get, where that is more than 0."""
    found = {}
    for env_id, allocation in minimums:
        exact = batch_size * allocation
        need = floor(exact + 1e-9) if rounding == "floor" else ceil(exact - 1e-9)
        if need > 0:
            found[env_id] = need
    return found


def _packable(index: QueueIndex, sizes: Sequence[int], batch_size: int) -> Lanes:
    """Return units in complete packs of one environment, by environment and size, oldest first; no more than a batch
    can hold of each."""
    unit, lanes = lcm(*sizes), {}
    for (env_id, size), lane in index.lanes.items():
        if size in sizes:
            complete = len(lane) - len(lane) % (unit // size)
            if complete:
                taken = min(complete, batch_size // size)
                lanes.setdefault(env_id, {})[size] = list(islice(lane, taken))
    return lanes


@dataclass
class _Attempt:
    """Makes one try with one set of sizes. ``lanes`` shrink as units are chosen; ``left`` counts, by size, the units
    that are not chosen yet."""

    batch_size: int
    ledger: Ledger
    lanes: Lanes
    chosen: list[Pack] = field(default_factory=list)
    taken: dict[int | None, int] = field(default_factory=dict)
    room: int = field(init=False)
    left: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.room = self.batch_size
        for lanes in self.lanes.values():
            for size, units in lanes.items():
                self.left[size] += len(units)

    def run(self, need: dict[int, int], recheck: bool) -> Selected | NotSelected:
        """Take the minimum of every environment in ``need``, then fill up the batch."""
        for env_id in need:
            if env_id not in self.lanes:
                return NotSelected(f"min_unmet:{env_id}")
        need = self._scaled(need)
        later = sum(need.values())
        for env_id, wanted in need.items():
            later -= wanted
            self._take_minimum(env_id, wanted, later)
        self._fill()
        short = next((env_id for env_id, wanted in need.items() if self.taken.get(env_id, 0) < wanted), None)
        if short is not None and recheck:
            return NotSelected(f"min_unmet:{short}")
        return NotSelected("no_complete_packs") if self.room else delivered(self.chosen, self.ledger)

    def _scaled(self, need: dict[int, int]) -> dict[int, int]:
        total = sum(need.values())
        if total <= self.batch_size:
            return need
        return {
            env_id: max(min(self.lanes[env_id]), wanted * self.batch_size // total) for env_id, wanted in need.items()
        }

    def _take_minimum(self, env_id: int, wanted: int, later: int) -> None:
        """Choose the oldest units of one environment until it has its minimum; ``later`` sequences stay free for the
        others."""
        lanes = self.lanes[env_id]
        heads = [(units[0].order, size, 0) for size, units in lanes.items()]
        heapq.heapify(heads)
        used = dict.fromkeys(lanes, 0)
        while heads and self.taken.get(env_id, 0) < wanted:
            _, size, position = heapq.heappop(heads)
            if self.room - size < later or not self._fillable(size):
                continue
            self._choose([lanes[size][position]])
            used[size] = position + 1
            if position + 1 < len(lanes[size]):
                heapq.heappush(heads, (lanes[size][position + 1].order, size, position + 1))
        for size, number in used.items():
            del lanes[size][:number]

    def _fill(self) -> None:
        """Choose the rest of the batch by weight, from all units that can still be packed."""
        draw = FairDraw(self.ledger)
        for lanes in self.lanes.values():
            for units in lanes.values():
                draw.offer(_single(units))
        while self.room and (drawn := draw.draw()):
            pack, source = drawn
            if not self._fillable(pack[0].size):
                draw.skip(pack)
                continue
            draw.charge(pack)
            self._choose(pack, charge=False)
            draw.offer(source)

    def _fillable(self, size: int) -> bool:
        """Return whether the units left can fill the room exactly once a unit of this size is taken."""
        room = self.room - size
        if room < 0:
            return False
        left = dict(self.left)
        left[size] -= 1
        smallest = min(left)
        if room % smallest == 0 and left[smallest] * smallest >= room:
            return True
        reachable, mask = 1, (1 << (room + 1)) - 1
        for other, number in left.items():
            step = 1
            while number > 0:
                step = min(step, number)
                reachable |= reachable << (other * step) & mask
                number, step = number - step, step * 2
        return bool(reachable >> room & 1)

    def _choose(self, pack: Pack, charge: bool = True) -> None:
        for unit in pack:
            self.left[unit.size] -= 1
            if charge:
                self.ledger.charge(unit.env_id, unit.size)
            self.room -= unit.size
            self.taken[unit.env_id] = self.taken.get(unit.env_id, 0) + unit.size
        self.chosen.append(pack)


def _single(units: Sequence[Unit]) -> Iterator[Pack]:
    return ([unit] for unit in units)
