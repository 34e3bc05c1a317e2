"""What an environment hands out is judged: JSON, messages, schemas of tools, numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from realhf.api.environment import Opening, Turn
from realhf.env.check.contract import opening_problems, tool_problems, turn_problems

SAID = {"role": "user", "content": "text"}


def tool(name: str = "look", parameters: Any = None, description: str = "Look.") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@pytest.mark.parametrize(
    ("opening", "prompt", "says"),
    [
        (Opening([SAID]), "", []),
        (Opening([]), "You play.", []),
        (Opening([]), "", ["it returns no message, and there is no system prompt: the policy would see nothing"]),
        (None, "", ["it returns None and not an Opening"]),
        (Opening("hello"), "", ["messages must be a list of messages, not 'hello'"]),  # type: ignore[arg-type]
        (Opening([{"role": "user"}]), "", ["messages[0] has no content"]),
        (Opening([{"role": "god", "content": ""}]), "", ["messages[0]: the role is one of "]),
        (Opening([{"role": "assistant", "tool_calls": [{}]}]), "", []),
        (Opening([SAID], info={"x": b""}), "", ["info: bytes is not JSON"]),
        (
            Opening([{"role": "user"}, SAID, {"role": "god", "content": ""}], info=[]),  # type: ignore[arg-type]
            "",
            ["messages[0] has no content", "messages[2]: the role is one of ", "info must be a map, not []"],
        ),
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
        (Turn([{"role": "god", "content": ""}]), ["messages[0]: the role is one of system, user, tool: 'god'"]),
        (Turn(done=1), ["done must be true or false, not 1"]),  # type: ignore[arg-type]
        (Turn(reward=math.inf), ["reward must be a finite number, not inf"]),
        (Turn(reward=True), ["the reward or metric 'reward' is of the type bool and no number"]),
        (
            Turn(reward=True, rewards={"reward": 1.0}),
            ["the reward or metric 'reward' is of the type bool and no number"],
        ),
        (Turn(rewards=None), ["rewards is None and not a map"]),  # type: ignore[arg-type]
        (Turn(metrics=[]), ["metrics is an object of the type list and not a map"]),  # type: ignore[arg-type]
        (Turn(reward=1e6), ["the reward is 1e+06; rewards beyond 1000 drown"]),
        (Turn(final=True), ["it is final and has no reward"]),
        (Turn(rewards={"style": math.nan}), ["rewards['style'] must be a finite number, not nan"]),
        (Turn(metrics={"progress": 1.5}), ["the metric 'progress' is 1.5 and not between 0 and 1"]),
        (Turn(metrics={"success": 1}), []),
        (
            Turn([{"role": "user"}], 1, math.nan, metrics={"progress": 2}),  # type: ignore[arg-type]
            [
                "messages[0] has no",
                "done must be",
                "reward must be a finite number, not nan",
                "the metric 'progress' is",
            ],
        ),
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
        ([{"name": "look"}, tool(), "x"], ["tools[0] must be {", "tools[2] must be {"]),
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
