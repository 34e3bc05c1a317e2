"""Calls with numbered ids between control words: Kimi K2."""

from __future__ import annotations

import re
from dataclasses import replace

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

_BEGIN = "<|tool_calls_section_begin|>"
_END = "<|tool_calls_section_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_TAGS = Tags(call="<|tool_call_begin|>", call_end="<|tool_call_end|>", ignored=(_BEGIN, _END))
_ID = re.compile(rf"functions\.{NAME}:[0-9]{{1,9}}")
_HEAD = re.compile(rf"\s*((?:functions\.)?({NAME})(?::[0-9]{{1,9}})?)\s*{re.escape(_ARGUMENTS)}\s*")
find_reasoning_end = _TAGS.find_reasoning_end
"""Function that finds where the words after the leading reasoning of a turn begin."""


def parse(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn. The ids of the calls are those that the policy wrote, as far as they differ.
    Never raises."""
    del tools
    turn = _TAGS.parse(text, _read)
    seen: set[str] = set()
    calls = []
    for call in turn.calls:
        head = _HEAD.match(call.text, len(_TAGS.call))
        if head is not None and not call.problem and head[1] not in seen:
            call = replace(call, id=head[1])
        seen.add(call.id)
        calls.append(call)
    return replace(turn, calls=calls)


def write(calls: NamedCalls) -> str:
    """Write calls, numbered from 0. Raises CallProblem."""
    for name, _ in calls:
        check_name(name)
    items = [
        f"{_TAGS.call}{format_id('', name, number)}{_ARGUMENTS}{write_json(arguments)}"
        f"{_TAGS.call_end}"
        for number, (name, arguments) in enumerate(calls)
    ]
    return _BEGIN + "".join(items) + _END


def format_id(identifier: str, name: str, number: int) -> str:
    """Return the id of a call in a conversation: ``functions.NAME:NUMBER``. An id of this form is
    kept."""
    return identifier if _ID.fullmatch(identifier) else f"functions.{name}:{number}"


def _read(text: str, start: int, number: int) -> tuple[list[ToolCall], int]:
    """Parse a call; see ``ReadCall``."""
    try:
        head = _HEAD.match(text, start)
        if head is None:
            raise CallProblem(f"functions.NAME:NUMBER and {_ARGUMENTS} do not follow {_TAGS.call}")
        arguments, end = read_json(text, head.end())
        end = skip_space(text, end)
        if not text.startswith(_TAGS.call_end, end):
            raise CallProblem(f"{_TAGS.call_end} does not follow the arguments")
    except CallProblem as error:
        return _TAGS.read_malformed(str(error), text, start, number)
    place = end + len(_TAGS.call_end)
    value = {"name": head[2], "arguments": arguments}
    source = _TAGS.source(text, start, place)
    return [build_call(value, source, number, arguments_key="arguments")], place
