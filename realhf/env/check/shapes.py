"""Judges what an environment hands out: messages, tools, openings, turns. Every function returns sentences about what
is wrong, none for what is right."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realhf.api.environment import Opening, Turn

OPENING_ROLES = ("system", "user", "assistant", "tool")
TURN_ROLES = ("system", "user", "tool")
LARGEST_REWARD = 1000.0
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DEEPEST = 40
_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}
_SAYS_TYPE = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")


def not_json(value: Any, name: str, depth: int = 0) -> str:
    """Say what part of ``value`` JSON cannot hold, "" if it can hold all of it."""
    if value is None or isinstance(value, bool | int):
        return ""
    if isinstance(value, str):
        return "" if value.isascii() or _encodable(value) else f"{name} holds a lone surrogate, which UTF-8 cannot hold"
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{name} is {value}, which is no JSON"
    if depth > _DEEPEST:
        return f"{name} is nested more than {_DEEPEST} deep"
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{name} has the key {key!r}, which is no text"
            if wrong := not_json(item, f"{name}[{key!r}]", depth + 1):
                return wrong
        return ""
    if isinstance(value, list | tuple):
        return next(filter(None, (not_json(item, f"{name}[{i}]", depth + 1) for i, item in enumerate(value))), "")
    return f"{name} is of the type {type(value).__name__}, which is no JSON"


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def message_problems(messages: Any, name: str, roles: Sequence[str]) -> Iterator[str]:
    """Judge a sequence of chat messages."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        yield f"{name} is of the type {type(messages).__name__} and not a list of messages"
        return
    for index, message in enumerate(messages):
        here = f"{name}[{index}]"
        if not isinstance(message, Mapping):
            yield f"{here} is of the type {type(message).__name__} and not a map with role and content"
        elif wrong := not_json(message, here):
            yield wrong
        elif message.get("role") not in roles:
            yield f"{here} has the role {message.get('role')!r} (known here: {', '.join(roles)})"
        elif not isinstance(message.get("content"), str) and not (
            message["role"] == "assistant" and message.get("tool_calls")
        ):
            yield f"{here} has no text as its content"


def opening_problems(opening: Any, system_prompt: str) -> Iterator[str]:
    """Judge what ``reset`` returned, but for its tools."""
    if not isinstance(opening, Opening):
        yield f"it returns {_article(opening)} and not an Opening"
        return
    wrong = [*message_problems(opening.messages, "messages", OPENING_ROLES)]
    yield from wrong
    if not wrong and not opening.messages and not system_prompt:
        yield "it returns no message, and there is no system prompt: the policy would see nothing"
    if text := not_json(opening.info, "info"):
        yield text


def tool_problems(tools: Any) -> Iterator[str]:
    """Judge the JSON schemas of tools, in the form of the OpenAI chat API."""
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        yield f"tools is of the type {type(tools).__name__} and not a list of schemas"
        return
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(function := tool.get("function"), Mapping):
            yield f'tool {index} is not a map {{"type": "function", "function": {{...}}}}'
            continue
        if wrong := not_json(tool, f"tool {index}"):
            yield wrong
            continue
        name = function.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            yield f"tool {index} has the name {name!r}; a name has 1 to 64 letters, digits, underscores and hyphens"
        elif name in names:
            yield f"two tools have the name {name!r}"
        else:
            names.add(name)
            yield from (f"tool {name!r} {text}" for text in _function_problems(function))


def _function_problems(function: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(function.get("description"), str) or not function["description"].strip():
        yield "has no description"
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        yield "has parameters that are not a JSON schema of the type object"
        return
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        yield "has properties that are not a map"
        return
    for name, schema in properties.items():
        if not isinstance(schema, Mapping) or not any(word in schema for word in _SAYS_TYPE):
            yield f"has the parameter {name!r} without a type"
        elif not {*_listed(schema.get("type", ()))} <= _TYPES:
            yield f"has the parameter {name!r} of the unknown type {schema['type']!r}"
    required = parameters.get("required", ())
    if isinstance(required, str) or not isinstance(required, Sequence) or not {*map(str, required)} <= {*properties}:
        yield "requires a parameter that it does not have"


def _listed(kind: Any) -> list[str]:
    return [kind] if isinstance(kind, str) else [str(item) for item in kind]


def turn_problems(turn: Any) -> Iterator[str]:
    """Judge what ``step`` returned."""
    if not isinstance(turn, Turn):
        yield f"it returns {_article(turn)} and not a Turn"
        return
    yield from message_problems(turn.messages, "messages", TURN_ROLES)
    if not isinstance(turn.done, bool):
        yield f"done is of the type {type(turn.done).__name__} and not True or False"
    yield from _reward_problems(turn)
    yield from _metric_problems(turn)
    if text := not_json(turn.info, "info"):
        yield text


def _reward_problems(turn: Turn) -> Iterator[str]:
    if turn.reward is not None and (text := _number_problem(turn.reward)):
        yield f"the reward {text}"
    elif turn.reward is not None and abs(turn.reward) > LARGEST_REWARD:
        yield f"the reward is {turn.reward:g}; rewards beyond {LARGEST_REWARD:g} drown everything else in a batch"
    if turn.final and turn.reward is None:
        yield "it is final and has no reward"
    if not isinstance(turn.rewards, Mapping):
        yield f"rewards is of the type {type(turn.rewards).__name__} and not a map of named components"
        return
    for name, value in turn.rewards.items():
        if text := _number_problem(value):
            yield f"the component {name!r} of the reward {text}"


def _metric_problems(turn: Turn) -> Iterator[str]:
    if not isinstance(turn.metrics, Mapping):
        yield f"metrics is of the type {type(turn.metrics).__name__} and not a map of numbers"
        return
    for name, value in turn.metrics.items():
        if text := _number_problem(value):
            yield f"the metric {name!r} {text}"
        elif name in ("success", "progress") and not 0 <= value <= 1:
            yield f"the metric {name!r} is {value:g} and not between 0 and 1"


def _number_problem(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"is of the type {type(value).__name__} and no number"
    return "" if math.isfinite(value) else f"is {value}"


def _article(value: Any) -> str:
    return "None" if value is None else f"an object of the type {type(value).__name__}"


def solved(turn: Turn) -> bool:
    """Return whether a turn says that the task is solved."""
    return turn.metrics.get("success") == 1


def ends(turn: Turn) -> bool:
    """Return whether the episode is over after a turn: it is done, or the task is solved."""
    return turn.done or solved(turn)


def plain(found: Opening | Turn) -> dict[str, Any]:
    """Return what a policy and a trainer see of an opening or a turn, as plain JSON values; ``info`` is for people and
    left out. Call it on what has no problems only."""
    if isinstance(found, Opening):
        return json.loads(json.dumps({"messages": [*map(dict, found.messages)], "tools": [*map(dict, found.tools)]}))
    seen = {
        "messages": [*map(dict, found.messages)],
        "done": found.done,
        "reward": found.reward,
        "rewards": dict(found.rewards),
        "metrics": dict(found.metrics),
        "final": found.final,
    }
    return json.loads(json.dumps(seen))
