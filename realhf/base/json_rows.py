"""Reads rows from JSON lines that users bring, each with the place where it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from realhf.base.json_values import json_problem, shown

LONGEST_LINE = 16 << 20
_MARK = b"\xef\xbb\xbf"
"""The byte order mark, which some editors put at the beginning of a file."""


class Row(NamedTuple):
    """A row of a data set and where it stands: ``tasks.jsonl, line 3``."""

    values: Mapping[str, Any]
    where: str


def read_json_lines(file: Path) -> Iterator[Row]:
    """Yield the rows of a file; lines that are blank are none. Raises OSError, and ValueError that
    names file and line for what is no JSON object."""
    for number, text in _lines(file):
        where = f"{file}, line {number}"
        try:
            values = json.loads(text.decode("utf-8"), parse_constant=_no_json)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        yield checked_row(values, where)


def count_json_lines(file: Path) -> int:
    """Return how many rows ``read_json_lines`` finds, without reading what they say."""
    return sum(1 for _ in _lines(file))


def checked_row(values: Any, where: str) -> Row:
    """Return a row. Raises ValueError that begins with ``where`` for what is no map of plain
    JSON."""
    if not isinstance(values, dict):
        raise ValueError(f"{where}: a row is a map from columns to values, not {shown(values)}")
    if problem := json_problem(values):
        raise ValueError(f"{where}: {problem}")
    return Row(values, where)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if len(line) > LONGEST_LINE:
                raise ValueError(f"{file}, line {number}: longer than {LONGEST_LINE >> 20} MiB")
            if text := line.removeprefix(_MARK).strip():
                yield number, text


def _no_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
