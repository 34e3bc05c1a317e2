"""Calls as elements with one parameter each: Qwen3-Coder, Qwen 3.5, Nemotron 3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from realhf.api.tool_syntax.arguments import parameter_schemas, parse_argument
from realhf.api.tool_syntax.calls import (
    CallProblem,
    NamedCalls,
    ParsedTurn,
    ToolCall,
    Tools,
    build_call,
)
from realhf.api.tool_syntax.json_values import check_value, write_json
from realhf.api.tool_syntax.tags import TOOL_CALL_TAGS

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_END = re.compile(r"</function>\s*</tool_call>")
_PARAMETER_CLOSE = "</parameter>"


def parse(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn. Types of arguments are taken from the schemas in ``tools``. Never raises."""
    return TOOL_CALL_TAGS.parse(text, partial(_read, tools=tools))


def _read(text: str, start: int, number: int, *, tools: Tools) -> tuple[list[ToolCall], int]:
    """Parse a call; see ``ReadCall``."""
    try:
        name, arguments, end = read_xml_call(text, start, tools)
    except CallProblem as error:
        return TOOL_CALL_TAGS.read_malformed(str(error), text, start, number)
    source = TOOL_CALL_TAGS.source(text, start, end)
    value = {"name": name, "arguments": arguments}
    return [build_call(value, source, number, arguments_key="arguments")], end


def read_xml_call(text: str, start: int, tools: Tools) -> tuple[str, dict[str, Any], int]:
    """Parse the call whose body starts at ``start``; return (name, arguments, position after the
    closing tags).

    An argument is a string unless the tool's schema in ``tools`` gives another type; null is read
    as None if the schema allows it. Raises CallProblem.
    """
    function = _FUNCTION.match(text, start)
    if function is None:
        raise CallProblem("<function=...> does not follow <tool_call>")
    name = function[1].strip()
    place = function.end()
    types = parameter_schemas(name, tools)
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, place)) is not None:
        key = parameter[1].strip()
        end = text.find(_PARAMETER_CLOSE, parameter.end())
        if end < 0:
            raise CallProblem(f"the parameter {key[:64]!r} is not closed")
        if key in arguments:
            raise CallProblem(f"the parameter {key[:64]!r} is given twice")
        arguments[key] = parse_argument(text[parameter.end() : end].removesuffix("\n"), key, types)
        place = end + len(_PARAMETER_CLOSE)
        while place < len(text) and text[place].isspace():
            place += 1
    end = _END.match(text, place)
    if end is None:
        raise CallProblem("</function></tool_call> does not follow the parameters")
    check_value([name, arguments])
    return name, arguments, end.end()


def write_json_values(calls: NamedCalls) -> str:
    """Write calls as Qwen 3.6 does: values other than strings as JSON. Raises CallProblem."""
    return _write(calls, ())


def write_json_containers(calls: NamedCalls) -> str:
    """Write calls as Qwen 3.5 and Nemotron 3 do: objects and lists as JSON, other values as Python
    prints them. Raises CallProblem."""
    return _write(calls, (bool, int, float, type(None)))


def write_json_objects(calls: NamedCalls) -> str:
    """Write calls as Qwen3-Coder does: objects as JSON, other values as Python prints them. Raises
    CallProblem."""
    return _write(calls, (bool, int, float, type(None), list))


def _write(calls: NamedCalls, printed: tuple[type, ...]) -> str:
    """Write calls; ``printed`` are the types of values that Python prints."""
    return "\n".join(_write_call(name, arguments, printed) for name, arguments in calls)


def _write_call(name: str, arguments: Mapping[str, Any], printed: tuple[type, ...]) -> str:
    if not _FUNCTION.fullmatch(f"<function={name}>") or name != name.strip():
        raise CallProblem(f"the name {name[:64]!r} cannot be written")
    parts = [f"<tool_call>\n<function={name}>\n"]
    for key, value in arguments.items():
        written = str(value) if isinstance(value, (str, *printed)) else write_json(value)
        if not _PARAMETER.fullmatch(f"<parameter={key}>") or key != key.strip():
            raise CallProblem(f"the parameter {key[:64]!r} cannot be written")
        if _PARAMETER_CLOSE in written:
            raise CallProblem(f"the parameter {key[:64]!r} holds {_PARAMETER_CLOSE}")
        parts.append(f"<parameter={key}>\n{written}\n</parameter>\n")
    return "".join([*parts, "</function>\n</tool_call>"])
