"""Stateless HTTP, MCP, tokens and the openenv capacity mode, on real server processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from realhf.aws.server.program import AwsServed, EnvServerProcess
from realhf.aws.server_config import AwsServerConfig
from realhf.env.server import mcp
from tests.env.server.fake_stage import FakePool, ask

pytestmark = pytest.mark.slow

TOKEN = "only-for-tests"


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServerProcess]:
    with EnvServerProcess(
        1, "--capacity-mode", "openenv", "--token", TOKEN, "--web", "off"
    ) as process:
        yield process


@pytest.fixture
def http(server: EnvServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=300
    ) as client:
        yield client


@pytest.fixture(autouse=True)
def slot_is_free(server: EnvServerProcess) -> None:
    """What the test before held is given back after its answer, which takes as long as a simulator
    needs."""
    deadline = time.monotonic() + 60
    headers = {"Authorization": f"Bearer {TOKEN}"}
    while (
        "realhf_env_pool_free 1.0" not in httpx.get(server.url + "/metrics", headers=headers).text
    ):
        assert time.monotonic() < deadline, "a slot is still leased"
        time.sleep(0.02)


def open_session(server: EnvServerProcess, token: str = TOKEN) -> ClientConnection:
    headers = {"Authorization": f"Bearer {token}"}
    return connect(server.url.replace("http", "ws") + "/ws", additional_headers=headers, proxy=None)


def rpc(method: str, params: Any = None, request_id: int = 7) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}


CALL = rpc("tools/call", {"name": "aws", "arguments": {"command": "aws s3api list-buckets"}})


@pytest.mark.nightly
def test_stateless_reset_and_step_build_run_and_discard(http: httpx.Client) -> None:
    first = http.post("/reset", json={"seed": 3, "task_id": 101, "unknown": 1}).json()
    assert first["observation"]["task"]["task_id"] == 101 and first["done"] is False
    step = http.post(
        "/step", json={"action": {"command": "aws s3api list-buckets"}, "timeout_s": 20}
    ).json()
    assert step["observation"]["command_success"] and step["observation"]["step_count"] == 1
    assert http.get("/state").json()["step_count"] == 0


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"action": {}},
        {"action": {"command": 3}},
        {"action": {"command": "x" * 9000}},
        {"action": {"command": "aws", "more": 1}},
        [],
    ],
)
def test_a_bad_action_is_422(http: httpx.Client, body: Any) -> None:
    assert http.post("/step", json=body).status_code == 422


def test_a_bad_task_is_422_and_names_the_field(http: httpx.Client) -> None:
    reply = http.post("/reset", json={"task": {"task_id": -1, "difficulty": "warmup"}})
    assert reply.status_code == 422 and "task_id" in reply.text


@pytest.mark.nightly
def test_a_refused_handshake_is_no_error_in_the_log() -> None:
    """A client without a token, or one too many, was told so; the server used to log each such
    answer as its error."""
    with EnvServerProcess(1, "--token", TOKEN, "--web", "off") as server:
        with open_session(server), pytest.raises(InvalidStatus) as full:
            open_session(server)
        with pytest.raises(InvalidStatus) as stranger:
            open_session(server, "wrong")
        assert (full.value.response.status_code, stranger.value.response.status_code) == (503, 401)
        assert server.stop() == 0
        assert "ERROR" not in server.output()


def test_without_the_token_nothing_is_played(server: EnvServerProcess) -> None:
    for path in ("/reset", "/step", "/mcp"):
        assert httpx.post(server.url + path, json={}).status_code == 401
    assert httpx.get(server.url + "/health").status_code == 200
    with pytest.raises(InvalidStatus) as refused:
        open_session(server, "wrong")
    assert refused.value.response.status_code == 401


def test_a_body_without_a_sane_length_is_refused(http: httpx.Client) -> None:
    assert http.post("/mcp", content=iter([b"{}"])).status_code == 413
    assert http.post("/mcp", content=b"x" * ((1 << 20) + 1)).status_code == 413


def test_capacity_in_both_forms(server: EnvServerProcess, http: httpx.Client) -> None:
    with open_session(server):
        full = http.post("/reset", json={})
        assert full.status_code == 503 and full.headers["retry-after"] == "1"
        assert full.json()["active_sessions"] == full.json()["max_sessions"] == 1
        assert http.post("/mcp", json=CALL).json()["error"]["data"]["max_sessions"] == 1
        with open_session(server) as second:
            frame = json.loads(second.recv(timeout=300))
            assert frame["type"] == "error" and frame["data"]["code"] == "CAPACITY_REACHED"
            assert "1/1 sessions active" in frame["data"]["message"]
            with pytest.raises(ConnectionClosed):
                second.recv(timeout=300)
            assert second.close_code == 1000 and second.close_reason == ""
    assert http.post("/reset", json={"task_id": 1}).status_code == 200


def test_mcp_over_http(http: httpx.Client) -> None:
    tools = http.post("/mcp", json=rpc("tools/list")).json()["result"]["tools"]
    assert [tool["name"] for tool in tools] == ["aws"]
    result = http.post("/mcp", json=CALL).json()["result"]
    assert result["isError"] is False and "Buckets" in result["content"][0]["text"]
    broken = http.post(
        "/mcp", content=b"{", headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert broken.json()["error"]["code"] == mcp.PARSE_ERROR


def test_mcp_in_a_session_is_a_step_of_its_episode(server: EnvServerProcess) -> None:
    with open_session(server) as session:
        early = ask(session, {"type": "mcp", "data": CALL})
        assert early["type"] == "mcp" and early["data"]["error"]["code"] == mcp.SERVER_ERROR
        ask(session, {"type": "reset", "data": {"task_id": 101, "seed": 1}})
        call = rpc("tools/call", {"name": "aws", "arguments": {"command": "ls"}})
        refused = ask(session, {"type": "mcp", "data": call, "id": "x"})
        assert (
            refused["id"] == "x"
            and refused["data"]["id"] == 7
            and refused["data"]["result"]["isError"]
        )
        assert refused["data"]["result"]["structuredContent"]["observation"]["refusal"] == "not-aws"
        assert ask(session, {"type": "state"})["data"]["step_count"] == 1


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ([], mcp.INVALID_REQUEST),
        ({"method": "tools/list"}, mcp.INVALID_REQUEST),
        ({"jsonrpc": "2.0", "id": True, "method": "tools/list"}, mcp.INVALID_REQUEST),
        (rpc("resources/list"), mcp.UNKNOWN_METHOD),
        (rpc("tools/call"), mcp.INVALID_PARAMS),
        (rpc("tools/call", {"name": "rm", "arguments": {}}), mcp.INVALID_PARAMS),
        (rpc("tools/call", {"name": "aws", "arguments": {"command": 1}}), mcp.INVALID_PARAMS),
        (
            rpc("tools/call", {"name": "aws", "arguments": {"command": "x" * 65}}),
            mcp.INVALID_PARAMS,
        ),
        (
            rpc("tools/call", {"name": "aws", "arguments": {"command": "\ud800"}}),
            mcp.INVALID_PARAMS,
        ),
    ],
)
def test_a_wrong_rpc_request_is_answered_with_its_code(message: Any, code: int) -> None:
    answer = mcp.check_request(
        message, AwsServed(AwsServerConfig(max_command_bytes=64), FakePool(1))
    )
    assert answer is not None and answer["error"]["code"] == code
