"""Reads what the policy says, and writes what it reads: statements, answers, results as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from realhf.environments.sql.database import Result

_FENCE = re.compile(r"```[ \t]*(?:sqlite|sql)?[ \t]*\r?\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r"\s*answer[ \t]*:(.*)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?")
_TOLERANCE = 1e-6


def read_answer(content: str) -> str | None:
    """Return VALUE if the last line that is not empty is ``answer: VALUE``, else None."""
    lines = content.strip().splitlines()
    found = _ANSWER.fullmatch(lines[-1]) if lines else None
    return found[1].strip() if found else None


def read_statement(content: str) -> str:
    """Return the SQL of a turn: what stands in its first fence, or all of it; without semicolons at its end."""
    fence = _FENCE.search(content)
    return (fence[1] if fence else content).strip().rstrip("; \t\r\n")


def is_right(given: str, expected: int | str) -> bool:
    """Whether an answer says what is expected: the number, or the text but for case, quotes and a full stop."""
    plain = read_value(given)
    if isinstance(expected, str):
        return plain == expected.casefold()
    return bool(_NUMBER.fullmatch(plain)) and abs(float(plain) - expected) <= _TOLERANCE


def read_value(given: str) -> str:
    """Return the value that an answer means, in the only spelling of it: without quotes and a full stop, in lower case,
    and a whole number without its zeros."""
    plain = given.strip().rstrip(".").strip("'\"` ").casefold()
    return f"{float(plain):.0f}" if _NUMBER.fullmatch(plain) and float(plain).is_integer() else plain


def result_text(result: Result, most_chars: int) -> str:
    """Return what a statement did in at most ``most_chars`` characters: rows, one a line with | between the values;
    how many rows it changed; or its error."""
    if result.error:
        return shorten(f"error: {_printable(result.error)}", most_chars)
    if result.changed is not None and not result.rows:
        return f"ok, {result.changed} row{'' if result.changed == 1 else 's'} changed"
    lines = [row_text(row) for row in result.rows]
    return shorten("\n".join([*lines, *(["more rows"] if result.more else [])]) or "no rows", most_chars)


def row_text(row: Iterable[Any]) -> str:
    """Return the values of a row with | between them."""
    return "|".join(map(_value_text, row))


def shorten(text: str, most_chars: int) -> str:
    """Return the text, or its beginning with dots when it is longer than ``most_chars`` (at least 3)."""
    return text if len(text) <= most_chars else f"{text[: most_chars - 3]}..."


def _value_text(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if isinstance(value, float):
        return f"{value:.10g}" if math.isfinite(value) else ("Inf" if value > 0 else "-Inf")
    return _printable(str(value))


def _printable(characters: Iterable[str]) -> str:
    """Return the text with a space for every character that cannot be printed, so that a row stays a line."""
    return "".join(character if character.isprintable() else " " for character in characters)
