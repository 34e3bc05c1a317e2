"""Calls as JSON between tags: Hermes, Qwen 2.5 and 3, SmolLM."""

from __future__ import annotations

from realhf.api.tool_syntax.calls import (
    MAX_CALLS,
    CallProblem,
    NamedCalls,
    ParsedTurn,
    ToolCall,
    Tools,
    build_call,
    surplus_call,
)
from realhf.api.tool_syntax.json_values import read_json, skip_space, write_json
from realhf.api.tool_syntax.tags import TOOL_CALL_TAGS


def parse(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn. Never raises."""
    del tools
    return TOOL_CALL_TAGS.parse(text, _read)


def write(calls: NamedCalls) -> str:
    """Write calls, given as name and arguments."""
    return "\n".join(
        f'<tool_call>\n{{"name": {write_json(name)}, "arguments": '
        f"{write_json(arguments)}}}\n</tool_call>"
        for name, arguments in calls
    )


def _read(text: str, start: int, number: int) -> tuple[list[ToolCall], int]:
    """Parse a call, or a list of calls; see ``ReadCall``."""
    closing = TOOL_CALL_TAGS.call_end
    try:
        value, end = read_json(text, skip_space(text, start))
        end = skip_space(text, end)
        if not text.startswith(closing, end):
            raise CallProblem(f"{closing} does not follow the JSON of a call")
    except CallProblem as error:
        return TOOL_CALL_TAGS.read_malformed(str(error), text, start, number)
    place = end + len(closing)
    source = TOOL_CALL_TAGS.source(text, start, place)
    values = value if isinstance(value, list) and value else [value]
    calls = [
        build_call(item, source, position, arguments_key="arguments")
        for position, item in enumerate(values[: MAX_CALLS - number], number)
    ]
    if number + len(values) > MAX_CALLS:
        calls.append(surplus_call(source, MAX_CALLS))
    return calls, place
