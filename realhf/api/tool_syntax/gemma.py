"""Calls with quoted strings and bare keys between control words: Gemma 4."""

from __future__ import annotations

import re
from typing import Any

from realhf.api.tool_syntax.calls import (
    NAME,
    CallProblem,
    NamedCalls,
    ParsedTurn,
    ToolCall,
    Tools,
    build_call,
    check_name,
)
from realhf.api.tool_syntax.json_values import check_value, skip_space
from realhf.api.tool_syntax.nested_values import read_nested, read_word
from realhf.api.tool_syntax.tags import Tags

_TAGS = Tags("<|channel>thought", "<channel|>", "<|tool_call>", "<tool_call|>")
_QUOTE = '<|"|>'
_HEAD = re.compile(rf"\s*call:({NAME})\s*(?=\{{)")
_KEY = re.compile(r"[^\s:{}\[\],<>|\"](?:[^:{}\[\],<>|\"\n]*[^\s:{}\[\],<>|\"])?")
_CONSTANTS = {"true": True, "false": False, "null": None, "None": None}
find_reasoning_end = _TAGS.find_reasoning_end
"""Function that finds where the words after the leading reasoning of a turn begin."""


def parse(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn. Never raises."""
    del tools
    return _TAGS.parse(text, _read)


def write(calls: NamedCalls) -> str:
    """Write calls. Raises CallProblem for keys and strings that cannot be written: the syntax has
    no escapes."""
    return _write(calls, "null")


def write_none(calls: NamedCalls) -> str:
    """Write calls as the first templates do: null as in Python. Raises CallProblem."""
    return _write(calls, "None")


def _write(calls: NamedCalls, null: str) -> str:
    parts = []
    for name, arguments in calls:
        check_name(name)
        parts.append(
            f"{_TAGS.call}call:{name}{_write_value(dict(arguments), null)}{_TAGS.call_end}"
        )
    return "".join(parts)


def _write_value(value: Any, null: str) -> str:
    if isinstance(value, str):
        if _QUOTE in value:
            raise CallProblem(f"a string holds {_QUOTE}")
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        if wrong := [key for key in value if not _KEY.fullmatch(key)]:
            raise CallProblem(f"the key {wrong[0][:64]!r} cannot be written")
        pairs = sorted(value.items(), key=lambda pair: pair[0].lower())
        return "{" + ",".join(f"{key}:{_write_value(item, null)}" for key, item in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_write_value(item, null) for item in value) + "]"
    return null if value is None else str(value)


def _read(text: str, start: int, number: int) -> tuple[list[ToolCall], int]:
    """Parse a call; see ``ReadCall``."""
    try:
        head = _HEAD.match(text, start)
        if head is None:
            raise CallProblem(f"call:NAME{{...}} does not follow {_TAGS.call}")
        arguments, end = read_nested(text, head.end(), _read_scalar, _read_key)
        end = skip_space(text, end)
        if not text.startswith(_TAGS.call_end, end):
            raise CallProblem(f"{_TAGS.call_end} does not follow the arguments")
        check_value(arguments)
    except CallProblem as error:
        return _TAGS.read_malformed(str(error), text, start, number)
    place = end + len(_TAGS.call_end)
    value = {"name": head[1], "arguments": arguments}
    source = _TAGS.source(text, start, place)
    return [build_call(value, source, number, arguments_key="arguments")], place


def _read_key(text: str, start: int) -> tuple[str, int]:
    """Parse a key, bare or quoted; see ``Read``."""
    if text.startswith(_QUOTE, start):
        return _read_string(text, start)
    match = _KEY.match(text, start)
    if match is None:
        raise CallProblem(f"no key at character {start}")
    return match[0], match.end()


def _read_scalar(text: str, start: int) -> tuple[Any, int]:
    """Parse a string, a number or a constant; see ``Read``."""
    if text.startswith(_QUOTE, start):
        return _read_string(text, start)
    return read_word(text, start, _CONSTANTS)


def _read_string(text: str, start: int) -> tuple[str, int]:
    """Parse a quoted string; see ``Read``."""
    end = text.find(_QUOTE, start + len(_QUOTE))
    if end < 0:
        raise CallProblem("a string is not closed")
    return text[start + len(_QUOTE) : end], end + len(_QUOTE)
