"""What an environment hands out is judged: JSON, messages, schemas of tools, numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from realhf.api.environment import Opening, Turn
from realhf.env.check.contract import not_json, opening_problems, tool_problems, turn_problems

SAID = {"role": "user", "content": "text"}


def tool(name: str = "look", parameters: Any = None, description: str = "Look.") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [1, 2.5, None, True, "ü"]}, ""),
        (math.nan, "x is nan, which is no JSON"),
        ({1: 2}, "x has the key 1, which is no text"),
        ({"a": [set()]}, "x['a'][0] is of the type set, which is no JSON"),
        ("\ud800", "x holds a lone surrogate"),
    ],
)
def test_what_json_cannot_hold_is_named(value: Any, says: str) -> None:
    found = not_json(value, "x")
    assert found.startswith(says) and bool(found) == bool(says)


def test_a_value_that_contains_itself_is_too_deep() -> None:
    """It ends, and does not recurse until the interpreter gives up."""
    value: list[Any] = []
    value.append(value)
    assert "nested more than" in not_json(value, "x")


@pytest.mark.parametrize(
    ("opening", "prompt", "says"),
    [
        (Opening([SAID]), "", []),
        (Opening([]), "You play.", []),
        (Opening([]), "", ["it returns no message, and there is no system prompt: the policy would see nothing"]),
        (None, "", ["it returns None and not an Opening"]),
        (Opening("hello"), "", ["messages is of the type str and not a list of messages"]),  # type: ignore[arg-type]
        (Opening([{"role": "user"}]), "", ["messages[0] has no text as its content"]),
        (Opening([{"role": "god", "content": ""}]), "", ["messages[0] has the role 'god' (known here: "]),
        (Opening([SAID], info={"x": b""}), "", ["info['x'] is of the type bytes, which is no JSON"]),
    ],
)
def test_openings(opening: Any, prompt: str, says: list[str]) -> None:
    found = [*opening_problems(opening, prompt)]
    assert len(found) == len(says) and all(map(str.startswith, found, says)), found


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (Turn([SAID], True, 1.0, {"a": 1}, {"success": 1.0}), []),
        (Turn([{"role": "assistant", "content": "I"}]), ["messages[0] has the role 'assistant'"]),
        (Turn(done=1), ["done is of the type int"]),  # type: ignore[arg-type]
        (Turn(reward=math.inf), ["the reward is inf"]),
        (Turn(reward=True), ["the reward is of the type bool and no number"]),
        (Turn(reward=1e6), ["the reward is 1e+06; rewards beyond 1000 drown"]),
        (Turn(final=True), ["it is final and has no reward"]),
        (Turn(rewards={"style": math.nan}), ["the component 'style' of the reward is nan"]),
        (Turn(metrics={"progress": 1.5}), ["the metric 'progress' is 1.5 and not between 0 and 1"]),
        (Turn(metrics={"success": 1}), []),
        ("yes", ["it returns an object of the type str and not a Turn"]),
    ],
)
def test_turns(turn: Any, says: list[str]) -> None:
    found = [*turn_problems(turn)]
    assert len(found) == len(says) and all(map(str.startswith, found, says)), found


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([tool()], []),
        ([tool(parameters={"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})], []),
        ([{"name": "look"}], ["tool 0 is not a map"]),
        ([tool("no spaces")], ["tool 0 has the name 'no spaces'"]),
        ([tool(), tool()], ["two tools have the name 'look'"]),
        ([tool(description="")], ["tool 'look' has no description"]),
        ([tool(parameters=[])], ["tool 'look' has parameters that are not a JSON schema of the type object"]),
        (
            [tool(parameters={"type": "object", "properties": {"x": {}}})],
            ["tool 'look' has the parameter 'x' without a type"],
        ),
        (
            [tool(parameters={"type": "object", "properties": {"x": {"type": "int"}}})],
            ["tool 'look' has the parameter 'x' of the unknown type 'int'"],
        ),
        (
            [tool(parameters={"type": "object", "properties": {}, "required": ["x"]})],
            ["tool 'look' requires a parameter that it does not have"],
        ),
    ],
)
def test_schemas_of_tools(tools: Any, says: list[str]) -> None:
    found = [*tool_problems(tools)]
    assert len(found) == len(says) and all(map(str.startswith, found, says)), found
