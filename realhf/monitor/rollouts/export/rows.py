"""Turns what a run kept of its rollouts into rows for other programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from realhf.monitor.rollouts.reader import NoRecord, RolloutStore, Row

_OF_PLACE = ("shard", "offset", "bytes", "line", "writer", "has_tokens")
_OF_TRAIN = ("version", "advantage", "ratio_max", "clip_fraction", "mismatch", "n_tokens", "staleness")


@dataclass
class Exported:
    """Counts what an export wrote: ``rollouts``, and how many of them had no readable record (``without_record``)."""

    rollouts: int = 0
    without_record: int = 0


def rows_in_order(store: RolloutStore) -> list[Row]:
    """Return the rollouts that count, in the order in which their records lie on the disk."""
    return sorted(store.rows(), key=lambda row: (row.play.writer, row.play.shard, row.play.offset, row.play.line))


def flat(row: Row) -> dict[str, Any]:
    """Return what the indexes say of a rollout: the fields of its line of ``play``, and those of ``train`` under
    ``train_<name>``, None where it was not trained."""
    found = {name: value for name, value in msgspec.structs.asdict(row.play).items() if name not in _OF_PLACE}
    found["step_trained"] = None if row.train is None else row.train.step
    for name in _OF_TRAIN:
        found[f"train_{name}"] = None if row.train is None else getattr(row.train, name)
    return found


def records(store: RolloutStore, rows: list[Row], counted: Exported) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Yield every row with its record; an empty one where it cannot be read. ``counted`` takes account."""
    for row in rows:
        counted.rollouts += 1
        try:
            yield row, store.record(row.play)
        except NoRecord:
            counted.without_record += 1
            yield row, {}
