"""Calls as keys and values between tags: GLM 4.5 to 5."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from realhf.api.tool_syntax.arguments import parameter_schemas, parse_argument
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
from realhf.api.tool_syntax.json_values import check_value, skip_space, write_json
from realhf.api.tool_syntax.tags import TOOL_CALL_TAGS

_NAME = re.compile(rf"\s*({NAME})\s*")
_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_VALUE_END = "</arg_value>"


def parse(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn. Types of arguments are taken from the schemas in ``tools``. Never raises."""
    return TOOL_CALL_TAGS.parse(text, partial(_read, tools=tools))


def write_lines(calls: NamedCalls) -> str:
    """Write calls as GLM 4.5 and 4.6 do: a line each for the name, keys and values."""
    return "\n".join(_write_call(name, arguments, "\n") for name, arguments in calls)


def write_compact(calls: NamedCalls) -> str:
    """Write calls as GLM 4.7 and 5 do: without line breaks."""
    return "".join(_write_call(name, arguments, "") for name, arguments in calls)


def _write_call(name: str, arguments: Mapping[str, Any], line_break: str) -> str:
    check_name(name)
    parts = [f"<tool_call>{name}{line_break}"]
    for key, value in arguments.items():
        written = value if isinstance(value, str) else write_json(value)
        if "<" in key or key != key.strip():
            raise CallProblem(f"the parameter {key[:64]!r} cannot be written")
        if _VALUE_END in written:
            raise CallProblem(f"the parameter {key[:64]!r} holds {_VALUE_END}")
        parts.append(
            f"<arg_key>{key}</arg_key>{line_break}<arg_value>{written}</arg_value>{line_break}"
        )
    return "".join([*parts, "</tool_call>"])


def _read(text: str, start: int, number: int, *, tools: Tools) -> tuple[list[ToolCall], int]:
    """Parse a call; see ``ReadCall``."""
    try:
        name, arguments, end = _read_call(text, start, tools)
    except CallProblem as error:
        return TOOL_CALL_TAGS.read_malformed(str(error), text, start, number)
    source = TOOL_CALL_TAGS.source(text, start, end)
    value = {"name": name, "arguments": arguments}
    return [build_call(value, source, number, arguments_key="arguments")], end


def _read_call(text: str, start: int, tools: Tools) -> tuple[str, dict[str, Any], int]:
    """Parse the call whose body starts at ``start``; return (name, arguments, position after the
    closing tag). Raises CallProblem."""
    head = _NAME.match(text, start)
    if head is None:
        raise CallProblem("no name follows <tool_call>")
    types = parameter_schemas(head[1], tools)
    arguments: dict[str, Any] = {}
    place = head.end()
    while (match := _KEY.match(text, place)) is not None:
        key = match[1].strip()
        end = text.find(_VALUE_END, match.end())
        if end < 0:
            raise CallProblem(f"the parameter {key[:64]!r} is not closed")
        if key in arguments:
            raise CallProblem(f"the parameter {key[:64]!r} is given twice")
        arguments[key] = parse_argument(text[match.end() : end], key, types)
        place = skip_space(text, end + len(_VALUE_END))
    if not text.startswith(TOOL_CALL_TAGS.call_end, place):
        raise CallProblem(f"{TOOL_CALL_TAGS.call_end} does not follow the parameters")
    check_value([head[1], arguments])
    return head[1], arguments, place + len(TOOL_CALL_TAGS.call_end)
