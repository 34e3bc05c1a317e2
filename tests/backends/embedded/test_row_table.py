"""Seats of slots in cache rows: contents follow their slot through any sequence of turns."""

from __future__ import annotations

import random

import numpy as np
import pytest

from realhf.backends.embedded.decode_core import RowTable


@pytest.mark.parametrize("max_rows", [None, 12, 9])
def test_contents_follow_their_slot_through_random_turns(max_rows: int | None) -> None:
    rng = random.Random(0)
    table, rows = RowTable(max_rows), np.full(0, -1)
    content: dict[int, int] = {}
    busy: set[int] = set()
    for stamp in range(400):
        busy -= set(rng.sample(sorted(busy), rng.randrange(len(busy) + 1)))
        idle = sorted(set(content) - busy)
        gone = rng.sample(idle, rng.randrange(len(idle) + 1)) if rng.random() < 0.2 else []
        table.free(gone)
        content = {slot: mark for slot, mark in content.items() if slot not in gone}
        waiting = sorted(set(range(14)) - busy)
        batch = rng.sample(waiting, rng.randrange(min(5, len(waiting) + 1)))
        seats = table.seat(batch, busy)
        batch = batch[: len(seats)]
        assert max_rows is None or max(seats, default=0) < max_rows
        assert max_rows is not None or len(seats) == len(batch)
        content = {slot: content.get(slot, -1) for slot in table.slots}
        if len(rows) <= max(seats, default=-1):
            rows = np.concatenate([rows, np.full(max(seats) + 1 - len(rows), -1)])
            table.resize(len(rows), 4)
        for slot, row in zip(batch, seats, strict=True):
            assert table.row_of(slot) == row
            assert table.lengths[row] == (content[slot] >= 0)
            content[slot] = rows[row] = table.tokens[row, 0] = stamp
            table.lengths[row] = 1
        busy |= set(batch)
        if rng.random() < 0.5:
            source, target = table.compact({table.row_of(slot) for slot in busy})
            rows[target] = rows[source]
            assert sorted(table.row_of(slot) for slot in busy) == list(range(len(busy)))
        assert len(set(table.slots.values())) == len(table.slots)
        for slot, row in table.slots.items():
            assert rows[row] == table.tokens[row, 0] == content[slot] and table.lengths[row] == 1
        assert table.lengths.sum() == len(table.slots)


def test_the_slot_that_waits_longest_gives_its_row() -> None:
    table = RowTable(3)
    table.resize(3, 4)
    assert table.seat([10, 11, 12], ()) == [0, 1, 2]
    assert table.seat([10], ()) == [0]
    assert table.seat([13], busy={12}) == [1], "11 is idle, 10 was used since"
    assert sorted(table.slots) == [10, 12, 13]
    assert table.seat([14, 15], busy={10, 12, 13}) == []


def test_nobody_takes_tokens_that_were_forgotten() -> None:
    table = RowTable()
    table.seat([0, 1], ())
    table.resize(2, 32)
    text = np.arange(20)
    assert table.plan(0, text, {}).start == 0
    assert table.plan(1, text, {}).donor == 0
    table.forget_tokens()
    assert table.plan(1, text, {}).donor == 1 and table.plan(1, text, {}).start == 19
