"""Readers of users' data files, which yield each row with its location for error messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from realhf.base.installation import install_command
from realhf.base.json_values import format_value, json_problem

MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line in bytes."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Byte order mark, which some editors write at the start of a file."""


class Row(NamedTuple):
    """A row of a data set."""

    values: Mapping[str, Any]
    """Values by column."""
    where: str
    """Location for error messages, such as ``tasks.jsonl, line 3``."""


def read_row_file(file: Path, columns: Collection[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a JSON Lines file, a Parquet file or a folder that ``datasets`` has saved.

    ``columns``: the columns that are read; others may hold values that are not JSON, and are None
    in the rows. None reads all columns.

    Raises ValueError that names the file and the line if the data is missing, unreadable or not
    JSON, and for a package that is not installed.
    """
    readers: Mapping[str, Callable[[Path, Collection[str] | None], Iterable[Row]]] = {
        ".jsonl": read_json_lines,
        ".parquet": _read_parquet,
    }
    read = _read_datasets_folder if file.is_dir() else readers.get(file.suffix)
    if read is None:
        raise ValueError(f"{file}: data is a .jsonl file, a .parquet file or a datasets folder")
    try:
        yield from read(file, columns)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from None


def read_json_lines(file: Path, columns: Collection[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a file, skipping blank lines. ``columns``: see ``read_row_file``.

    Raises OSError, and ValueError with file and line for a line that is not a JSON object.
    """
    for number, text in _numbered_lines(file):
        where = f"{file}, line {number}"
        try:
            values = json.loads(
                text.decode("utf-8"), parse_constant=_reject_constant if columns is None else None
            )
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        if columns is not None and isinstance(values, dict):
            values = {key: value if key in columns else None for key, value in values.items()}
        yield check_row(values, where)


def count_json_lines(file: Path) -> int:
    """Return the number of rows that ``read_json_lines`` yields, without parsing them."""
    return sum(1 for _ in _numbered_lines(file))


def check_row(values: Any, where: str) -> Row:
    """Return a ``Row`` with these values. Raises ValueError, prefixed by ``where``, if ``values``
    is not a dict of plain JSON values."""
    if not isinstance(values, dict):
        raise ValueError(
            f"{where}: a row is a map from columns to values, not {format_value(values)}"
        )
    if problem := json_problem(values):
        raise ValueError(f"{where}: {problem}")
    return Row(values, where)


def _read_parquet(file: Path, columns: Collection[str] | None) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"{file}: reading Parquet needs the package pyarrow: {install_command('parquet')}"
        ) from None
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            read = names if columns is None else [name for name in names if name in columns]
            unread = dict.fromkeys(name for name in names if name not in read)
            rows = (
                {**values, **unread}
                for batch in table.iter_batches(batch_size=1024, columns=read or names[:1])
                for values in batch.to_pylist()
            )
            for number, values in enumerate(rows, 1):
                yield check_row(values, f"{file}, row {number}")
    except ArrowException as error:
        raise ValueError(
            f"{file}: not a readable Parquet file: {str(error).splitlines()[0]}"
        ) from None


def _read_datasets_folder(folder: Path, columns: Collection[str] | None) -> Iterator[Row]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"{folder}: reading a datasets folder needs the package datasets (pip install datasets)"
        ) from None
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{folder}: not a datasets folder: {str(error).splitlines()[0]}") from None
    if isinstance(loaded, datasets.DatasetDict):
        raise ValueError(
            f"{folder}: holds several splits; name the folder of one: "
            f"{', '.join(map(repr, loaded))}"
        )
    names = loaded.column_names
    read = names if columns is None else [name for name in names if name in columns]
    unread = dict.fromkeys(name for name in names if name not in read)
    for number, values in enumerate(loaded.select_columns(read or names[:1]), 1):
        yield check_row({**values, **unread}, f"{folder}, row {number}")


def _numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{file}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB")
            if text := line.removeprefix(_BYTE_ORDER_MARK).strip():
                yield number, text


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
