"""Parses what a policy said in a turn: its reasoning, its tool calls, and the rest. Nothing here raises: the policy's
text is hostile, and a call that cannot be read is a call with a ``problem``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from realhf.api.chat.call_json import CallProblem, broken_call, call_of, read_json
from realhf.api.chat.families import HERMES, LLAMA, XML
from realhf.api.chat.xml_call import read_xml_call
from realhf.api.environment import AssistantMessage, ToolCall

MAX_CALLS = 64
_THINK, _THOUGHT = "<think>", "</think>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TAG = re.compile(r"</?think>|<tool_call>")
_THINK_TAG = re.compile(r"</?think>")
_BROKEN_END = re.compile(r"</tool_call>|(?=<tool_call>|</?think>)")
_SPACE = re.compile(r"\s*")
_BEGUN_CALL = re.compile(r'\{\s*("(name|parameters|type)"|$)')

_Read = Callable[[str, int, int], tuple[list[ToolCall], int]]
"""Reads a call that opens at a place: (text, place after the tag, calls so far) to the calls and the place after."""


def parse_turn(
    text: str, family: str, *, token_count: int = 0, tools: Sequence[Mapping[str, Any]] = ()
) -> AssistantMessage:
    """Parse a turn by the template's ``family`` (``families.FAMILIES``).

    Reasoning is between ``<think>`` and ``</think>``: one that is not closed swallows the rest, a ``</think>`` whose
    opening stood in the prompt everything before it. Calls within it do not count; tags within a well-formed call are
    its text. The content is what is left; when something was taken out, without white space at its ends. At most
    ``MAX_CALLS`` calls are read, the next is a problem that swallows the rest. ``tools`` are schemas that say which
    arguments are no text, for the family whose calls are not JSON.
    """
    if family == LLAMA:
        reasoning, (content, calls) = "", _llama_calls(text)
        if not calls or any(call.problem for call in calls):
            reasoning, content, _ = _scan(text, None)
            content, calls = _llama_calls(content)
    else:
        reader = {HERMES: _read_hermes, XML: partial(_read_xml, tools=tools)}.get(family)
        reasoning, content, calls = _scan(text, reader)
    return AssistantMessage(content, tuple(calls), reasoning, text, token_count)


def _scan(text: str, read: _Read | None) -> tuple[str, str, list[ToolCall]]:
    """Return reasoning, content and calls of a turn, read from left to right."""
    tag = _TAG if read else _THINK_TAG
    found = tag.search(text)
    if found is None:
        return "", text, []
    thoughts: list[str] = []
    said: list[str] = []
    calls: list[ToolCall] = []
    place = swallowed = 0
    while found is not None:
        said.append(text[place : found.start()])
        place = found.end()
        if found[0] == _THINK:
            end = text.find(_THOUGHT, place)
            thoughts.append(text[place:] if end < 0 else text[place:end])
            place = len(text) if end < 0 else end + len(_THOUGHT)
        elif found[0] == _THOUGHT:
            thoughts, said, calls, swallowed = [], [], [], found.start()
        elif len(calls) >= MAX_CALLS:
            calls.append(broken_call(f"a turn has at most {MAX_CALLS} calls", text[found.start() :], len(calls)))
            place = len(text)
        elif read is not None:
            more, place = read(text, place, len(calls))
            calls += more
        found = tag.search(text, place)
    said.append(text[place:])
    thoughts = [text[:swallowed], *thoughts]
    return "\n".join(filter(None, (thought.strip() for thought in thoughts))), "".join(said).strip(), calls


def _read_hermes(text: str, start: int, number: int) -> tuple[list[ToolCall], int]:
    try:
        value, end = read_json(text, _after_space(text, start))
        end = _after_space(text, end)
        if not text.startswith(_CLOSE, end):
            raise CallProblem(f"{_CLOSE} does not follow the JSON of a call")
    except CallProblem as error:
        return _broken(str(error), text, start, number)
    place = end + len(_CLOSE)
    written = text[start - len(_OPEN) : place]
    values = value if isinstance(value, list) and value else [value]
    calls = [
        call_of(item, written, position, arguments_key="arguments")
        for position, item in enumerate(values[: MAX_CALLS - number], number)
    ]
    if number + len(values) > MAX_CALLS:
        calls.append(broken_call(f"a turn has at most {MAX_CALLS} calls", written, MAX_CALLS))
    return calls, place


def _read_xml(text: str, start: int, number: int, *, tools: Sequence[Mapping[str, Any]]) -> tuple[list[ToolCall], int]:
    try:
        name, arguments, end = read_xml_call(text, start, tools)
    except CallProblem as error:
        return _broken(str(error), text, start, number)
    call = call_of(
        {"name": name, "arguments": arguments}, text[start - len(_OPEN) : end], number, arguments_key="arguments"
    )
    return [call], end


def _broken(problem: str, text: str, start: int, number: int) -> tuple[list[ToolCall], int]:
    end = _BROKEN_END.search(text, start)
    if end is None or end[0] != _CLOSE:
        problem = f"{_CLOSE} is missing ({problem})"
    place = end.end() if end else len(text)
    return [broken_call(problem, text[start - len(_OPEN) : place], number)], place


def _llama_calls(content: str) -> tuple[str, list[ToolCall]]:
    """Return the content and the calls of a turn that is either; several calls are separated by semicolons."""
    words = content.strip()
    tagged = words.startswith(_PYTHON_TAG)
    start = _after_space(words, len(_PYTHON_TAG) if tagged else 0)
    if not tagged and not words.startswith("{"):
        return content, []
    calls: list[ToolCall] = []
    while start < len(words) or not calls:
        if len(calls) >= MAX_CALLS:
            return "", [*calls, broken_call(f"a turn has at most {MAX_CALLS} calls", words[start:], len(calls))]
        try:
            value, end = read_json(words, start)
        except CallProblem as error:
            if not tagged and not calls and not _BEGUN_CALL.match(words):
                return content, []
            return "", [*calls, broken_call(str(error), words[start:], len(calls))]
        if not tagged and not calls and not (isinstance(value, dict) and "name" in value):
            return content, []
        calls.append(call_of(value, words[start:end], len(calls), arguments_key="parameters"))
        start = _after_space(words, end)
        if start < len(words) and words[start] != ";":
            return "", [*calls, broken_call("text follows a call", words[start:], len(calls))]
        start = _after_space(words, start + 1)
    return "", calls


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start
