"""What a client sends is read or refused; what the policy wrote is never refused, however wrong its
calls are."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from realhf.env.server import wire
from realhf.env.server.spec.messages import to_message, validate_action, validate_reset
from realhf.env.server.wire import WireError

TEXTS = [
    "",
    "say",
    "\ud800",
    "\x00",
    "{",
    '{"a": 1}',
    '{"a": 1} x',
    "[1]",
    "null",
    "é" * 300,
    '{"a": 1, "a": 2}',
]
KEYS = [
    "name",
    "arguments",
    "function",
    "id",
    "type",
    "content",
    "tool_calls",
    "text",
    "reasoning",
    "token_count",
    "x",
]


def drawn(draw: random.Random, depth: int = 0) -> Any:
    shape = draw.randrange(7 if depth < 4 else 4)
    if shape == 0:
        return draw.choice([None, True, False])
    if shape == 1:
        return draw.choice([0, -1, 1 << 63, -(1 << 64), 1e308, -0.0, 10**400])
    if shape < 4:
        return draw.choice(TEXTS)
    if shape == 4:
        return [drawn(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(KEYS): drawn(draw, depth + 1) for _ in range(draw.randrange(5))}


@pytest.mark.slow
def test_no_action_raises_anything_but_a_refusal() -> None:
    """Ten thousand values that are nearly actions; whatever is taken becomes a message whose calls
    are sound or say why they are not."""
    draw = random.Random(1)
    taken = 0
    sound = 0
    broken = 0
    for _ in range(10_000):
        action = {"content": "x", "tool_calls": [drawn(draw) for _ in range(draw.randrange(4))]}
        if draw.random() < 0.3:
            action |= {draw.choice(KEYS): drawn(draw)}
        try:
            message = to_message(validate_action(action))
        except WireError as refused:
            assert refused.code == "VALIDATION_ERROR" and len(refused.message) < 200
            continue
        taken += 1
        for call in message.tool_calls:
            assert (
                isinstance(call.name, str)
                and (call.problem or call.name)
                and (not call.problem or not call.arguments)
            )
            json.dumps(dict(call.arguments)).encode()
            sound = sound + (not call.problem)
            broken = broken + bool(call.problem)
    assert taken > 5000 and sound > 20 and broken > 1000


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"a": 1}', ""),
        (' {"a": 1}\n', ""),
        ({"a": 1}, ""),
        ('{"a": 1} and more', "and then"),
        ('{"a": 1, "a": 2}', "given twice"),
        ('{"a": 1e999}', "64 bits"),
        ('{"a": "\\ud800"}', "surrogate"),
        ("[1]", "not a list"),
        (None, "not null"),
        ({"a": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}, "deeper"),
    ],
)
def test_arguments_are_objects_or_their_json(arguments: Any, problem: str) -> None:
    message = to_message(validate_action({"tool_calls": [{"name": "say", "arguments": arguments}]}))
    call = message.tool_calls[0]
    assert call.name == "say" and (
        problem in call.problem if problem else call.arguments == {"a": 1}
    )


def test_no_nesting_is_too_deep_to_be_answered() -> None:
    """Whatever depth the frame could be read with: the call has a problem, and nothing raises."""
    read = 0
    for depth in (40, 300, 700, 900, 940, 960, 975, 990, 3000):
        nested = "[" * depth + "]" * depth
        text = (
            '{"type":"step","data":{"tool_calls":[{"name":"say","arguments":{"a":'
            + nested
            + "}}]}}"
        )
        try:
            request = wire.parse_request(text, validate_reset, validate_action)
        except WireError as refused:
            assert refused.code == "INVALID_JSON"
            continue
        read += 1
        assert "deep" in to_message(request.data).tool_calls[0].problem
    assert read >= 4


def test_what_is_said_beside_the_content_arrives() -> None:
    """``text`` is the content where it is absent, and the content is ``text``."""
    said = {
        "content": "a",
        "text": "<think>b</think>a",
        "reasoning": "b",
        "token_count": 7,
        "metadata": {},
    }
    message = to_message(validate_action(said))
    assert (message.content, message.text, message.reasoning, message.token_count) == (
        "a",
        said["text"],
        "b",
        7,
    )
    assert to_message(validate_action({"content": "a"})).text == "a"
    assert to_message(validate_action({"text": "a"})).content == "a"
    assert to_message(validate_action({"tool_calls": [], "content": None})).content == ""


def test_null_is_what_is_absent() -> None:
    assert validate_reset({"seed": None, "task_id": 3, "episode_id": None}) == {"task_id": 3}
    assert validate_reset(None) == {}
