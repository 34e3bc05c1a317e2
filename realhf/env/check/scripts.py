"""Messages that a check sends to an environment: tool calls with arguments drawn from the tools'
schemas, and wrong messages.

All are written as text and parsed like the turns of a policy, so that an environment receives only
what it could receive in training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from realhf.api.chat_template import parse_turn
from realhf.api.environment import AssistantMessage

_FAMILY = "hermes"
"""Chat template family whose format of tool calls is used."""
_LONG_CHARS = 200_000
"""Length of very long strings in characters."""
_CONTROL = "\x00\x07\x08\x1b[31m\r\n\t\x7f\u202e"
_FOREIGN = "naïve Σ π 你好 שלום 👩\u200d🚀 \ufeff e\u0301"
_WORDS = ("1", "0", "7", "hello", "yes", "a b c", "I do not know.", "42")
"""Messages of a policy without tools; also used as values of string arguments."""


class WrongMessage(NamedTuple):
    """A message and its description for display, such as ``an empty message``."""

    name: str
    """Description of the message, for display."""
    message: AssistantMessage
    """The parsed message."""


def policy_turn(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> AssistantMessage:
    """Return the message that an environment receives when a policy writes ``text``."""
    return parse_turn(text, _FAMILY, token_count=max(1, len(text) // 4), tools=tools)


def call_text(name: str, arguments: Any) -> str:
    """Return the text of a tool call as a policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def schema_type(schema: Mapping[str, Any]) -> str:
    """Return the type in a JSON schema; if it has several, the first one that is not null; "" if it
    has none."""
    kind = schema.get("type", "")
    return (
        kind if isinstance(kind, str) else next((each for each in kind if each != "null"), "null")
    )


def sample_value(schema: Mapping[str, Any], rng: random.Random, depth: int = 0) -> Any:
    """Draw a value that satisfies the type of a JSON schema."""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice([*schema["enum"]])
    if isinstance(choices := schema.get("anyOf") or schema.get("oneOf"), list | tuple) and choices:
        first = choices[0]
        return (
            sample_value(first, rng, depth + 1)
            if isinstance(first, Mapping) and depth < 8
            else None
        )
    kind = schema_type(schema) or "string"
    if kind == "object":
        return _sample_object(schema, rng, depth)
    if kind == "array":
        items = schema.get("items")
        fits = isinstance(items, Mapping) and depth < 8
        return (
            [sample_value(items, rng, depth + 1) for _ in range(2)]
            if fits and items is not None
            else []
        )
    low = schema.get("minimum", 0)
    low = low if isinstance(low, int | float) else 0
    plain: dict[str, Any] = {
        "integer": int(low) + rng.randrange(4),
        "number": low + rng.randrange(8) / 2,
        "boolean": rng.random() < 0.5,
        "null": None,
    }
    return plain.get(kind, rng.choice(_WORDS))


def _sample_object(schema: Mapping[str, Any], rng: random.Random, depth: int) -> dict[str, Any]:
    properties = property_schemas(schema) if depth <= 8 else {}
    return {name: sample_value(each, rng, depth + 1) for name, each in properties.items()}


def property_schemas(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the well-formed schemas of an object's properties by name."""
    properties = schema.get("properties")
    return (
        {name: each for name, each in properties.items() if isinstance(each, Mapping)}
        if isinstance(properties, Mapping)
        else {}
    )


def list_functions(tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (name, schema of the parameters) of each well-formed tool."""
    signatures = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            signatures.append(
                (
                    function["name"],
                    parameters if isinstance(parameters, Mapping) else {"type": "object"},
                )
            )
    return signatures


def random_turns(tools: Sequence[Mapping[str, Any]], seed: int, turns: int) -> list[str]:
    """Return turns of a policy that calls tools with random arguments, or writes random words if
    there are no tools."""
    rng = random.Random(seed)
    signatures = list_functions(tools)
    texts = []
    for _ in range(turns):
        if signatures:
            name, parameters = rng.choice(signatures)
            texts.append(call_text(name, _sample_object(parameters, rng, 0)))
        else:
            texts.append(rng.choice(_WORDS))
    return texts


def talking_turns(turns: int) -> list[str]:
    """Return turns of a policy that never calls a tool."""
    return [_WORDS[turn % len(_WORDS)] for turn in range(turns)]


def wrong_messages(tools: Sequence[Mapping[str, Any]]) -> list[WrongMessage]:
    """Return wrong messages of every kind that a policy can write."""
    texts = [
        ("an empty message", ""),
        ("white space", " \n\t "),
        ("a message of 200,000 characters", "word " * (_LONG_CHARS // 5)),
        ("a message in other scripts", _FOREIGN),
        ("control characters", _CONTROL),
        ("a message of markup", "<b>&amp;</b> [bold]x[/bold] %s {0} ${x} '; -- \\"),
        ("a call of an unknown tool", call_text("no_such_tool", {})),
        ("a call of a private name", call_text("__init__", {"x": 1})),
        ("a call that is no JSON", '<tool_call>\n{"name": \n</tool_call>'),
        ("a call that does not close", '<tool_call>\n{"name": "x", "arguments": {}}'),
        ("a call that is a list", "<tool_call>\n[1, 2]\n</tool_call>"),
        ("30 calls at once", "\n".join([call_text("no_such_tool", {})] * 30)),
        ("reasoning without an answer", "<think>I wonder"),
    ]
    for name, parameters in list_functions(tools):
        texts += [
            (f"a call of {name!r} {what}", call_text(name, arguments))
            for what, arguments in _wrong_arguments(parameters)
        ]
    return [WrongMessage(name, policy_turn(text, tools)) for name, text in texts]


def _wrong_arguments(parameters: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (description, arguments) of wrong calls of one tool."""
    valid = _sample_object(parameters, random.Random(0), 0)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("with an argument that it does not have", {**valid, "no_such": 1})
    ]
    if not valid:
        return calls
    calls.append(("without arguments", {}))
    replacements = [
        ("with null for everything", None),
        ("with lists for everything", [[1], {"a": "b"}]),
        ("with objects for everything", {"a": [1]}),
        ("with huge numbers", 2**62),
        ("with negative numbers", -1),
        ("with true for everything", True),
        ("with empty texts", ""),
        ("with control characters", _CONTROL),
        ("with other scripts", _FOREIGN),
        ("with very long texts", "x" * _LONG_CHARS),
        ("with a path out of its folder", "../../../../etc/passwd"),
    ]
    return calls + [(what, dict.fromkeys(valid, value)) for what, value in replacements]
