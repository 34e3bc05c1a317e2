"""Calls as JSON that is the whole turn: Llama 3.1, 3.2 and 4."""

from __future__ import annotations

import re

from realhf.api.tool_syntax.calls import (
    MAX_CALLS,
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
from realhf.api.tool_syntax.tags import THINK_TAGS

_PYTHON_TAG = "<|python_tag|>"
_CALL_START = re.compile(r'\{\s*("(name|parameters|type)"|$)')
"""Start of a JSON object that looks like a call."""


def parse(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn. Never raises."""
    del tools
    content, calls = _parse_calls(text)
    if calls and not any(call.problem for call in calls):
        return ParsedTurn(content, calls)
    start = THINK_TAGS.skip_reasoning(text)
    _, calls = _parse_calls(text[start:])
    turn = THINK_TAGS.parse(text[:start] if calls else text)
    return ParsedTurn(turn.content, calls, turn.reasoning)


def write(calls: NamedCalls) -> str:
    """Write calls, given as name and arguments. The templates write one call only; several are
    separated by semicolons."""
    return "; ".join(
        f'{{"name": {write_json(name)}, "parameters": {write_json(arguments)}}}'
        for name, arguments in calls
    )


def _parse_calls(content: str) -> tuple[str, list[ToolCall]]:
    """Return (content, calls) of a turn, of which either the content or the list of calls is empty.
    Several calls are separated by semicolons."""
    words = content.strip()
    tagged = words.startswith(_PYTHON_TAG)
    start = skip_space(words, len(_PYTHON_TAG) if tagged else 0)
    if not tagged and not words.startswith("{"):
        return content, []
    calls: list[ToolCall] = []
    while start < len(words) or not calls:
        if len(calls) >= MAX_CALLS:
            return "", [*calls, surplus_call(words[start:], len(calls))]
        try:
            value, end = read_json(words, start)
        except CallProblem as error:
            if not tagged and not calls and not _CALL_START.match(words):
                return content, []
            return "", [*calls, malformed_call(str(error), words[start:], len(calls))]
        if not tagged and not calls and not (isinstance(value, dict) and "name" in value):
            return content, []
        calls.append(build_call(value, words[start:end], len(calls), arguments_key="parameters"))
        start = skip_space(words, end)
        if start < len(words) and words[start] != ";":
            return "", [*calls, malformed_call("text follows a call", words[start:], len(calls))]
        start = skip_space(words, start + 1)
    return "", calls
