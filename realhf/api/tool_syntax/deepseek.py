"""Calls as JSON between control words: DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

import re

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
from realhf.api.tool_syntax.json_values import read_json, skip_space, write_json
from realhf.api.tool_syntax.tags import Tags

_BEGIN = "<｜tool▁calls▁begin｜>"
_END = "<｜tool▁calls▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_TAGS = Tags(call="<｜tool▁call▁begin｜>", call_end="<｜tool▁call▁end｜>", ignored=(_BEGIN, _END))
_HEAD = re.compile(rf"\s*({NAME})\s*{_SEPARATOR}\s*(?:({NAME})\s*```(?:json)?\s*)?")
"""Name, or the type ``function`` and the name and the start of a block of code."""
_FENCE = "```"
find_reasoning_end = _TAGS.find_reasoning_end
"""Function that finds where the words after the leading reasoning of a turn begin."""


def parse(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn. Never raises."""
    del tools
    return _TAGS.parse(text, _read)


def write_fenced(calls: NamedCalls) -> str:
    """Write calls as V3 and R1 do: arguments in a block of code. Raises CallProblem."""
    for name, _ in calls:
        check_name(name)
    items = [
        f"{_TAGS.call}function{_SEPARATOR}{name}\n```json\n{write_json(arguments)}\n```"
        f"{_TAGS.call_end}"
        for name, arguments in calls
    ]
    return _BEGIN + "\n".join(items) + _END


def write(calls: NamedCalls) -> str:
    """Write calls as V3.1 does. Raises CallProblem."""
    for name, _ in calls:
        check_name(name)
    items = [
        f"{_TAGS.call}{name}{_SEPARATOR}{write_json(arguments)}{_TAGS.call_end}"
        for name, arguments in calls
    ]
    return _BEGIN + "".join(items) + _END


def _read(text: str, start: int, number: int) -> tuple[list[ToolCall], int]:
    """Parse a call; see ``ReadCall``."""
    try:
        head = _HEAD.match(text, start)
        if head is None:
            raise CallProblem(f"no name and {_SEPARATOR} follow {_TAGS.call}")
        arguments, end = read_json(text, head.end())
        end = skip_space(text, end)
        if head[2] is not None:
            if not text.startswith(_FENCE, end):
                raise CallProblem("the block of code with the arguments is not closed")
            end = skip_space(text, end + len(_FENCE))
        if not text.startswith(_TAGS.call_end, end):
            raise CallProblem(f"{_TAGS.call_end} does not follow the arguments")
    except CallProblem as error:
        return _TAGS.read_malformed(str(error), text, start, number)
    place = end + len(_TAGS.call_end)
    value = {"name": head[2] or head[1], "arguments": arguments}
    source = _TAGS.source(text, start, place)
    return [build_call(value, source, number, arguments_key="arguments")], place
