"""What a check says: calls that fit a schema, and messages that are wrong in every way that a policy can be."""

from __future__ import annotations

import random
from typing import Any

from realhf.env.check.scripts import call_text, policy_turn, sample, trying, wrong_messages

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "integer", "minimum": 3},
        "mode": {"enum": ["r", "w"]},
        "names": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "properties": {"x": {"type": "boolean"}}},
        "either": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}]


def test_a_sample_fits_its_schema() -> None:
    for seed in range(20):
        found: dict[str, Any] = sample(SCHEMA, random.Random(seed))
        assert isinstance(found["path"], str) and found["lines"] >= 3 and found["mode"] in ("r", "w")
        assert all(isinstance(name, str) for name in found["names"])
        assert isinstance(found["deep"]["x"], bool) and isinstance(found["either"], float)


def test_trying_is_the_same_for_the_same_seed_and_calls_what_is_there() -> None:
    turns = trying(TOOLS, 5, 4)
    assert turns == trying(TOOLS, 5, 4) != trying(TOOLS, 6, 4)
    calls = [call for text in turns for call in policy_turn(text, TOOLS).tool_calls]
    assert [(call.name, call.problem) for call in calls] == [("look", "")] * 4


def test_wrong_messages_reach_an_environment_as_a_policy_would_bring_them_about() -> None:
    """Each is what the parser of turns makes of a text: broken calls have a problem, no text has half a character."""
    said = {name: message for name, message in wrong_messages(TOOLS)}
    assert said["an empty message"].content == ""
    assert said["a call of an unknown tool"].tool_calls[0].name == "no_such_tool"
    assert said["a call that is no JSON"].tool_calls[0].problem
    assert len(said["30 calls at once"].tool_calls) == 30
    assert said["a call of 'look' without arguments"].tool_calls[0].arguments == {}
    assert len(said["a message of 200,000 characters"].content) == 200_000
    assert all(message.text.encode() is not None for message in said.values())


def test_a_call_is_read_back_as_it_was_written() -> None:
    [call] = policy_turn(call_text("look", {"path": 'ü "x" </tool_call>'}), TOOLS).tool_calls
    assert (call.name, call.arguments, call.problem) == ("look", {"path": 'ü "x" </tool_call>'}, "")
