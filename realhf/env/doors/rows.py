"""Reads the rows of a data set: JSON lines, a Parquet file, or a folder that ``datasets.save_to_disk`` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from realhf.api.config.option import option
from realhf.api.environment import HELD_OUT, SPLITS, TRAIN, TaskSet
from realhf.env.doors.checks import json_problem
from realhf.env.doors.tasks import GROUP_COLUMN, Row, RowTaskSet, content, shared_row, split_rows, tasks_of_rows
from realhf.env.doors.values import shown

LONGEST_LINE = 16 << 20


@dataclass
class RowOptions:
    """Where the tasks of an environment come from."""

    data: str = option("", "Each row of this JSON lines file, Parquet file or datasets folder is a task.")
    heldout_data: str = option("", "The rows of this file are the held-out tasks; without it they are a part of data.")
    heldout_fraction: float = option(
        0.1, "This part of data is held out, decided by a hash of the row.", at_least=0, at_most=0.9
    )
    group_column: str = option(GROUP_COLUMN, "This column names the group of a task, by which success is reported.")


def idle_options(options: RowOptions) -> str:
    """Say which option has no effect because of the others, "" if each has one."""
    default = RowOptions()
    changed = [each.name for each in fields(RowOptions) if getattr(options, each.name) != getattr(default, each.name)]
    if changed and not options.data:
        return f"env.{changed[0]} has no effect without env.data"
    if options.heldout_data and "heldout_fraction" in changed:
        return "env.heldout_fraction has no effect with env.heldout_data"
    return ""


def tasks_of_data(
    options: RowOptions,
    beside: Path,
    *,
    seeded: bool,
    check: Callable[[Row], None] = lambda row: None,
    key: Callable[[Mapping[str, Any]], Any] = content,
) -> Callable[[str], TaskSet]:
    """Read the files that the options name, and return the task set of a split. ``check`` raises ValueError for a row
    that will not do; rows of one ``key`` are one task. Raises ValueError that names the file and the line."""
    parts = {TRAIN: read_rows(options.data, beside), HELD_OUT: []}
    if options.heldout_data:
        parts[HELD_OUT] = read_rows(options.heldout_data, beside, "heldout_data")
    for row in [*parts[TRAIN], *parts[HELD_OUT]]:
        check(row)
    if not options.heldout_data:
        parts = split_rows(parts[TRAIN], options.heldout_fraction, key)
    elif both := shared_row(parts[TRAIN], parts[HELD_OUT], key):
        raise ValueError(both)
    sets = {split: RowTaskSet(tasks_of_rows(parts[split], options.group_column), seeded=seeded) for split in SPLITS}

    def tasks(split: str) -> TaskSet:
        """Return the tasks of a split. Raises ValueError for one that has none."""
        if not sets[split].group_of:
            raise ValueError(
                f"{options.data} leaves no task for the split {split!r} with env.heldout_fraction="
                f"{options.heldout_fraction:g}: change it, add rows, or name env.heldout_data"
            )
        return sets[split]

    return tasks


def read_rows(path: str, beside: Path, option_name: str = "data") -> list[Row]:
    """Read all rows of a file or folder; a relative path means the working directory, then the folder ``beside``.
    Raises ValueError that names the file and the line for what is missing, unreadable, empty or not JSON."""
    file = Path(path).expanduser()
    if not file.exists() and not file.is_absolute() and (beside / file).exists():
        file = beside / file
    if not file.exists():
        raise ValueError(f"env.{option_name}={path}: there is no such file")
    kinds: Mapping[str, Callable[[Path], Iterable[Row]]] = {".jsonl": _json_lines, ".parquet": _parquet}
    read = _datasets_folder if file.is_dir() else kinds.get(file.suffix)
    if read is None:
        raise ValueError(f"{file}: data is a .jsonl file, a .parquet file or a datasets folder")
    try:
        rows = [*read(file)]
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from None
    if not rows:
        raise ValueError(f"{file}: has no rows")
    return rows


def _json_lines(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            if len(line) > LONGEST_LINE:
                raise ValueError(f"{where}: longer than {LONGEST_LINE >> 20} MiB")
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not text:
                continue
            try:
                values = json.loads(text.decode("utf-8"), parse_constant=_no_json)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON: {error}") from None
            yield _row(values, where)


def _no_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _row(values: Any, where: str) -> Row:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: a row is a map from columns to values, not {shown(values)}")
    if problem := json_problem(values):
        raise ValueError(f"{where}: {problem}")
    return Row(values, where)


def _parquet(file: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(f"{file}: reading Parquet needs the package pyarrow (pip install pyarrow)") from None
    try:
        with parquet.ParquetFile(file) as table:
            rows = (values for batch in table.iter_batches(batch_size=1024) for values in batch.to_pylist())
            for number, values in enumerate(rows, 1):
                yield _row(values, f"{file}, row {number}")
    except ArrowException as error:
        raise ValueError(f"{file}: not a readable Parquet file: {str(error).splitlines()[0]}") from None


def _datasets_folder(folder: Path) -> Sequence[Row]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"{folder}: reading a datasets folder needs the package datasets (pip install datasets)"
        ) from None
    try:
        found = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{folder}: not a datasets folder: {str(error).splitlines()[0]}") from None
    if isinstance(found, datasets.DatasetDict):
        raise ValueError(f"{folder}: holds several splits; name the folder of one: {', '.join(map(repr, found))}")
    return [_row(dict(values), f"{folder}, row {number}") for number, values in enumerate(found, 1)]
