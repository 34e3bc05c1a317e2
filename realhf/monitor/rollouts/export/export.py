"""Writes the rollouts of a run for other programs: JSON lines, a Parquet table, or logs that Inspect opens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

from realhf.base.files.whole_file import whole_file
from realhf.monitor.rollouts.export.inspect_log import write_inspect
from realhf.monitor.rollouts.export.parquet import write_parquet
from realhf.monitor.rollouts.export.rows import Exported, flat, records, rows_in_order
from realhf.monitor.rollouts.format import encode_record
from realhf.monitor.rollouts.reader import NoRecord, RolloutStore


class ExportFailed(Exception):
    """The rollouts cannot be exported; the text says why, and what to do."""


def export(run: Path, kind: str, out: Path) -> Exported:
    """Write the rollouts of the folder ``run`` as ``kind`` (one of KINDS) to ``out``: a file, for ``inspect`` a folder
    with a log for the training and one for each evaluation. Files are whole or absent. Raises ExportFailed."""
    if kind not in KINDS:
        raise ExportFailed(f"--to {kind}: unknown (known: {', '.join(KINDS)})")
    store = RolloutStore(run)
    store.refresh()
    if not store.play.lines:
        raise ExportFailed("; ".join(store.problems) or f"{store.folder}: no rollout was kept")
    try:
        return KINDS[kind](store, out)
    except (OSError, ImportError) as error:
        raise ExportFailed(f"{out}: {error}") from error


def write_jsonl(store: RolloutStore, out: Path) -> Exported:
    """Write a JSON object a line for each rollout: what the indexes say (``flat``), ``record`` as it was played and, of
    a share, ``trained``, what the trainer saw of its tokens."""
    counted = Exported()
    with whole_file(out) as partial, partial.open("wb") as file:
        for row, record in records(store, rows_in_order(store), counted):
            line = flat(row) | {"record": record}
            if row.train is not None and row.train.has_tokens:
                try:
                    line["trained"] = store.record(row.train)
                except NoRecord:
                    counted.without_record += 1
            file.write(encode_record(line) + b"\n")
    return counted


KINDS: MappingProxyType[str, Callable[[RolloutStore, Path], Exported]] = MappingProxyType(
    {"jsonl": write_jsonl, "parquet": write_parquet, "inspect": write_inspect}
)
