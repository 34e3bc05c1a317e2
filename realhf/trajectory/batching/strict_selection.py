"""Implements the original's packing rule: packs of the largest size in the queue, in the order of their completion.

It can jam when sizes are not powers of two; ``strict`` accepts that. Source: docs/reference/trajectory.md 3.3 (first
paragraph), 3.4, 3.12.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

from realhf.trajectory.batching.fair_share import FairShare, Ledger
from realhf.trajectory.batching.minimum_selection import Minimums, needs
from realhf.trajectory.batching.packs import FairDraw, NotSelected, Pack, Selected, chunks
from realhf.trajectory.batching.queue_index import Lane, QueueIndex, Unit


def select_strict(index: QueueIndex, batch_size: int, fair: FairShare) -> Selected | NotSelected:
    """Select groups of packs of any environments until their sizes sum to the batch; if they overshoot, there is no
    batch. With no shares in ``fair`` that is the order of arrival."""
    if index.sequences < batch_size:
        return NotSelected("not_enough_sequences" if index.groups else "empty")
    largest, by_size = index.max_group_size(), {}
    for (_, size), lane in index.lanes.items():
        if size and largest % size == 0:
            by_size.setdefault(size, []).append(lane)
    sources = [chunks(_merged(lanes), largest // size) for size, lanes in by_size.items()]
    ledger, chosen, room = Ledger(fair), [], batch_size
    for unit in (unit for pack in _draws(sources, ledger, arrival=not fair.shares) for unit in pack):
        chosen.append(unit)
        room -= unit.size
        if room <= 0:
            break
    return NotSelected("no_complete_packs") if room else _batch(chosen, ledger)


def select_strict_with_minimums(
    index: QueueIndex, batch_size: int, fair: FairShare, minimums: Minimums, *, recheck: bool = False
) -> Selected | NotSelected:
    """Select the minimums from complete packs of each environment, then the queue in order. Groups without an
    environment are not packed."""
    largest, need = index.max_group_size(), needs(batch_size, minimums, "floor")
    lanes = {
        key: lane
        for key, lane in index.lanes.items()
        if key[0] is not None and key[1] and largest % key[1] == 0 and len(lane) >= largest // key[1]
    }
    for env_id in need:
        if not any(env_id == key[0] for key in lanes):
            return NotSelected(f"min_unmet:{env_id}")
    total = sum(need.values())
    if total > batch_size:
        need = {
            env_id: max(min(size for env, size in lanes if env == env_id), wanted * batch_size // total)
            for env_id, wanted in need.items()
        }
    ledger, room = Ledger(fair), batch_size
    chosen: list[Unit] = []
    for env_id, wanted in need.items():
        own = [
            chunks(_complete(lane, largest // size), largest // size)
            for (env, size), lane in lanes.items()
            if env == env_id
        ]
        first, got = len(chosen), 0
        for unit in (unit for pack in _by_completion(own) for unit in pack):
            if got >= wanted or not room:
                break
            if unit.size <= room:
                chosen.append(unit)
                got, room = got + unit.size, room - unit.size
        if recheck and sum(unit.size for unit in chosen[first:]) < wanted:
            return NotSelected(f"min_unmet:{env_id}")
    taken = {unit.order for unit in chosen}
    rest = heapq.merge(
        *(islice(_complete(lane, largest // size), 2 * batch_size // size) for (_, size), lane in lanes.items()),
        key=_order,
    )
    for unit in (unit for unit in rest if unit.order not in taken):
        if not room:
            break
        if unit.size <= room:
            chosen.append(unit)
            room -= unit.size
    for unit in chosen:
        ledger.charge(unit.env_id, unit.size)
    return NotSelected("no_complete_packs") if room else _batch(chosen, ledger)


def _order(unit: Unit) -> int:
    return unit.order


def _merged(lanes: list[Lane]) -> Iterator[Unit]:
    return heapq.merge(*lanes, key=_order)


def _complete(lane: Lane, length: int) -> Iterator[Unit]:
    return islice(lane, len(lane) - len(lane) % length)


def _by_completion(sources: list[Iterator[Pack]]) -> Iterator[Pack]:
    return heapq.merge(*sources, key=lambda pack: pack[-1].order)


def _draws(sources: list[Iterator[Pack]], ledger: Ledger, arrival: bool) -> Iterator[Pack]:
    """Yield packs in the order of completion, or by weight where that row of the strict switch was set alone."""
    if arrival:
        for pack in _by_completion(sources):
            for unit in pack:
                ledger.charge(unit.env_id, unit.size)
            yield pack
        return
    draw = FairDraw(ledger)
    for source in sources:
        draw.offer(source)
    for pack, source in takewhile(bool, iter(draw.draw, None)):
        draw.charge(pack)
        draw.offer(source)
        yield pack


def _batch(units: Iterable[Unit], ledger: Ledger) -> Selected:
    return Selected([member for unit in units for member in unit.members], ledger.served, ledger.times, ledger.clock)
