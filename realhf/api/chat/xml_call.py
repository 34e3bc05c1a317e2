"""Reads a tool call as Qwen3-Coder writes it: ``<function=name><parameter=key>`` value ``</parameter></function>``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from realhf.api.chat.call_json import CallProblem, check_value, read_json

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_END = re.compile(r"</function>\s*</tool_call>")
_CLOSE = "</parameter>"


def read_xml_call(text: str, start: int, tools: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any], int]:
    """Return the name and the arguments of the call whose body begins at ``start``, and the position after its closing
    tags. An argument is text, unless the schema of the tool in ``tools`` says that it is none. Raises CallProblem."""
    function = _FUNCTION.match(text, start)
    if function is None:
        raise CallProblem("<function=...> does not follow <tool_call>")
    name, place = function[1].strip(), function.end()
    types = _types(name, tools)
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, place)) is not None:
        key = parameter[1].strip()
        end = text.find(_CLOSE, parameter.end())
        if end < 0:
            raise CallProblem(f"the parameter {key[:64]!r} is not closed")
        if key in arguments:
            raise CallProblem(f"the parameter {key[:64]!r} is given twice")
        arguments[key] = _value(text[parameter.end() : end].removesuffix("\n"), key, types)
        place = end + len(_CLOSE)
        while place < len(text) and text[place].isspace():
            place += 1
    end = _END.match(text, place)
    if end is None:
        raise CallProblem("</function></tool_call> does not follow the parameters")
    check_value([name, arguments])
    return name, arguments, end.end()


def _types(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


def _value(text: str, key: str, types: Mapping[str, Any]) -> Any:
    schema = types.get(key)
    if not isinstance(schema, Mapping) or "string" in (kinds := _kinds(schema)) or not kinds:
        return text
    words = text.strip()
    try:
        value, end = read_json(words, 0)
    except CallProblem as error:
        raise CallProblem(f"the parameter {key[:64]!r}: {error}") from None
    if end != len(words):
        raise CallProblem(f"the parameter {key[:64]!r}: text follows its value")
    return value


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return [kind for kind in kinds if isinstance(kind, str)]
    return [kinds] if isinstance(kinds, str) else []
