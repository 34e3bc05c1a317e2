"""Formats of the rows of a user's data file, for supervised training and for preferences.

The formats are those of TRL. A row of supervised training has ``messages``, or ``prompt`` and
``completion``; a row of preferences has ``chosen`` and ``rejected`` and, unless both begin with it,
``prompt``. Each of these is a list of messages or, except ``messages``, plain text. ``tools`` is a
list of JSON schemas, or that list as JSON text. Other columns are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from realhf.api.messages import demonstration_problems, message_problems
from realhf.base.json_rows import read_row_file
from realhf.base.json_values import format_value

SUPERVISED = "supervised"
PREFERENCE = "preference"
Messages = list[dict[str, Any]]
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which an assistant message has its reasoning; the first one is used from here on."""
_UNREAD = {
    "chat_template_kwargs": "set actor.chat_template_kwargs for all rows",
    "images": "only text can be trained",
    "image": "only text can be trained",
}
"""Columns that would change what is trained and are not supported, with advice."""
_READ = ("messages", "prompt", "completion", "chosen", "rejected", "tools")
"""Columns that are read."""


@dataclass(frozen=True)
class Conversation:
    """Messages that the model's chat template renders."""

    messages: Sequence[Mapping[str, Any]]
    """All messages, in the form of ``realhf.api.messages``."""
    prompt: int
    """Number of messages at the beginning that are the prompt."""
    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of the tools."""


@dataclass(frozen=True)
class PlainText:
    """A text and its continuation, which are used without a chat template."""

    prompt: str
    """Text before the continuation; may be empty."""
    completion: str
    """The continuation."""


Exchange = Conversation | PlainText


class Example(NamedTuple):
    """A checked row of a data file."""

    where: str
    """Location of the row, such as ``rows.jsonl, line 3``."""
    exchanges: tuple[Exchange, ...]
    """The exchange to train on, or the chosen one and the rejected one."""


def read_examples(file: Path, kind: str) -> Iterator[Example]:
    """Yield the rows of a file as examples. ``kind``: ``SUPERVISED`` or ``PREFERENCE``.

    Raises ValueError that names the file, the line and the field of the first invalid row.
    """
    parse = {SUPERVISED: _parse_supervised, PREFERENCE: _parse_preference}[kind]
    # Columns of Parquet and Arrow have a fixed structure, so keys that a row lacks are null there.
    has_added_nulls = file.suffix != ".jsonl"
    for row in read_row_file(file, (*_READ, *_UNREAD)):
        values = (
            {
                name: _without_nulls(value)
                for name, value in row.values.items()
                if value is not None or name not in _READ
            }
            if has_added_nulls
            else row.values
        )
        try:
            exchanges = parse(values)
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from None
        yield Example(row.where, exchanges)


def check_rows(file: Path, kind: str) -> int:
    """Return the number of rows of a file. Raises ValueError for the first invalid row, and for a
    file without rows."""
    count = sum(1 for _ in read_examples(file, kind))
    if count == 0:
        raise ValueError(f"{file}: has no rows")
    return count


def _parse_supervised(values: Mapping[str, Any]) -> tuple[Exchange, ...]:
    _check_columns(values)
    in_two_parts = values.get("completion") is not None
    if in_two_parts and values.get("messages") is not None:
        raise ValueError("messages and completion: a row has one of them; remove the other")
    if not in_two_parts:
        if values.get("messages") is None:
            raise ValueError(
                "the row has neither messages nor prompt and completion "
                f"(it has {', '.join(map(format_value, [*values][:8])) or 'nothing'})"
            )
        messages = _read_messages(values["messages"], "messages")
        return (_build_conversation([], messages, values, "messages"),)
    prompt = values.get("prompt")
    if prompt is None:
        raise ValueError("prompt: a row with a completion needs one")
    return (_build_exchange(prompt, values["completion"], values, "completion"),)


def _parse_preference(values: Mapping[str, Any]) -> tuple[Exchange, ...]:
    _check_columns(values)
    for name in ("chosen", "rejected"):
        if values.get(name) is None:
            raise ValueError(
                f"{name}: missing (the row has "
                f"{', '.join(map(format_value, [*values][:8])) or 'nothing'})"
            )
    chosen = values["chosen"]
    rejected = values["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError("rejected: must be text where chosen is text, else messages")
    if chosen == rejected:
        raise ValueError("rejected: equals chosen, so neither is preferred")
    prompt = values.get("prompt")
    if prompt is None:
        prompt, chosen, rejected = _split_shared_prompt(chosen, rejected)
        if prompt == []:
            raise ValueError(
                "rejected: has no prompt in common with chosen; without the column prompt, both "
                "begin with the messages of the prompt"
            )
    elif isinstance(prompt, str) and not isinstance(chosen, str):
        # Some data sets repeat as text a prompt that the messages of both answers begin with.
        repeated = prompt.strip()
        prompt, chosen, rejected = _split_shared_prompt(chosen, rejected)
        if not any((message.get("content") or "").strip() == repeated for message in prompt):
            raise ValueError(
                "prompt: is text that the messages of chosen and rejected do not begin with; "
                "write it as messages"
            )
    return (
        _build_exchange(prompt, chosen, values, "chosen"),
        _build_exchange(prompt, rejected, values, "rejected"),
    )


def _split_shared_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return the longest common beginning of both answers that can be a prompt, and their
    remainders, which are not empty. Texts are split before the word in which they differ, so that
    no token has letters of both; messages are split so that the beginning does not end with an
    assistant message."""
    if isinstance(chosen, str):
        size = _count_equal(chosen, rejected)
    else:
        chosen = _read_messages(chosen, "chosen")
        rejected = _read_messages(rejected, "rejected")
        size = _count_equal(chosen, rejected)
    size = max(0, min(size, len(chosen) - 1, len(rejected) - 1))
    if isinstance(chosen, str):
        if (space := chosen.rfind(" ", 0, size + 1)) > 0:
            size = space
    else:
        while size and chosen[size - 1]["role"] == "assistant":
            size -= 1
    return chosen[:size], chosen[size:], rejected[size:]


def _count_equal(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of equal items at the beginning of two sequences."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _build_exchange(prompt: Any, answer: Any, values: Mapping[str, Any], field: str) -> Exchange:
    """Return the exchange of a prompt and an answer, both text or both messages. ``field``: name of
    the answer's column."""
    if isinstance(prompt, str) != isinstance(answer, str):
        raise ValueError(f"{field}: must be text where prompt is text, else messages")
    if isinstance(prompt, str):
        if not answer:
            raise ValueError(f"{field}: is empty")
        if values.get("tools"):
            raise ValueError(
                f"tools: have no effect on plain text; write prompt and {field} as messages"
            )
        return PlainText(prompt, answer)
    before = _read_messages(prompt, "prompt")
    if not before:
        raise ValueError("prompt: has no message")
    if before[-1]["role"] == "assistant":
        raise ValueError("prompt: ends with an assistant message, so there is nothing to answer")
    return _build_conversation(before, _read_messages(answer, field), values, field)


def _build_conversation(
    prompt: Messages, answer: Messages, values: Mapping[str, Any], field: str
) -> Conversation:
    """Return a checked conversation. ``field``: name of the column of ``answer``."""
    if not any(message["role"] == "assistant" for message in answer):
        raise ValueError(f"{field}: has no assistant message to train on")
    tools = _read_tools(values.get("tools"))
    # Turns of the prompt may be empty, as those that are not trained.
    checked = [
        {**message, "train": False} if message["role"] == "assistant" else message
        for message in prompt
    ] + answer

    def name_field(match: re.Match[str]) -> str:
        number = int(match[1])
        if number < len(prompt):
            return f"prompt[{number}]"
        return f"{field}[{number - len(prompt)}]"

    for problem in demonstration_problems({"messages": checked, "tools": tools}):
        raise ValueError(re.sub(r"^messages\[(\d+)\]", name_field, problem))
    return Conversation([*prompt, *answer], len(prompt), tools)


def _check_columns(values: Mapping[str, Any]) -> None:
    """Raise ValueError for a column that is not supported and would change what is trained."""
    for name, advice in _UNREAD.items():
        if values.get(name):
            raise ValueError(f"{name}: is not read; {advice}")


def _read_tools(tools: Any) -> list[dict[str, Any]]:
    """Return the schemas of a row's ``tools``: a list, or JSON text with a list; None for none."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tools: not JSON: {error}") from None
    return [] if tools is None else tools


def _read_messages(messages: Any, field: str) -> Messages:
    """Return messages in the form of ``realhf.api.messages``.

    Parts of text are joined; ``thinking`` and ``reasoning`` become ``reasoning_content``, and
    ``weight`` (0 or 1) becomes ``train``; null counts as missing.
    """
    if isinstance(messages, list):
        messages = [
            _read_message(message, f"{field}[{number}]")
            if isinstance(message, Mapping)
            else message
            for number, message in enumerate(messages)
        ]
    for problem in message_problems(messages, field):
        raise ValueError(problem)
    return messages


def _read_message(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    if isinstance(parts := plain.get("content"), list):
        plain["content"] = _join_parts(parts, f"{field}.content")
    if plain.get("role") != "assistant":
        return plain
    if plain.get("tool_calls") == []:
        del plain["tool_calls"]
    if plain.get("tool_calls"):  # Some templates tell a missing text from null.
        plain.setdefault("content", None)
    reasoning = [key for key in _REASONING_KEYS if plain.get(key) is not None]
    if len({json.dumps(plain[key]) for key in reasoning}) > 1:
        raise ValueError(f"{field}: {' and '.join(reasoning)} differ; write one of them")
    if reasoning:
        text = plain[reasoning[0]]
        plain = {key: value for key, value in plain.items() if key not in _REASONING_KEYS}
        plain[_REASONING_KEYS[0]] = text
    if "weight" in plain and "train" not in plain:
        if plain["weight"] not in (0, 1):
            raise ValueError(f"{field}.weight: must be 0 or 1, not {format_value(plain['weight'])}")
        plain["train"] = bool(plain.pop("weight"))
    return plain


def _join_parts(parts: Sequence[Any], field: str) -> str:
    """Return the text of a content that is a list of parts. Raises ValueError for other parts."""
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            raise ValueError(
                f"{field}[{number}]: the content must be text, not {format_value(part)}"
            )
        texts.append(text)
    return "".join(texts)


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys of mappings whose value is null, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
