"""Calls as elements with typed parameters: DeepSeek V3.2 and V4."""

from __future__ import annotations

import re
from typing import Any

from realhf.api.tool_syntax.calls import (
    CallProblem,
    NamedCalls,
    ParsedTurn,
    ToolCall,
    Tools,
    build_call,
)
from realhf.api.tool_syntax.json_values import check_value, read_json, skip_space, write_json
from realhf.api.tool_syntax.tags import Tags

_WORD = "｜DSML｜"
_SECTIONS = ("function_calls", "tool_calls")
"""Names of the element around all calls, in V3.2 and in V4."""
_TAGS = Tags(
    call=f"<{_WORD}invoke",
    call_end=f"</{_WORD}invoke>",
    ignored=tuple(f"<{slash}{_WORD}{name}>" for name in _SECTIONS for slash in ("", "/")),
)
_NAME = re.compile(r'\s+name="([^"<>]+)">\s*')
_PARAMETER = re.compile(rf'<{_WORD}parameter name="([^"<>]*)" string="(true|false)">')
_PARAMETER_END = f"</{_WORD}parameter>"
find_reasoning_end = _TAGS.find_reasoning_end
"""Function that finds where the words after the leading reasoning of a turn begin."""


def parse(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn. Never raises."""
    del tools
    return _TAGS.parse(text, _read)


def write(calls: NamedCalls, *, section: str = _SECTIONS[0]) -> str:
    """Write calls as V3.2 does. Raises CallProblem."""
    lines = [f"<{_WORD}{section}>"]
    for name, arguments in calls:
        head = f' name="{name}">'
        if not _NAME.fullmatch(head) or name != name.strip():
            raise CallProblem(f"the name {name[:64]!r} cannot be written")
        lines.append(f"{_TAGS.call}{head}")
        written = [_write_parameter(key, value) for key, value in arguments.items()]
        lines += written or [""]
        lines.append(_TAGS.call_end)
    return "\n".join([*lines, f"</{_WORD}{section}>"])


def write_v4(calls: NamedCalls) -> str:
    """Write calls as V4 does. Raises CallProblem."""
    return write(calls, section=_SECTIONS[1])


def _write_parameter(key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    written = value if is_text else write_json(value)
    opening = f'<{_WORD}parameter name="{key}" string="{"true" if is_text else "false"}">'
    if not _PARAMETER.fullmatch(opening):
        raise CallProblem(f"the parameter {key[:64]!r} cannot be written")
    if _PARAMETER_END in written:
        raise CallProblem(f"the parameter {key[:64]!r} holds {_PARAMETER_END}")
    return f"{opening}{written}{_PARAMETER_END}"


def _read(text: str, start: int, number: int) -> tuple[list[ToolCall], int]:
    """Parse a call; see ``ReadCall``."""
    try:
        name, arguments, end = _read_call(text, start)
    except CallProblem as error:
        return _TAGS.read_malformed(str(error), text, start, number)
    value = {"name": name, "arguments": arguments}
    source = _TAGS.source(text, start, end)
    return [build_call(value, source, number, arguments_key="arguments")], end


def _read_call(text: str, start: int) -> tuple[str, dict[str, Any], int]:
    """Parse the call whose attributes start at ``start``; return (name, arguments, position after
    the closing tag). Raises CallProblem."""
    head = _NAME.match(text, start)
    if head is None:
        raise CallProblem(f'name="..." does not follow {_TAGS.call}')
    arguments: dict[str, Any] = {}
    place = head.end()
    while (match := _PARAMETER.match(text, place)) is not None:
        key = match[1]
        end = text.find(_PARAMETER_END, match.end())
        if end < 0:
            raise CallProblem(f"the parameter {key[:64]!r} is not closed")
        if key in arguments:
            raise CallProblem(f"the parameter {key[:64]!r} is given twice")
        arguments[key] = _read_value(text[match.end() : end], key, match[2] == "true")
        place = skip_space(text, end + len(_PARAMETER_END))
    if not text.startswith(_TAGS.call_end, place):
        raise CallProblem(f"{_TAGS.call_end} does not follow the parameters")
    check_value([head[1], arguments])
    return head[1], arguments, place + len(_TAGS.call_end)


def _read_value(text: str, key: str, is_text: bool) -> Any:
    """Return the value of a parameter. Raises CallProblem."""
    if is_text:
        return text
    words = text.strip()
    try:
        value, end = read_json(words, 0)
    except CallProblem as error:
        raise CallProblem(f"the parameter {key[:64]!r}: {error}") from None
    if end != len(words):
        raise CallProblem(f"the parameter {key[:64]!r}: text follows its value")
    return value
