"""Tool calls as a syntax parses them, and the problems of those that it cannot parse."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools, in the form of the chat API."""

NamedCalls = Sequence[tuple[str, Mapping[str, Any]]]
"""Calls as names and arguments."""
NAME = r"[^\s\[\]{}()<>|｜\"'=:,;]+"
"""Pattern of a name that is written without quotes."""

MAX_CALLS = 64
"""Maximum number of calls in a turn."""
MAX_NAME_CHARS = 256
"""Maximum number of characters of a function's name."""
TEXT_FOLLOWS = "text follows the calls"
"""Problem of the text after complete calls, in syntaxes in which calls are all but the reasoning."""
_IGNORED_KEYS = frozenset({"id", "type"})
"""Keys of a call that are allowed but ignored."""


class CallProblem(ValueError):
    """Raised if the policy's text is not a valid call. The message says why."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a message of the policy."""

    name: str
    """Name of the tool; "" if it could not be parsed."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by name; empty if the call could not be parsed."""
    id: str = ""
    """Identifier of the call, to which the ``tool`` message with its result refers."""
    text: str = ""
    """The call as the policy wrote it."""
    problem: str = ""
    """Why the call could not be parsed; "" if it could."""


@dataclass(frozen=True)
class ParsedTurn:
    """The parts of a policy turn."""

    content: str
    """The text without reasoning and calls."""
    calls: Sequence[ToolCall] = ()
    """The calls in order, including those that could not be parsed."""
    reasoning: str = ""
    """The text of the reasoning blocks."""


def check_name(name: str) -> None:
    """Raise CallProblem for a name that cannot be written without quotes."""
    if not re.fullmatch(NAME, name) or len(name) > MAX_NAME_CHARS:
        raise CallProblem(f"the name {name[:64]!r} cannot be written")


def build_call(value: Any, text: str, position: int, *, arguments_key: str) -> ToolCall:
    """Return the call that a JSON value describes, the ``position``-th (from 0) of its turn.

    text: the call as the policy wrote it. If the value has no key ``arguments_key``, the arguments
    are empty. An invalid call has a ``problem``.
    """
    name = value.get("name") if isinstance(value, dict) else None
    known_name = name if isinstance(name, str) and len(name) <= MAX_NAME_CHARS else ""
    try:
        arguments = _read_arguments(value, arguments_key)
    except CallProblem as error:
        return malformed_call(str(error), text, position, name=known_name)
    return ToolCall(known_name, arguments, call_id(position), text)


def malformed_call(problem: str, text: str, position: int, *, name: str = "") -> ToolCall:
    """Return a call that could not be parsed, with the reason ``problem``."""
    return ToolCall(name, {}, call_id(position), text, problem)


def surplus_call(text: str, position: int) -> ToolCall:
    """Return the malformed call that stands for all calls after the first ``MAX_CALLS``."""
    return malformed_call(f"a turn has at most {MAX_CALLS} calls", text, position)


def call_id(position: int) -> str:
    """Return the id of the ``position``-th call (from 0) of a turn."""
    return f"call_{position}"


def _read_arguments(value: Any, key: str) -> Mapping[str, Any]:
    """Return the arguments of a call. Raises CallProblem."""
    if not isinstance(value, dict):
        raise CallProblem(f"a call is a JSON object, not {_describe_type(value)}")
    name = value.get("name")
    arguments = value.get(key, {})
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME_CHARS:
        raise CallProblem(f"the name of a call is a text of 1 to {MAX_NAME_CHARS} characters")
    if unknown := [
        other for other in value if other not in ("name", key) and other not in _IGNORED_KEYS
    ]:
        raise CallProblem(f"a call has the keys name and {key}, not {unknown[0][:64]!r}")
    if not isinstance(arguments, dict):
        raise CallProblem(f"{key} are a JSON object, not {_describe_type(arguments)}")
    return arguments


def _describe_type(value: Any) -> str:
    """Return the type of a JSON value in words."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")
