"""Check that values from users' code are plain JSON, and short representations of values for
messages."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any


class _ShortRepr(reprlib.Repr):
    """Formatter that shortens values of any size and depth. Unlike ``repr``, it also accepts very
    large integers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60
        self.maxdict = self.maxlist = self.maxtuple = 4
        self.maxlevel = 2

    def repr_int(self, x: int, level: int) -> str:
        """Return an integer as a string, or its size in bits if it is very large."""
        return (
            f"a number of {x.bit_length()} bits"
            if x.bit_length() > 128
            else super().repr_int(x, level)
        )


def format_value(value: Any) -> str:
    """Return a short representation of a value for a message."""
    return _ShortRepr().repr(value)


MAX_JSON_DEPTH = 64
"""Maximum nesting depth; deeper values are rejected because JSON encoders are recursive."""
MAX_PATH_CHARS = 200
"""Maximum number of characters of the path to a value in messages."""


def json_problem(value: Any) -> str:
    """Return why ``value`` is not valid JSON, with the path of the invalid part; "" if it is valid.

    NaN, infinities and keys that are not strings are invalid.
    """
    waiting: list[tuple[Any, int, Any]] = [(value, 0, None)]
    while waiting:
        item, depth, place = waiting.pop()
        if item is None or isinstance(item, (bool, int)):
            continue
        if isinstance(item, str):
            if not item.isascii() and (problem := _surrogate_problem(item)):
                return problem + _format_path(place)
        elif isinstance(item, float):
            if not math.isfinite(item):
                return f"{item!r} is not JSON{_format_path(place)}"
        elif depth >= MAX_JSON_DEPTH:
            return f"more than {MAX_JSON_DEPTH} lists and maps stand in one another"
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                if not isinstance(key, str):
                    return f"the key {format_value(key)} is not a string, so this is not JSON{_format_path(place)}"
                waiting.append((inner, depth + 1, (place, key)))
        elif isinstance(item, (list, tuple)):
            waiting.extend((inner, depth + 1, (place, number)) for number, inner in enumerate(item))
        else:
            return f"{type(item).__name__} is not JSON{_format_path(place)}: {format_value(item)}"
    return ""


def _format_path(place: Any) -> str:
    """Return the path of an invalid part in the form `` (at ['rows'][2])``. ``place`` is (``place``
    of the container, key), or None for the whole value."""
    path = ""
    while place is not None and len(path) < MAX_PATH_CHARS:
        place, key = place
        path = f"[{format_value(key)}]{path}"
    return f" (at {'...' if place else ''}{path})" if path else ""


def _surrogate_problem(text: str) -> str:
    """Return why a string cannot be encoded as UTF-8; "" if it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"text with {text[error.start]!r}, half a character, is not JSON"
    return ""
