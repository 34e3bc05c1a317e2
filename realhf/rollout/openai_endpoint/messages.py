"""Defines the messages of a black-box agent's conversations, so that two are equal when they say the same.

A client sends back what it was sent, but not byte for byte: it writes JSON arguments in its own way, and an empty
content as null or not at all. Here such messages are equal, and nothing else is.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realhf.api.chat import CallProblem, read_json
from realhf.api.environment import AssistantMessage

_WHOLE_FLOATS = 2.0**53


@dataclass(frozen=True)
class Call:
    """One tool call. ``arguments`` is the JSON text as it was written; calls are equal when the values are."""

    id: str
    name: str
    arguments: str = field(compare=False)
    _value: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_value", canonical_json(self.arguments))


@dataclass(frozen=True)
class Message:
    """One message. ``calls`` are those of an assistant's message; ``call_id`` says which call a message of the role
    ``tool`` answers, ``name`` that call's tool ("" when no call before it has this id)."""

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    name: str = ""

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form of the chat API, which chat templates read."""
        told: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            told["tool_calls"] = [call_body(call) for call in self.calls]
        if self.role == "tool":
            told |= {"tool_call_id": self.call_id} | ({"name": self.name} if self.name else {})
        return told


@dataclass(frozen=True)
class Tools:
    """The tools of a request. ``read_calls``: calls in the policy's answer are read; else they stay text."""

    schemas: tuple[Mapping[str, Any], ...] = ()
    read_calls: bool = False

    @property
    def key(self) -> str:
        """Return a text that says what a policy reads of them."""
        return json.dumps(self.schemas)


NO_TOOLS = Tools()


def call_body(call: Call) -> dict[str, Any]:
    """Return a call in the form of the chat API."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def answer(said: AssistantMessage, prompt: Sequence[int], ids: Sequence[int]) -> Message:
    """Return the message that a client gets for a turn that was sampled as ``ids`` after ``prompt``, which decide the
    ids of its calls. Calls that could not be read stay in the content, which is the whole text when there are no
    others."""
    calls = [call for call in said.tool_calls if not call.problem]
    if not calls:
        return Message("assistant", said.text)
    broken = dict.fromkeys(call.text for call in said.tool_calls if call.problem)
    digest = hashlib.blake2b(array("q", [len(prompt), *prompt, *ids]).tobytes(), digest_size=16)
    return Message(
        "assistant",
        "\n".join(filter(None, [said.content, *broken])),
        tuple(
            Call(_call_id(digest.digest(), number), call.name, json.dumps(call.arguments, ensure_ascii=False))
            for number, call in enumerate(calls)
        ),
    )


def canonical_json(text: str) -> str:
    """Return the JSON value of ``text`` in one way of writing, or ``text`` itself when programs may read it
    differently."""
    words = text.strip()
    try:
        value, end = read_json(words, 0)
    except CallProblem:
        return text
    return json.dumps(_plain_numbers(value), sort_keys=True, separators=(",", ":")) if end == len(words) else text


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE_FLOATS:
        return int(value)
    return value


def _call_id(digest: bytes, number: int) -> str:
    """Nine letters and digits, as some chat templates insist; the same for the same tokens."""
    return "c" + hashlib.blake2b(digest + number.to_bytes(4, "big"), digest_size=4).hexdigest()
