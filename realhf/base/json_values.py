"""Says of a value that others made whether it is plain JSON, and shows values of any size in
messages about them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any


class _Short(reprlib.Repr):
    """Shortens values of any size and depth; ``repr`` itself refuses to write very large
    numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60
        self.maxdict = self.maxlist = self.maxtuple = 4
        self.maxlevel = 2

    def repr_int(self, x: int, level: int) -> str:
        """A number as such, or its size."""
        return (
            f"a number of {x.bit_length()} bits"
            if x.bit_length() > 128
            else super().repr_int(x, level)
        )


def shown(value: Any) -> str:
    """A short form of any plain value, for a message about it."""
    return _Short().repr(value)


MOST_DEPTH = 64
"""Deeper values are refused: the encoders of JSON are recursive."""
LONGEST_PATH = 200


def json_problem(value: Any) -> str:
    """Why ``value`` is not JSON, and at which place in it; "" if it is JSON. NaN and infinities are
    not, nor are keys that are no text."""
    waiting: list[tuple[Any, int, Any]] = [(value, 0, None)]
    while waiting:
        item, depth, place = waiting.pop()
        if item is None or isinstance(item, (bool, int)):
            continue
        if isinstance(item, str):
            if not item.isascii() and (problem := _surrogate(item)):
                return problem + _at(place)
        elif isinstance(item, float):
            if not math.isfinite(item):
                return f"{item!r} is not JSON{_at(place)}"
        elif depth >= MOST_DEPTH:
            return f"more than {MOST_DEPTH} lists and maps stand in one another"
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                if not isinstance(key, str):
                    return f"the key {shown(key)} is no text, so this is not JSON{_at(place)}"
                waiting.append((inner, depth + 1, (place, key)))
        elif isinstance(item, (list, tuple)):
            waiting.extend((inner, depth + 1, (place, number)) for number, inner in enumerate(item))
        else:
            return f"{type(item).__name__} is not JSON{_at(place)}: {shown(item)}"
    return ""


def _at(place: Any) -> str:
    """`` (at ['rows'][2])`` for keys that are each paired with what they stand in."""
    path = ""
    while place is not None and len(path) < LONGEST_PATH:
        place, key = place
        path = f"[{shown(key)}]{path}"
    return f" (at {'...' if place else ''}{path})" if path else ""


def _surrogate(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"text with {text[error.start]!r}, half a character, is not JSON"
    return ""
