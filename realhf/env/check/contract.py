"""Checks of the openings and turns of an environment, against the contract and further requirements
of policies and trainers, such as described tools and bounded rewards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realhf.api.environment import Opening, Turn, finite_number
from realhf.api.messages import find_missing_request, message_problems
from realhf.api.messages import tool_problems as schema_problems
from realhf.base.json_values import format_value, json_problem
from realhf.env.loader import validation

MAX_REWARD = 1000.0
"""Largest absolute reward that is not reported as a problem."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}
_SAYS_TYPE = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
"""Keys of a JSON schema that define the type."""


def opening_problems(opening: Any, system_prompt: str) -> Iterator[str]:
    """Yield the problems of the result of ``reset``, except those of its tools."""
    if not isinstance(opening, Opening):
        yield f"it returns {_describe_type(opening)} and not an Opening"
        return
    wrong = [*message_problems(opening.messages, "messages")]
    yield from wrong
    yield from validation.info_problems(opening.info)
    if wrong:
        return
    if not opening.messages and not system_prompt:
        yield "it returns no message, and there is no system prompt: the policy would see nothing"
    elif opening.messages and (problem := find_missing_request(opening.messages)):
        yield f"its opening {problem}"


def tool_problems(tools: Any) -> Iterator[str]:
    """Yield the problems of tool schemas in the format of the OpenAI chat API."""
    if wrong := [*schema_problems(tools)]:
        yield from wrong
        return
    names: set[str] = set()
    for index, function in enumerate(tool["function"] for tool in tools):
        name = function["name"]
        if not _TOOL_NAME.fullmatch(name):
            yield (
                f"tool {index} has the name {name!r}; a name has 1 to 64 letters, digits, "
                f"underscores and hyphens"
            )
        elif name in names:
            yield f"two tools have the name {name!r}"
        else:
            yield from (f"tool {name!r} {text}" for text in _function_problems(function))
        names.add(name)


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
            continue
        kinds = schema.get("type", ())
        if not {*map(str, [kinds] if isinstance(kinds, str) else kinds)} <= _TYPES:
            yield f"has the parameter {name!r} of the unknown type {kinds!r}"
    required = parameters.get("required", ())
    if (
        isinstance(required, str)
        or not isinstance(required, Sequence)
        or not {*map(str, required)} <= {*properties}
    ):
        yield "requires a parameter that it does not have"


def turn_problems(turn: Any) -> Iterator[str]:
    """Yield the problems of the result of ``step``."""
    if not isinstance(turn, Turn):
        yield f"it returns {_describe_type(turn)} and not a Turn"
        return
    if wrong := [*validation.turn_problems(turn)]:
        yield from wrong
    else:
        for index, message in enumerate(turn.messages):
            if message["role"] == "assistant":
                yield (
                    f"messages[{index}] has the role 'assistant', whose words are the policy's own"
                )
    if turn.reward is not None:
        yield from _number_problems("reward", "reward", turn.reward)
    for kind in ("rewards", "metrics"):
        numbers = getattr(turn, kind)
        if not isinstance(numbers, Mapping):
            yield f"{kind} is {_describe_type(numbers)} and not a map"
            continue
        for name, value in numbers.items():
            yield from _number_problems(f"{kind}[{name!r}]", name, value)
    if turn.final and turn.reward is None:
        yield "it is final and has no reward"


def _number_problems(label: str, name: Any, value: Any) -> Iterator[str]:
    if not isinstance(name, str):
        yield f"a name of a reward or metric must be text, not {format_value(name)}"
    elif isinstance(value, bool):
        yield f"the reward or metric {name!r} is of the type bool and no number"
    elif finite_number(value) is None:
        yield f"{label} must be a finite number, not {format_value(value)}"
    elif problem := json_problem(value):
        yield f"a reward or metric is not a plain number: {problem}"
    elif label == "reward" and abs(value) > MAX_REWARD:
        yield (
            f"the reward is {value:g}; rewards beyond {MAX_REWARD:g} drown everything else in "
            f"a batch"
        )
    elif label.startswith("metrics") and name in ("success", "progress") and not 0 <= value <= 1:
        yield f"the metric {name!r} is {value:g} and not between 0 and 1"


def _describe_type(value: Any) -> str:
    return "None" if value is None else f"an object of the type {type(value).__name__}"


def is_solved(turn: Turn) -> bool:
    """Return whether a turn reports that the task is solved."""
    return turn.metrics.get("success") == 1


def ends_episode(turn: Turn) -> bool:
    """Return whether a turn ends the episode, because it is done or the task is solved."""
    return turn.done or is_solved(turn)


def to_plain_json(step: Opening | Turn) -> dict[str, Any]:
    """Return the parts of an opening or a turn that a policy and a trainer see, as plain JSON
    values.

    ``info`` is left out, because it is only for display. The opening or turn must be free of
    problems.
    """
    names = ("messages", "tools") if isinstance(step, Opening) else _POLICY_TURN_FIELDS
    return json.loads(json.dumps({name: getattr(step, name) for name in names}, default=_convert))


_POLICY_TURN_FIELDS = ("messages", "done", "reward", "rewards", "metrics", "final")
"""Fields of a turn that a policy and a trainer see."""


def _convert(value: Any) -> Any:
    """Convert a sequence or mapping of a type that JSON does not support."""
    return dict(value) if isinstance(value, Mapping) else [*value]
