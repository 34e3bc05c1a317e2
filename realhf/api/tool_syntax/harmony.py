"""Calls as messages to a function, in channels: gpt-oss."""

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
    check_name,
    malformed_call,
    surplus_call,
)
from realhf.api.tool_syntax.json_values import read_json, skip_space, write_json
from realhf.api.tool_syntax.tags import Tags

_MESSAGE = "<|message|>"
_ANALYSIS = Tags("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>")
"""The message of the channel for reasoning, up to the header of the next message."""
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]+)")
_HEADER_START = re.compile(r"<\|(?:start|channel|constrain)\|>|\bto=|\Z")
_BODY_END = re.compile(r"(?=<\|start\|>)|<\|(?:end|call|return)\|>|\Z")
_CALL_END = re.compile(r"\s*(?:(?=<\|start\|>)|<\|(?:end|call|return)\|>|\Z)")


def parse(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn, which continues after ``<|start|>assistant``.

    The channel ``analysis`` is reasoning. Messages to ``functions.NAME`` are calls, messages to
    others are calls of the name that they give. All other messages are content. Never raises.
    """
    del tools
    thoughts: list[str] = []
    words: list[str] = []
    calls: list[ToolCall] = []
    place = 0
    while (end := text.find(_MESSAGE, place)) >= 0:
        header = text[place:end]
        body = end + len(_MESSAGE)
        recipient = _RECIPIENT.search(header)
        stray = header[: _header_start(header)].strip()
        if stray != "assistant":
            words.append(stray)
        if recipient is not None and recipient[1] != "assistant":
            if len(calls) >= MAX_CALLS:
                calls.append(surplus_call(text[place:], len(calls)))
                place = len(text)
                break
            call, place = _read(text, place, body, recipient[1], len(calls))
            calls.append(call)
            continue
        match = _find_end(text, body)
        channel = _CHANNEL.search(header)
        is_thought = channel is not None and channel[1] == "analysis"
        (thoughts if is_thought else words).append(text[body : match.start()])
        place = match.end()
    if not place:
        return ParsedTurn(text)
    words.append(text[place:])
    content, reasoning = (
        "\n".join(filter(None, (part.strip() for part in parts))) for parts in (words, thoughts)
    )
    return ParsedTurn(content, calls, reasoning)


def find_reasoning_end(text: str) -> int:
    """Return where the header of the first message after the leading reasoning starts; see
    ``Tags.find_reasoning_end``."""
    place = 0
    while end := _ANALYSIS.find_reasoning_end(text, place):
        place = end
    return place


def write(calls: NamedCalls) -> str:
    """Write calls as they follow ``<|start|>assistant``, without the end of the last one. The
    template writes one call only. Raises CallProblem."""
    for name, _ in calls:
        check_name(name)
    return "<|call|><|start|>assistant".join(
        f" to={_FUNCTIONS}{name}<|channel|>commentary json{_MESSAGE}{write_json(arguments)}"
        for name, arguments in calls
    )


def _header_start(header: str) -> int:
    match = _HEADER_START.search(header)
    return match.start() if match else len(header)


def _find_end(text: str, start: int) -> re.Match[str]:
    """Return the match of the end of the message whose body starts at ``start``."""
    match = _BODY_END.search(text, start)
    assert match is not None  # The pattern matches the end of the text.
    return match


def _read(text: str, start: int, body: int, recipient: str, number: int) -> tuple[ToolCall, int]:
    """Parse the call whose header starts at ``start`` and whose arguments start at ``body``; return
    it and the position after its end."""
    name = recipient.removeprefix(_FUNCTIONS)
    try:
        arguments, end = read_json(text, skip_space(text, body))
        match = _CALL_END.match(text, end)
        if match is None:
            raise CallProblem("text follows the arguments")
    except CallProblem as error:
        match = _find_end(text, body)
        return malformed_call(str(error), text[start : match.end()], number), match.end()
    value = {"name": name, "arguments": arguments}
    source = text[start : match.end()]
    return build_call(value, source, number, arguments_key="arguments"), match.end()
