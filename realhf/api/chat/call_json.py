"""Reads the JSON of one tool call that a policy wrote. The text is hostile: whatever it is, the answer is a value or
a reason."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from realhf.api.environment import ToolCall

MAX_DEPTH = 32
MAX_NAME_CHARS = 256
_LARGEST = 2**63
_IGNORED = frozenset({"id", "type"})


class CallProblem(ValueError):
    """The policy's JSON is no call; the message says why."""


def read_json(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at ``text[start]`` and the position after it. Raises CallProblem for what is no
    JSON, and for what programs read differently: a repeated key, a number beyond 64 bits, half of a surrogate pair, a
    nesting deeper than ``MAX_DEPTH``."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except CallProblem:
        raise
    except json.JSONDecodeError as error:
        raise CallProblem(f"no JSON: {error.msg} at character {error.pos - start}") from None
    except (RecursionError, ValueError):
        raise CallProblem("no JSON that can be read: too deep, or a number that is too long") from None
    check_value(value)
    return value, end


def check_value(value: Any) -> None:
    """Raise CallProblem for a value of JSON that is nested too deep or holds half of a surrogate pair."""
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


def call_of(value: Any, text: str, position: int, *, arguments_key: str) -> ToolCall:
    """Return the call that a JSON value says, the ``position``-th (from 0) of its turn; ``text`` is what the policy
    wrote. Without the key ``arguments_key`` there are no arguments. What is no call has a ``problem``."""
    name = value.get("name") if isinstance(value, dict) else None
    known_name = name if isinstance(name, str) and len(name) <= MAX_NAME_CHARS else ""
    try:
        arguments = _arguments(value, arguments_key)
    except CallProblem as error:
        return broken_call(str(error), text, position, name=known_name)
    return ToolCall(known_name, arguments, call_id(position), text)


def broken_call(problem: str, text: str, position: int, *, name: str = "") -> ToolCall:
    """Return a call that could not be read, for the reason ``problem``."""
    return ToolCall(name, {}, call_id(position), text, problem)


def call_id(position: int) -> str:
    """Return the id of the ``position``-th call (from 0) of a turn."""
    return f"call_{position}"


def _arguments(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CallProblem(f"a call is a JSON object, not {_kind(value)}")
    name, arguments = value.get("name"), value.get(key, {})
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME_CHARS:
        raise CallProblem(f"the name of a call is a text of 1 to {MAX_NAME_CHARS} characters")
    if unknown := [other for other in value if other not in ("name", key) and other not in _IGNORED]:
        raise CallProblem(f"a call has the keys name and {key}, not {unknown[0][:64]!r}")
    if not isinstance(arguments, dict):
        raise CallProblem(f"{key} are a JSON object, not {_kind(arguments)}")
    return arguments


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CallProblem("a text holds half of a surrogate pair") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise CallProblem(f"the key {twice[:64]!r} is given twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -_LARGEST <= (number := int(digits)) < _LARGEST:
        raise CallProblem("a number does not fit into 64 bits")
    return number


def _number(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise CallProblem("a number does not fit into 64 bits")
    return number


def _constant(word: str) -> float:
    raise CallProblem(f"{word} is no number of JSON")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant
)
