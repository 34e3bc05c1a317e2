"""Seats of slots in cache rows: contents follow their slot through any sequence of batches."""

from __future__ import annotations

import random

import numpy as np

from realhf.backends.row_table import RowTable


def test_contents_follow_their_slot_through_random_batches() -> None:
    rng = random.Random(0)
    table, rows = RowTable(), np.full(0, -1)
    content: dict[int, int] = {}
    for stamp in range(300):
        if content and rng.random() < 0.3:
            gone = rng.sample(sorted(content), rng.randrange(1, len(content) + 1))
            table.free(gone)
            for slot in gone:
                del content[slot]
        batch = rng.sample(range(12), rng.randrange(1, 9))
        n_rows = max(len(rows), table.rows_needed(batch))
        table.resize(n_rows, 4)
        rows = np.concatenate([rows, np.full(n_rows - len(rows), -1)])
        source, target = table.seat(batch)
        rows[target] = rows[source]
        assert sorted(table.rows_of(batch)) == list(range(len(batch)))
        assert len(set(table.slots.values())) == len(table.slots)
        for slot, row in table.slots.items():
            known = slot in content
            assert (table.lengths[row] == 1) == known
            assert not known or rows[row] == table.tokens[row, 0] == content[slot]
        for slot in batch:
            content[slot] = stamp
            row = table.rows_of([slot])[0]
            rows[row] = table.tokens[row, 0] = stamp
            table.lengths[row] = 1
