"""Calls as JSON that is the whole turn: Llama 3.1, 3.2 and 4."""

from __future__ import annotations

import re

from realhf.api.tool_syntax.calls import (
    MAX_CALLS,
    TEXT_FOLLOWS,
    CallProblem,
    NamedCalls,
    ParsedTurn,
    ToolCall,
    Tools,
    build_call,
    malformed_call,
    surplus_call,
)
from realhf.api.tool_syntax.json_values import read_json, skip_space, write_json
from realhf.api.tool_syntax.tags import parse_untagged_calls

_PYTHON_TAG = "<|python_tag|>"
_CALL_START = re.compile(r'\{\s*("(name|parameters|type)"|$)')
"""Start of a JSON object that looks like a call."""


def parse(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn. Never raises."""
    del tools
    return parse_untagged_calls(text, _parse_calls)


def write(calls: NamedCalls) -> str:
    """Write calls, given as name and arguments. The templates write one call only; several are
    separated by semicolons."""
    return "; ".join(
        f'{{"name": {write_json(name)}, "parameters": {write_json(arguments)}}}'
        for name, arguments in calls
    )


def _parse_calls(content: str) -> list[ToolCall]:
    """Return the calls of a turn without reasoning; [] if it does not look like a call. Several
    calls are separated by semicolons."""
    words = content.strip()
    tagged = words.startswith(_PYTHON_TAG)
    start = skip_space(words, len(_PYTHON_TAG) if tagged else 0)
    if not tagged and not words.startswith("{"):
        return []
    calls: list[ToolCall] = []
    while start < len(words) or not calls:
        if len(calls) >= MAX_CALLS:
            return [*calls, surplus_call(words[start:], len(calls))]
        try:
            value, end = read_json(words, start)
        except CallProblem as error:
            if not tagged and not calls and not _CALL_START.match(words):
                return []
            return [*calls, malformed_call(str(error), words[start:], len(calls))]
        if not tagged and not calls and not (isinstance(value, dict) and "name" in value):
            return []
        calls.append(build_call(value, words[start:end], len(calls), arguments_key="parameters"))
        start = skip_space(words, end)
        if start < len(words) and words[start] != ";":
            return [*calls, malformed_call(TEXT_FOLLOWS, words[start:], len(calls))]
        start = skip_space(words, start + 1)
    return calls
