"""Lists and objects whose scalars and keys are not written as in JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from realhf.api.tool_syntax.calls import CallProblem
from realhf.api.tool_syntax.json_values import MAX_DEPTH, build_object, read_json, skip_space

Read = Callable[[str, int], tuple[Any, int]]
"""Function that parses what starts at a position: (text, position) -> (value, position after it).
It raises CallProblem."""


_WORD = re.compile(r"[A-Za-z0-9+.\-]+")
"""A number, or the name of a constant."""


def read_word(text: str, start: int, constants: Mapping[str, Any]) -> tuple[Any, int]:
    """Parse a number or one of ``constants``, which maps names to values; see ``Read``."""
    match = _WORD.match(text, start)
    if match is None:
        raise CallProblem(f"no value at character {start}")
    if match[0] in constants:
        return constants[match[0]], match.end()
    value, end = read_json(match[0], 0)
    if end != len(match[0]):
        raise CallProblem(f"no value, but {match[0][:64]!r}")
    return value, match.end()


def read_items(text: str, start: int, closing: str, read: Read) -> tuple[list[Any], int]:
    """Parse items that commas separate, up to the character ``closing``; return them and the
    position after it. Raises CallProblem."""
    items: list[Any] = []
    place = skip_space(text, start)
    while not text.startswith(closing, place):
        item, place = read(text, place)
        items.append(item)
        place = skip_space(text, place)
        if text.startswith(",", place):
            place = skip_space(text, place + 1)
        elif not text.startswith(closing, place):
            raise CallProblem(f"neither ',' nor {closing!r} at character {place}")
    return items, place + len(closing)


def read_pair(text: str, start: int, colon: str, read_key: Read, read: Read) -> tuple[Any, int]:
    """Parse a key, the character ``colon`` and a value; see ``Read``."""
    key, place = read_key(text, start)
    place = skip_space(text, place)
    if not text.startswith(colon, place):
        raise CallProblem(f"no {colon!r} after a key at character {place}")
    value, place = read(text, skip_space(text, place + len(colon)))
    return (key, value), place


def read_nested(
    text: str, start: int, read_scalar: Read, read_key: Read, depth: int = 0
) -> tuple[Any, int]:
    """Parse a list ``[...]``, an object ``{key: value}`` or a scalar; see ``Read``.

    Raises CallProblem, also for a repeated key or a value deeper than ``MAX_DEPTH``.
    """
    if depth > MAX_DEPTH:
        raise CallProblem(f"nested deeper than {MAX_DEPTH}")

    def read_inner(text: str, start: int) -> tuple[Any, int]:
        return read_nested(text, start, read_scalar, read_key, depth + 1)

    if text.startswith("[", start):
        return read_items(text, start + 1, "]", read_inner)
    if text.startswith("{", start):
        pairs, end = read_items(
            text,
            start + 1,
            "}",
            lambda text, place: read_pair(text, place, ":", read_key, read_inner),
        )
        return build_object(pairs), end
    return read_scalar(text, start)
