"""Whatever is sent, a session answers with one frame of the wire and goes on: 10,000 hostile frames and a burst."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from realhf.env import mcp, wire
from realhf.env.server_process import EnvServerProcess

MAX_COMMAND = 8192
CODES = {wire.INVALID_JSON, wire.UNKNOWN_TYPE, wire.VALIDATION_ERROR, wire.EXECUTION_ERROR}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=5,
)
kinds = st.sampled_from(["reset", "step", "state", "close", "mcp", "", "RESET"]) | st.text() | json_values
payloads = json_values | st.fixed_dictionaries(
    {}, optional={"command": json_values, "task": json_values, "task_id": json_values, "seed": json_values,
                  "method": st.sampled_from(["tools/call", "tools/list"]), "jsonrpc": st.just("2.0"),
                  "params": json_values, "episode_id": json_values, "chaos": json_values}
)
messages = st.fixed_dictionaries({"type": kinds}, optional={"data": payloads, "id": json_values, "more": json_values})
frames = st.one_of(
    messages.map(json.dumps),
    json_values.map(json.dumps),
    st.text(),
    messages.map(lambda message: json.dumps(message)[:-1]),
    st.sampled_from(["[" * 5000, '{"type":' * 2000, "\x00", "NaN", '{"type":"step","data":NaN}', "\ufeff{}"]),
)


@settings(max_examples=1_000, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(frames, min_size=10, max_size=10))
def test_ten_thousand_frames_are_requests_or_error_frames(texts: list[str]) -> None:
    for text in texts:
        check_frame(text)


def check_frame(text: str) -> None:
    try:
        request = wire.parse_request(text, max_command_bytes=MAX_COMMAND)
    except wire.WireError as error:
        frame = json.loads(wire.encode_error(error))
        assert frame["type"] == "error" and frame["data"]["code"] in CODES and frame["data"]["message"]
        assert len(frame["data"]["message"]) < 400, "an error does not repeat what was sent"
        return
    assert request.kind in ("reset", "step", "state", "close", "mcp") and isinstance(request.data, dict)
    if request.kind == "mcp":
        answer = mcp.checked(request.data, MAX_COMMAND)
        assert answer is None or answer["jsonrpc"] == "2.0"


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServerProcess]:
    with EnvServerProcess(1, "--max-steps", "10000", "--web", "off") as process:
        yield process


def exchange(session: Any, frame: str | bytes) -> dict[str, Any]:
    session.send(frame)
    return json.loads(session.recv(timeout=20))


COMMANDS = ["", "aws", "aws s3", "aws 'unbalanced", 'aws "', "aws s3 ls \x00", "aws s3 ls; id", "aws\ns3 ls",
            "aws s3api create-bucket --bucket " + "é" * 300, "\u202eaws s3 ls", "aws " * 900, "aws s3 ls \ud800",
            "x" * 100_000, "aws sts get-caller-identity --query '" + "[" * 500 + "'", "🦊" * 2000]  # fmt: skip


@pytest.mark.sim
def test_a_session_survives_hostile_frames_and_still_plays(server: EnvServerProcess) -> None:
    sent: list[str | bytes] = []

    @settings(max_examples=300, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(frames)
    def collect(text: str) -> None:
        if _is_text(text) and not _ends_the_session(text):
            sent.append(text)

    collect()
    with connect(server.url.replace("http", "ws") + "/ws", proxy=None, max_size=None) as session:
        exchange(session, json.dumps({"type": "reset", "data": {"task_id": 101, "seed": 1}}))
        for frame in [*sent, b"", b"\xff\xfe", b"[1]", *(_step(command) for command in COMMANDS)]:
            assert exchange(session, frame)["type"] in ("error", "observation", "state", "mcp")
        exchange(session, json.dumps({"type": "reset", "data": {"task_id": 101, "seed": 1}}))
        alive = exchange(session, _step("aws sts get-caller-identity"))
        assert alive["data"]["observation"]["command_success"]


@pytest.mark.sim
def test_a_burst_of_thousands_is_answered_in_order(server: EnvServerProcess) -> None:
    burst = 3000
    with connect(server.url.replace("http", "ws") + "/ws", proxy=None) as session:
        for number in range(burst):
            session.send(json.dumps({"type": "nonsense" if number % 3 else "state", "id": number}))
        assert [json.loads(session.recv(timeout=30))["id"] for _ in range(burst)] == list(range(burst))


@pytest.mark.sim
def test_ten_megabytes_end_the_session_and_not_the_server(server: EnvServerProcess) -> None:
    url = server.url.replace("http", "ws") + "/ws"
    with pytest.raises((ConnectionClosed, EOFError, OSError)), connect(url, proxy=None) as session:
        session.send(_step("aws " + "x" * (10 << 20)))
        session.recv(timeout=20)
    with connect(server.url.replace("http", "ws") + "/ws", proxy=None) as session:
        assert exchange(session, json.dumps({"type": "state"}))["type"] == "state"


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
        return wire.parse_request(text, max_command_bytes=MAX_COMMAND).kind == "close"
    except wire.WireError:
        return False
