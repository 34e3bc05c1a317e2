"""JSON values in the policy's text, without those that parsers treat differently."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from realhf.api.tool_syntax.calls import CallProblem

MAX_DEPTH = 32
"""Maximum nesting depth of arguments."""
_INTEGER_LIMIT = 2**63
"""Upper limit of integers (exclusive); the lower limit is its negative (inclusive)."""
_SPACE = re.compile(r"\s*")


def skip_space(text: str, start: int) -> int:
    """Return the position after the white space at ``start``."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def read_json(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value that starts at ``text[start]``; return it and the position after it.

    Raises CallProblem for invalid JSON, and for values that JSON parsers treat differently:
    repeated keys, numbers beyond 64 bits, unpaired surrogates, and nesting deeper than
    ``MAX_DEPTH``.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except CallProblem:
        raise
    except json.JSONDecodeError as error:
        raise CallProblem(f"no JSON: {error.msg} at character {error.pos - start}") from None
    except (RecursionError, ValueError):
        raise CallProblem(
            "no JSON that can be read: too deep, or a number that is too long"
        ) from None
    check_value(value)
    return value, end


def write_json(value: Any) -> str:
    """Write a value as the filter ``tojson`` of chat templates does."""
    return json.dumps(value, ensure_ascii=False)


def check_value(value: Any) -> None:
    """Raise CallProblem for a JSON value that is nested too deeply or contains an unpaired
    surrogate."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += [*item, *item.values()]
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and not item.isascii():
                _check_text(item)
        level = below
    if level:
        raise CallProblem(f"nested deeper than {MAX_DEPTH}")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CallProblem("a text holds half of a surrogate pair") from None


def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the keys and values of an object as a dict. Raises CallProblem for a repeated key."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise CallProblem(f"the key {repeated[:64]!r} is given twice")
    return result


def _parse_integer(digits: str) -> int:
    """Parse an integer. Raises CallProblem if it needs more than 64 bits."""
    if len(digits) > 20 or not -_INTEGER_LIMIT <= (number := int(digits)) < _INTEGER_LIMIT:
        raise CallProblem("a number does not fit into 64 bits")
    return number


def _parse_number(digits: str) -> float:
    """Parse a float. Raises CallProblem if it is not finite."""
    if not math.isfinite(number := float(digits)):
        raise CallProblem("a number does not fit into 64 bits")
    return number


def _reject_constant(word: str) -> float:
    """Raise CallProblem for NaN and infinities."""
    raise CallProblem(f"{word} is not a JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=build_object,
    parse_int=_parse_integer,
    parse_float=_parse_number,
    parse_constant=_reject_constant,
)
