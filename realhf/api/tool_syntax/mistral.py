"""Calls after the control word ``[TOOL_CALLS]``: Mistral."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import Any

from realhf.api.tool_syntax.calls import (
    MAX_CALLS,
    NAME,
    CallProblem,
    NamedCalls,
    ParsedTurn,
    ToolCall,
    Tools,
    build_call,
    call_id,
    check_name,
    surplus_call,
)
from realhf.api.tool_syntax.json_values import read_json, skip_space, write_json
from realhf.api.tool_syntax.tags import Tags

_TAGS = Tags("[THINK]", "[/THINK]", "[TOOL_CALLS]")
_THINK_TAGS = Tags(call=_TAGS.call)
"""The tags of models of this family that were trained to reason in the tags of others."""
_THINK_TAG = re.compile(r"\[/?THINK\]|</?think>")
_HEAD = re.compile(rf"\s*({NAME})\s*(?:\[CALL_ID\]\s*([A-Za-z0-9]*)\s*)?\[ARGS\]\s*")
_ID = re.compile("[A-Za-z0-9]{9}")


def parse(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn. The ids of the calls are those that the policy wrote, as far as they differ and
    templates accept them. Never raises."""
    del tools
    turn = _find_tags(text).parse(text, _read)
    seen: set[str] = set()
    calls = []
    for position, call in enumerate(turn.calls):
        if call.id in seen:
            call = replace(call, id=call_id(position))
        seen.add(call.id)
        calls.append(call)
    return replace(turn, calls=calls)


def find_reasoning_end(text: str) -> int:
    """Return where the words after the leading reasoning start; see ``Tags.find_reasoning_end``."""
    return _find_tags(text).find_reasoning_end(text)


def _find_tags(text: str) -> Tags:
    """Return the tags of the reasoning in a turn: ``<think>`` counts at its start only, and
    ``</think>`` alone if the prompt may have opened it; words about tags are no reasoning."""
    first = _THINK_TAG.search(text)
    word = first[0] if first else ""
    is_leading = word == "<think>" and text.lstrip().startswith(word)
    return _THINK_TAGS if is_leading or word == "</think>" else _TAGS


def write_list(calls: NamedCalls) -> str:
    """Write calls as the tokenizers up to version 7 do: a JSON list, with ids."""
    items = [
        f'{{"name": {write_json(name)}, "arguments": {write_json(arguments)}, '
        f'"id": "{format_id(call_id(position), name, position)}"}}'
        for position, (name, arguments) in enumerate(calls)
    ]
    return f"[TOOL_CALLS][{', '.join(items)}]"


def write_with_ids(calls: NamedCalls) -> str:
    """Write calls as the tokenizers of version 11 do: name, id and arguments. Raises CallProblem."""
    parts = []
    for position, (name, arguments) in enumerate(calls):
        check_name(name)
        identifier = format_id(call_id(position), name, position)
        parts.append(f"[TOOL_CALLS]{name}[CALL_ID]{identifier}[ARGS]{write_json(arguments)}")
    return "".join(parts)


def write(calls: NamedCalls) -> str:
    """Write calls as the tokenizers from version 13 on do: name and arguments. Raises
    CallProblem."""
    for name, _ in calls:
        check_name(name)
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{write_json(value)}" for name, value in calls)


def format_id(identifier: str, name: str, number: int) -> str:
    """Return the id of a call in a conversation: nine letters and digits, which templates require.
    An id of this form is kept."""
    del name
    if _ID.fullmatch(identifier):
        return identifier
    source = identifier or call_id(number)
    return "c" + hashlib.blake2b(source.encode(errors="replace"), digest_size=4).hexdigest()


def _read(text: str, start: int, number: int) -> tuple[list[ToolCall], int]:
    """Parse a call with its name before it, or a list of calls; see ``ReadCall``."""
    head = _HEAD.match(text, start)
    try:
        value, end = read_json(text, head.end() if head else skip_space(text, start))
    except CallProblem as error:
        return _TAGS.read_malformed(str(error), text, start, number)
    source = _TAGS.source(text, start, end)
    if head:
        value = {"name": head[1], "arguments": value, "id": head[2] or ""}
    values = value if isinstance(value, list) and value else [value]
    calls = [
        _keep_id(build_call(item, source, position, arguments_key="arguments"), item)
        for position, item in enumerate(values[: MAX_CALLS - number], number)
    ]
    if number + len(values) > MAX_CALLS:
        calls.append(surplus_call(source, MAX_CALLS))
    return calls, end


def _keep_id(call: ToolCall, value: Any) -> ToolCall:
    """Return the call with the id that the policy wrote, if templates accept it."""
    identifier = value.get("id") if isinstance(value, dict) else None
    is_kept = not call.problem and isinstance(identifier, str) and _ID.fullmatch(identifier)
    return replace(call, id=identifier) if is_kept else call
