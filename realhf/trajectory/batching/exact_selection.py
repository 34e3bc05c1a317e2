"""Forms a batch of exactly ``batch_size`` sequences from groups of any sizes that divide it, without jams.

Source: docs/reference/trajectory.md 3.3.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import repeat
from math import lcm

from realhf.trajectory.batching.fair_share import FairShare, Ledger
from realhf.trajectory.batching.packs import FairDraw, NotSelected, Pack, Selected, chunks, delivered
from realhf.trajectory.batching.queue_index import Lane, QueueIndex


def unservable(size: int, batch_size: int, strict: bool) -> str | None:
    """Return why a unit of ``size`` sequences can never be part of a batch, or None if it can."""
    if size < 1:
        return "zero_sequences"
    if batch_size < 1:
        return None
    if size > batch_size:
        return "larger_than_batch"
    return "size_does_not_divide_batch" if batch_size % size and not strict else None


def select_exact(index: QueueIndex, batch_size: int, fair: FairShare) -> Selected | NotSelected:
    """Select packs whose length is the least common multiple of the sizes present. While these do not suffice, try
    again without the largest size, so that a large group never blocks the others."""
    by_size: dict[int, list[Lane]] = {}
    for (_, size), lane in index.lanes.items():
        if unservable(size, batch_size, strict=False) is None:
            by_size.setdefault(size, []).append(lane)
    sizes = sorted(by_size)
    if sum(size * len(lane) for size in sizes for lane in by_size[size]) < batch_size:
        return NotSelected("not_enough_sequences" if index.groups else "empty")
    while sizes:
        unit = lcm(*sizes)
        if sum(sum(map(len, by_size[size])) // (unit // size) for size in sizes) * unit >= batch_size:
            sources = (source for size in sizes for source in _sources(by_size[size], unit // size))
            return _draw(sources, batch_size // unit, Ledger(fair))
        sizes.pop()
    return NotSelected("no_complete_packs")


def _sources(lanes: Sequence[Lane], length: int) -> Iterator[Iterator[Pack]]:
    """Yield packs of single environments, then shared packs of what is left over of several."""
    left = []
    for lane in lanes:
        own, rest = divmod(len(lane), length)
        if own:
            yield (pack for pack, _ in zip(chunks(lane, length), repeat(None, own), strict=False))
        left.append((lane, rest))
    if sum(rest for _, rest in left) >= length:
        yield chunks(heapq.merge(*(lane.newest(rest) for lane, rest in left), key=lambda unit: unit.order), length)


def _draw(sources: Iterator[Iterator[Pack]], packs: int, ledger: Ledger) -> Selected:
    draw, chosen = FairDraw(ledger), []
    for source in sources:
        draw.offer(source)
    for _ in range(packs):
        drawn = draw.draw()
        assert drawn is not None, "the packs were counted before"
        pack, source = drawn
        draw.charge(pack)
        draw.offer(source)
        chosen.append(pack)
    return delivered(chosen, ledger)
