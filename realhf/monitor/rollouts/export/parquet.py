"""Writes rollouts as a Parquet table."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from realhf.base.extras import install_command
from realhf.base.files.whole_file import whole_file
from realhf.monitor.rollouts.export.rows import Exported, flat, records, rows_in_order
from realhf.monitor.rollouts.format import encode_record, readable
from realhf.monitor.rollouts.reader import RolloutStore

_AT_ONCE = 1000
_TYPES = (
    ("string", "id task group env split failure"),
    ("int64", "step version length turns attempt branch step_trained train_version train_n_tokens train_staleness"),
    ("float64", "time reward seconds train_advantage train_ratio_max train_clip_fraction train_mismatch"),
    ("bool_", "success truncated"),
    ("string", "status message messages record"),
)


def write_parquet(store: RolloutStore, out: Path) -> Exported:
    """Write a row for each rollout: what the indexes say (``flat``), ``status`` and ``message``, and as JSON text the
    conversation (``messages``) and the whole ``record``. Raises ImportError without pyarrow."""
    try:
        import pyarrow as arrow  # type: ignore[import-not-found]
        import pyarrow.parquet as parquet  # type: ignore[import-not-found]
    except ImportError:
        raise ImportError(f"pyarrow is not installed: {install_command('parquet')}") from None
    schema = arrow.schema([(name, getattr(arrow, kind)()) for kind, names in _TYPES for name in names.split()])
    counted = Exported()
    found = records(store, rows_in_order(store), counted)
    with whole_file(out) as partial, parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
        while batch := list(islice(found, _AT_ONCE)):
            table = [
                flat(row)
                | {name: _text(record.get(name)) for name in ("status", "message")}
                | {"messages": encode_record(record.get("messages")).decode(), "record": encode_record(record).decode()}
                for row, record in batch
            ]
            writer.write_table(arrow.Table.from_pylist(table, schema))
    return counted


def _text(value: object) -> str | None:
    return readable(value, len(value)) if isinstance(value, str) else None
