"""Calls as a Python list of calls: LFM2, and Llama with a template for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from realhf.api.tool_syntax.arguments import (
    parameter_schemas,
    parse_argument,
    schema_kinds,
    tool_names,
)
from realhf.api.tool_syntax.calls import (
    MAX_CALLS,
    NAME,
    TEXT_FOLLOWS,
    CallProblem,
    NamedCalls,
    ParsedTurn,
    ToolCall,
    Tools,
    build_call,
    check_name,
    malformed_call,
    surplus_call,
)
from realhf.api.tool_syntax.json_values import (
    build_object,
    check_value,
    skip_space,
    write_json,
)
from realhf.api.tool_syntax.nested_values import read_items, read_nested, read_pair, read_word
from realhf.api.tool_syntax.tags import Tags, parse_untagged_calls

_TAGS = Tags(call="<|tool_call_start|>", call_end="<|tool_call_end|>")
_WRAPPING = ("<|python_start|>", "<|python_end|>")
"""Words in which Llama 4 may wrap its calls."""
_LIST_START = re.compile(rf"\[\s*({NAME})\((\s*[^\W\d]\w*\s*=)?")
"""The start of a list of calls: the name of the first one, and that of its argument if there is one."""
_CALL = re.compile(rf"({NAME})\(")
_KEY = re.compile(r"[^\W\d]\w*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"' + r"|'[^'\\]*(?:\\.[^'\\]*)*'", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {
    "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "", "/": "/",
}  # fmt: skip
_CONSTANTS = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
find_reasoning_end = _TAGS.find_reasoning_end
"""Function that finds where the words after the leading reasoning of a turn begin."""


def parse(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn. A list of calls is the whole turn, or stands between tags. Strings become the
    type of the schema in ``tools`` if it allows no strings. Never raises."""
    if _TAGS.call in text:
        return _TAGS.parse(text, partial(_read_tagged, tools=tools))
    return parse_untagged_calls(text, partial(_parse_whole, tools=tools))


def _parse_whole(content: str, tools: Tools) -> list[ToolCall]:
    """Return the calls of a turn without reasoning; [] if it does not look like a list of calls.

    A list that cannot be parsed is one if it begins with a declared tool, an argument with a name,
    or the control word before calls.
    """
    outer = content.strip()
    words = outer.removeprefix(_WRAPPING[0]).removesuffix(_WRAPPING[1]).strip()
    start = _LIST_START.match(words)
    if start is None:
        return []
    calls, end, problem = _read_list(words, 0, 0, tools)
    if not problem and end < len(words):
        problem = TEXT_FOLLOWS
    # Prose may begin like a call of something that is no tool: [see(1)].
    is_meant = outer != words or start[2] or start[1] in tool_names(tools)
    if problem and not is_meant and len(calls) < MAX_CALLS:
        return []
    return [*calls, malformed_call(problem, words[end:], len(calls))] if problem else calls


def write(calls: NamedCalls) -> str:
    """Write calls as Python code. Raises CallProblem."""
    return _write(calls, repr)


def write_tagged(calls: NamedCalls) -> str:
    """Write calls as LFM2 does: between tags, strings without escapes, objects as JSON. Raises
    CallProblem."""
    return f"{_TAGS.call}{_write(calls, _write_unescaped)}{_TAGS.call_end}"


def _write(calls: NamedCalls, write_value: Callable[[Any], str]) -> str:
    written = []
    for name, arguments in calls:
        check_name(name)
        if wrong := [key for key in arguments if not _KEY.fullmatch(key)]:
            raise CallProblem(f"the parameter {wrong[0][:64]!r} cannot be written")
        pairs = (f"{key}={write_value(value)}" for key, value in arguments.items())
        written.append(f"{name}({', '.join(pairs)})")
    return f"[{', '.join(written)}]"


def _write_unescaped(value: Any) -> str:
    if isinstance(value, str):
        if "'" in value or "\\" in value:
            raise CallProblem("a string holds a quote or a backslash, for which there is no escape")
        return f"'{value}'"
    return write_json(value) if isinstance(value, dict) else str(value)


def _read_tagged(text: str, start: int, number: int, *, tools: Tools) -> tuple[list[ToolCall], int]:
    """Parse the calls between two tags; see ``ReadCall``."""
    place = skip_space(text, start)
    calls, end, problem = _read_list(text, place, number, tools)
    end = skip_space(text, end)
    if not problem and not text.startswith(_TAGS.call_end, end):
        problem = f"{_TAGS.call_end} does not follow the calls"
    if not problem:
        return calls, end + len(_TAGS.call_end)
    malformed, place = _TAGS.read_malformed(problem, text, start, number + len(calls))
    return [*calls, *malformed], place


def _read_list(text: str, start: int, number: int, tools: Tools) -> tuple[list[ToolCall], int, str]:
    """Parse a list of calls; return them, the position after the list, and "".

    If something cannot be parsed, return the calls before it, its position, and the problem.
    """
    calls: list[ToolCall] = []
    if not text.startswith("[", start):
        return calls, start, "no list of calls"
    place = skip_space(text, start + 1)
    while not text.startswith("]", place):
        if number + len(calls) >= MAX_CALLS:
            return calls, place, surplus_call("", 0).problem
        try:
            (name, arguments), end = _read_call(text, place, tools)
        except CallProblem as error:
            return calls, place, str(error)
        value = {"name": name, "arguments": arguments}
        position = number + len(calls)
        calls.append(build_call(value, text[place:end], position, arguments_key="arguments"))
        place = skip_space(text, end)
        if text.startswith(",", place):
            place = skip_space(text, place + 1)
        elif not text.startswith("]", place):
            return calls, place, "neither ',' nor ']' follows a call"
    return calls, place + 1, "" if calls else "the list holds no call"


def _read_call(text: str, start: int, tools: Tools) -> tuple[tuple[str, dict[str, Any]], int]:
    """Parse a call; see ``nested_values.Read``."""
    head = _CALL.match(text, start)
    if head is None:
        raise CallProblem(f"no call at character {start}")
    pairs, end = read_items(
        text,
        head.end(),
        ")",
        lambda text, place: read_pair(text, place, "=", _read_key, _read_value),
    )
    types = parameter_schemas(head[1], tools)
    arguments = {key: _convert(value, key, types) for key, value in build_object(pairs).items()}
    check_value(arguments)
    return (head[1], arguments), end


def _convert(value: Any, key: str, types: Mapping[str, Any]) -> Any:
    """Return an argument; a string is parsed if the schema allows no string. Raises CallProblem."""
    kinds = schema_kinds(types.get(key))
    if isinstance(value, str) and kinds and "string" not in kinds:
        return parse_argument(value, key, types)
    return value


def _read_value(text: str, start: int) -> tuple[Any, int]:
    return read_nested(text, start, _read_scalar, _read_string)


def _read_key(text: str, start: int) -> tuple[str, int]:
    """Parse the name of an argument; see ``nested_values.Read``."""
    match = _KEY.match(text, start)
    if match is None:
        raise CallProblem(f"no argument with a name at character {start}")
    return match[0], match.end()


def _read_scalar(text: str, start: int) -> tuple[Any, int]:
    """Parse a string, a number or a constant; see ``nested_values.Read``."""
    if text[start : start + 1] in ("'", '"'):
        return _read_string(text, start)
    return read_word(text, start, _CONSTANTS)


def _read_string(text: str, start: int) -> tuple[str, int]:
    """Parse a string, which may contain line breaks; see ``nested_values.Read``."""
    match = _STRING.match(text, start)
    if match is None:
        raise CallProblem(f"no string that is closed at character {start}")
    return _ESCAPE.sub(_replace_escape, match[0][1:-1]), match.end()


def _replace_escape(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    if digits is None:
        return _ESCAPED.get(match[4], match[0])
    code = int(digits, 16)
    return chr(code) if code <= 0x10FFFF else match[0]
