"""The wire's frames: what is accepted, what is refused, and with which code."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest

from realhf.aws.episode.player import check_action, check_reset
from realhf.env.loader.validation import BrokenContract, validate_number
from realhf.env.server.wire import (
    WireError,
    WireRequest,
    encode_error,
    encode_observation,
    encode_reply,
    parse_request,
)


def parse(message: object) -> WireRequest:
    text = message if isinstance(message, str) else json.dumps(message)
    return parse_request(text, check_reset, partial(check_action, max_command_bytes=64))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"type": "reset"}, WireRequest("reset", {})),
        ({"type": "reset", "data": None}, WireRequest("reset", {})),
        (
            {"type": "reset", "data": {"seed": 3, "other": [1]}},
            WireRequest("reset", {"seed": 3, "other": [1]}),
        ),
        (
            {"type": "step", "data": {"command": "aws s3 ls"}},
            WireRequest("step", {"command": "aws s3 ls"}),
        ),
        ({"type": "state", "id": "a"}, WireRequest("state", {}, "a")),
        ({"type": "close", "id": 7}, WireRequest("close", {}, 7)),
    ],
)
def test_accepted_requests(message: object, expected: WireRequest) -> None:
    assert parse(message) == expected


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("", "INVALID_JSON"),
        ("{", "INVALID_JSON"),
        ('{"type":"reset","data":{"seed":NaN}}', "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ('{"type":"reset","data":{"seed":' + "9" * 5000 + "}}", "INVALID_JSON"),
        ([1], "VALIDATION_ERROR"),
        (3, "VALIDATION_ERROR"),
        ({}, "UNKNOWN_TYPE"),
        ({"type": None}, "UNKNOWN_TYPE"),
        ({"type": ["step"]}, "UNKNOWN_TYPE"),
        ({"type": "listen", "data": {}}, "UNKNOWN_TYPE"),
        ({"type": "state", "data": {}}, "VALIDATION_ERROR"),
        ({"type": "reset", "dta": {}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": []}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"seed": "x"}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"seed": True}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"task": "x"}}, "VALIDATION_ERROR"),
        ({"type": "step"}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"command": 3}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"command": "aws", "extra": 1}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"command": "\ud800"}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"command": "é" * 33}}, "VALIDATION_ERROR"),
        ({"type": "close", "id": 1.5}, "VALIDATION_ERROR"),
        ({"type": "close", "id": True}, "VALIDATION_ERROR"),
    ],
)
def test_refused_requests(message: object, code: str) -> None:
    with pytest.raises(WireError) as caught:
        parse(message)
    assert caught.value.code == code
    frame = json.loads(encode_error(caught.value))
    assert frame["type"] == "error" and frame["data"]["code"] == code and frame["data"]["message"]


def test_command_of_exactly_the_limit_is_accepted() -> None:
    assert parse({"type": "step", "data": {"command": "é" * 32}}).data["command"] == "é" * 32


def test_request_id_is_echoed_in_errors_and_replies() -> None:
    with pytest.raises(WireError) as caught:
        parse({"type": "step", "data": {}, "id": "q1"})
    assert json.loads(encode_error(caught.value))["id"] == "q1"
    assert json.loads(encode_reply("state", {"a": 1}, 4)) == {
        "type": "state",
        "data": {"a": 1},
        "id": 4,
    }
    assert "id" not in json.loads(encode_reply("state", {}))


@pytest.mark.parametrize("reward", [math.nan, math.inf, None])
def test_reward_that_json_cannot_hold_is_null(reward: float | None) -> None:
    frame = json.loads(encode_observation({"error": ""}, reward, False))
    assert frame == {
        "type": "observation",
        "data": {"observation": {"error": ""}, "reward": None, "done": False},
    }


def test_reward_beyond_fp32_is_sent_so_that_the_client_names_it() -> None:
    frame = json.loads(encode_observation({"error": ""}, 1e300, False))
    assert frame["data"]["reward"] == 1e300
    with pytest.raises(
        BrokenContract, match=r"the server's reward must be a finite number, not 1e\+300"
    ):
        validate_number(frame["data"]["reward"], "the server's reward")


def test_lone_surrogates_are_sent_as_escapes() -> None:
    assert encode_reply("state", {"a": "\ud800"}).isascii()
