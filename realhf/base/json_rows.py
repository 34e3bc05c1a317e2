"""Reader of users' JSON Lines files, which yields each row with its location for error messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

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


def read_json_lines(file: Path) -> Iterator[Row]:
    """Yield the rows of a file, skipping blank lines.

    Raises OSError, and ValueError with file and line for a line that is not a JSON object.
    """
    for number, text in _numbered_lines(file):
        where = f"{file}, line {number}"
        try:
            values = json.loads(text.decode("utf-8"), parse_constant=_reject_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
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


def _numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{file}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB")
            if text := line.removeprefix(_BYTE_ORDER_MARK).strip():
                yield number, text


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
