"""Reads the logs that W&B keeps offline, so that a resumed run sends no step twice.

A log is a header of 7 bytes, then records in blocks of 32 KiB. Each piece of a record stands behind 7 bytes: a checksum
(4), its length (2) and its kind (1: whole, 2: first, 3: middle, 4: last). A killed process leaves the beginning of a
record at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_HEADER, _PIECE, _BLOCK = 7, 7, 32768
_WHOLE, _FIRST, _LAST = 1, 2, 4
_SYNCED = ".synced"
"""W&B marks a log that was sent by an empty file of its name with this at the end."""
Parse = Callable[[bytes], Any]
"""Turns the bytes of a record into a message of W&B."""


def logs_of(run_dir: Path, run: str) -> list[Path]:
    """Return the offline logs of a run, oldest first."""
    return sorted((run_dir / "wandb").glob(f"offline-run-*-{run}/run-{run}.wandb"))


def taken_back(logs: Sequence[Path], first_step: int, parse: Parse) -> dict[str, set[int]]:
    """Return the steps of each metric that the logs hold, and cut off what they hold from ``first_step`` on, which the
    resumed run makes again. A log that was sent already is left as it is, and so is one that cannot be understood:
    its steps count as lost."""
    kept: dict[str, set[int]] = {}
    for log in logs:
        try:
            found, end = _read(log.read_bytes(), first_step, parse)
            if end is not None and not log.with_name(log.name + _SYNCED).exists():
                os.truncate(log, end)
        except Exception:  # the format is another package's
            continue
        for name, steps in found.items():
            kept.setdefault(name, set()).update(steps)
    return kept


def _read(log: bytes, first_step: int, parse: Parse) -> tuple[dict[str, set[int]], int | None]:
    """Return the steps of each metric, and where the record of the first step to be made again begins."""
    kept: dict[str, set[int]] = {}
    for begin, data in _records(log):
        record = parse(data)
        if not record.HasField("history"):
            continue
        row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "step" not in row:
            continue
        step = json.loads(row["step"])
        if step >= first_step:
            return kept, begin
        for name in row:
            kept.setdefault(name, set()).add(step)
    return kept, None


def _records(log: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield where each whole record begins, and its bytes."""
    at, begin, held = _HEADER, _HEADER, b""
    while at + _PIECE <= len(log):
        left = _BLOCK - at % _BLOCK
        if left < _PIECE:
            at += left
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        if not _WHOLE <= kind <= _LAST or at + _PIECE + size > len(log):
            return
        if kind in (_WHOLE, _FIRST):
            begin, held = at, b""
        held += log[at + _PIECE : at + _PIECE + size]
        if kind in (_WHOLE, _LAST):
            yield begin, held
        at += _PIECE + size
