"""Finds the reasoning of sampled turns that a chat template leaves out of later prompts, and in which turns it does so.
Nothing here raises on what a policy said."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_LEADING = re.compile(r"\s*<think>.*?</think>\n*", re.DOTALL)
_OPENED_BEFORE = re.compile(r"(?:(?!<think>|<tool_call>).)*?</think>\n*", re.DOTALL)
_OPEN_AT_END = re.compile(r"<think>\s*$")

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], list[int]]
Render = Callable[[list[dict[str, Any]]], str]


def reasoning_end(text: str) -> int:
    """Return where the words of a turn begin after its leading reasoning, 0 where it has none that is closed. The
    opening tag may have stood in the prompt. Line breaks after the closing tag belong to the reasoning."""
    found = _LEADING.match(text) or _OPENED_BEFORE.match(text)
    return found.end() if found else 0


def open_tag_start(text: str) -> int:
    """Return where the opening tag begins with which a prompt ends; the length of the text where there is none."""
    found = _OPEN_AT_END.search(text)
    return found.start() if found else len(text)


def boundary(ids: Sequence[int], decode: Decode, place: int) -> int | None:
    """Return how many of ``ids`` make up the first ``place`` characters of their text; None where a token crosses that
    place."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(decode(ids[:middle])) < place:
            low = middle + 1
        else:
            high = middle
    return low if len(decode(ids[:low])) == place and decode(ids[:low]) == decode(ids)[:place] else None


def forgotten_turns(
    render: Render, shape: Sequence[Sequence[str]], *, reads_key: bool, tool_calls: bool
) -> tuple[bool, ...]:
    """Return, for each turn of the policy, whether its reasoning is left out of the prompt after the last answer.

    ``shape`` are the roles of the messages of the opening and of the answer to each turn. ``render`` makes the text of
    a prompt; ``reads_key``: reasoning is given as ``reasoning_content``, else within tags. ``tool_calls``: turns that
    tools answer have calls.
    """
    messages: list[dict[str, Any]] = [{"role": role, "content": "words"} for role in shape[0]]
    for number, roles in enumerate(shape[1:]):
        calls = [_call(number, place) for place, role in enumerate(roles) if role == "tool" and tool_calls]
        thought = _thought(number)
        said = {"content": "said", "reasoning_content": thought} if reads_key else {"content": _tagged(thought)}
        messages.append({"role": "assistant", **said, **({"tool_calls": calls} if calls else {})})
        ids = iter(calls)
        for role in roles:
            told = {"role": role, "content": "words"}
            if role == "tool" and (call := next(ids, None)):
                told |= {"tool_call_id": call["id"], "name": "tool"}
            messages.append(told)
    text = render(messages)
    return tuple(_thought(number) not in text for number in range(len(shape) - 1))


def _thought(number: int) -> str:
    return f"thought{number}of0turn"


def _tagged(thought: str) -> str:
    return f"<think>\n{thought}\n</think>\n\nsaid"


def _call(number: int, place: int) -> dict[str, Any]:
    function = {"name": "tool", "arguments": {}}
    return {"id": f"c{number % 10000:04d}{place % 10000:04d}", "type": "function", "function": function}
