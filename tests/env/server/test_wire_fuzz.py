"""Whatever is sent, a session answers with one frame of the wire and goes on: 10,000 hostile frames
and a burst."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import connect

from realhf.aws.server.program import AwsServed, EnvServerProcess
from realhf.aws.server_config import AwsServerConfig
from realhf.env.server import mcp, wire
from tests.env.server.fake_stage import FakePool, ask

MAX_COMMAND = 8192
SERVED = AwsServed(AwsServerConfig(max_command_bytes=MAX_COMMAND), FakePool(1))
CODES = {wire.INVALID_JSON, wire.UNKNOWN_TYPE, wire.VALIDATION_ERROR, wire.EXECUTION_ERROR}

COUNT = 10_000
KINDS = ["reset", "step", "state", "close", "mcp", "", "RESET"]
FIELDS = [
    "command",
    "task",
    "task_id",
    "seed",
    "method",
    "jsonrpc",
    "params",
    "episode_id",
    "chaos",
]
ODD_TEXTS = [
    "",
    "\x00",
    "\ud800",
    "é" * 3000,
    "\u202e",
    "\ufeff",
    "null",
    "aws s3 ls",
    "tools/call",
    "2.0",
    "🦊",
]
ODD_NUMBERS = [
    0,
    -1,
    1 << 63,
    -(1 << 64),
    10**400,
    1e308,
    5e-324,
    -0.0,
    float("nan"),
    float("inf"),
    float("-inf"),
]
BROKEN = ["[" * 5000, '{"type":' * 2000, "\x00", "NaN", '{"type":"step","data":NaN}', "\ufeff{}"]


def frames(count: int, seed: int) -> Iterator[str]:
    """Frames that nearly are requests, other JSON values, cut ones, and plain texts."""
    draw = random.Random(seed)
    for _ in range(count):
        shape = draw.randrange(8)
        if shape < 4:
            yield json.dumps(message(draw))
        elif shape == 4:
            yield json.dumps(json_value(draw))
        elif shape == 5:
            yield text(draw)
        elif shape == 6:
            whole = json.dumps(message(draw))
            yield whole[: draw.randrange(len(whole))]
        else:
            yield draw.choice(BROKEN)


def message(draw: random.Random) -> dict[str, Any]:
    """A request with a field, a kind or a value that does not belong there, more often than not."""
    kind = draw.choice(KINDS) if draw.random() < 0.8 else json_value(draw)
    made = {"type": kind} | {
        name: json_value(draw) for name in ("id", "more") if draw.random() < 0.3
    }
    if draw.random() < 0.8:
        fields = {name: json_value(draw) for name in draw.sample(FIELDS, draw.randrange(5))}
        known = (
            {"method": draw.choice(["tools/call", "tools/list"]), "jsonrpc": "2.0"}
            if draw.random() < 0.3
            else {}
        )
        made["data"] = fields | known if draw.random() < 0.8 else json_value(draw)
    return made


def json_value(draw: random.Random, depth: int = 0) -> Any:
    shape = draw.randrange(7 if depth < 3 else 5)
    if shape < 2:
        return draw.choice([None, True, False]) if shape else text(draw)
    if shape < 5:
        return (
            draw.choice(ODD_NUMBERS)
            if shape == 2
            else draw.choice([draw.randrange(-300, 300), draw.uniform(-9, 9)])
        )
    values = [json_value(draw, depth + 1) for _ in range(draw.randrange(5))]
    return values if shape == 5 else {text(draw)[:8]: value for value in values}


def text(draw: random.Random) -> str:
    if draw.random() < 0.3:
        return draw.choice(ODD_TEXTS)
    limit = draw.choice([0x7F, 0x7FF, 0xFFFF, 0x10FFFF])
    return "".join(chr(draw.randint(0, limit)) for _ in range(draw.randrange(12)))


@pytest.mark.slow
def test_ten_thousand_frames_are_requests_or_error_frames() -> None:
    accepted = sum(check_frame(text) for text in frames(COUNT, seed=1))
    assert COUNT // 50 < accepted < COUNT // 2, "both sides of the door are tried"


def check_frame(text: str) -> bool:
    """Whether it was taken for a request."""
    try:
        request = wire.parse_request(text, SERVED.check_reset, SERVED.check_action)
    except wire.WireError as error:
        frame = json.loads(wire.encode_error(error))
        assert (
            frame["type"] == "error" and frame["data"]["code"] in CODES and frame["data"]["message"]
        )
        assert len(frame["data"]["message"]) < 400, "an error does not repeat what was sent"
        return False
    assert request.kind in ("reset", "step", "state", "close", "mcp") and isinstance(
        request.data, dict
    )
    if request.kind == "mcp":
        answer = mcp.check_request(request.data, SERVED)
        assert answer is None or answer["jsonrpc"] == "2.0"
    return True


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServerProcess]:
    with EnvServerProcess(1, "--max-steps", "10000", "--web", "off") as process:
        yield process


COMMANDS = [
    "",
    "aws",
    "aws s3",
    "aws 'unbalanced",
    'aws "',
    "aws s3 ls \x00",
    "aws s3 ls; id",
    "aws\ns3 ls",
    "aws s3api create-bucket --bucket " + "é" * 300,
    "\u202eaws s3 ls",
    "aws " * 900,
    "aws s3 ls \ud800",
    "x" * 100_000,
    "aws sts get-caller-identity --query '" + "[" * 500 + "'",
    "🦊" * 2000,
]


@pytest.mark.sim
def test_a_session_survives_hostile_frames_and_still_plays(server: EnvServerProcess) -> None:
    sent = [text for text in frames(300, seed=2) if _is_text(text) and not _ends_the_session(text)]
    with connect(server.url.replace("http", "ws") + "/ws", proxy=None, max_size=None) as session:
        ask(session, {"type": "reset", "data": {"task_id": 101, "seed": 1}})
        for frame in [*sent, b"", b"\xff\xfe", b"[1]", *(_step(command) for command in COMMANDS)]:
            assert ask(session, frame)["type"] in ("error", "observation", "state", "mcp")
        ask(session, {"type": "reset", "data": {"task_id": 101, "seed": 1}})
        alive = ask(session, _step("aws sts get-caller-identity"))
        assert alive["data"]["observation"]["command_success"]


@pytest.mark.nightly
@pytest.mark.sim
def test_a_burst_of_thousands_is_answered_in_order(server: EnvServerProcess) -> None:
    burst = 3000
    with connect(server.url.replace("http", "ws") + "/ws", proxy=None) as session:
        for number in range(burst):
            session.send(json.dumps({"type": "nonsense" if number % 3 else "state", "id": number}))
        assert [json.loads(session.recv(timeout=300))["id"] for _ in range(burst)] == list(
            range(burst)
        )


def _step(command: str) -> str:
    return json.dumps({"type": "step", "data": {"command": command}})


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ends_the_session(text: str) -> bool:
    try:
        return wire.parse_request(text, SERVED.check_reset, SERVED.check_action).kind == "close"
    except wire.WireError:
        return False
