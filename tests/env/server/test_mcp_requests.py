"""Requests in the form of MCP's streamable HTTP that are answered without its SDK."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from realhf.env.server.mcp import INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR, SERVER_ERROR
from realhf.env.server.mcp_endpoint import (
    HANDSHAKE_VERSIONS,
    SESSION_HEADER,
    UNSUPPORTED_VERSION,
    RefusedRequest,
    parse_reset_query,
)
from tests.env.server.fake_stage import Stage

ACCEPT = {"Accept": "application/json, text/event-stream"}
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 5,
    "method": "initialize",
    "params": {
        "protocolVersion": HANDSHAKE_VERSIONS[-1],
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage(token="only-for-tests")
    yield stage
    stage.server.stop()


@pytest.fixture
def http(stage: Stage) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer only-for-tests", **ACCEPT}
    with httpx.Client(base_url=stage.server.url, headers=headers) as client:
        yield client


def refused(answer: httpx.Response, status: int, code: int, told: str) -> dict[str, Any]:
    assert answer.status_code == status and answer.json()["jsonrpc"] == "2.0"
    error = answer.json()["error"]
    assert error["code"] == code and told in error["message"], error
    return answer.json()


@pytest.mark.skipif(find_spec("mcp") is not None, reason="the SDK is installed here")
def test_without_the_sdk_a_client_reads_which_extra_it_needs(
    stage: Stage, http: httpx.Client
) -> None:
    told = refused(http.post("/mcp", json=INITIALIZE), 501, SERVER_ERROR, "the extra 'mcp'")
    assert told["id"] == 5 and "pip install" in told["error"]["message"]
    assert not stage.players and stage.pool.free_count == 1


def test_every_method_needs_the_token(stage: Stage) -> None:
    for method in ("POST", "GET", "DELETE"):
        for headers in (ACCEPT, {SESSION_HEADER: "x"}, {}):
            answer = httpx.request(method, f"{stage.server.url}/mcp", headers=headers)
            assert answer.status_code == 401, (method, headers)


def test_a_client_of_a_revision_without_sessions_is_sent_to_initialize(http: httpx.Client) -> None:
    discover = {"jsonrpc": "2.0", "id": "d", "method": "server/discover", "params": {}}
    versions = {"MCP-Protocol-Version": "2026-07-28"}
    for message, headers in ((discover, {}), (discover, versions), (INITIALIZE, versions)):
        answer = http.post("/mcp", json=message, headers=headers)
        told = refused(answer, 400, UNSUPPORTED_VERSION, "initialize")
        assert told["error"]["data"]["supported"] == [*HANDSHAKE_VERSIONS]
        assert told["id"] == message["id"]


def test_requests_outside_a_session_are_refused(http: httpx.Client) -> None:
    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    refused(http.post("/mcp", json=listing), 400, INVALID_REQUEST, "begins with initialize")
    refused(http.get("/mcp"), 400, INVALID_REQUEST, "is missing")
    gone = {SESSION_HEADER: "0" * 32}
    for method in ("POST", "GET", "DELETE"):
        answer = http.request(method, "/mcp", headers=gone, json=listing)
        refused(answer, 404, INVALID_REQUEST, "Session not found")
    json = {"Content-Type": "application/json"}
    refused(http.post("/mcp", content=b"{", headers=json), 400, PARSE_ERROR, "not JSON")
    refused(http.post("/mcp", content=b"[1]", headers=json), 400, INVALID_REQUEST, "an object")
    assert http.post("/mcp", content=b"x" * ((1 << 20) + 1), headers=json).status_code == 413
    assert http.post("/mcp", content=b"{}").status_code == 415


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("task=3", "unknown parameter 'task'"),
        ("seed=1&seed=2", "seed is twice"),
        ("seed=x", "seed in the address must be an integer, not 'x'"),
        ("seed=", "must be an integer"),
        ("seed=1.0", "must be an integer"),
        (f"seed={'9' * 30}", "seed is not from"),
        (f"task_id={'x' * 300}", "task_id is longer"),
    ],
)
def test_a_wrong_address_names_its_parameter(
    stage: Stage, http: httpx.Client, query: str, told: str
) -> None:
    refused(http.post(f"/mcp?{query}", json=INITIALIZE), 400, INVALID_PARAMS, told)
    assert not stage.players and stage.pool.free_count == 1


def test_the_query_of_an_address_is_a_reset() -> None:
    assert parse_reset_query(b"") == {}
    assert parse_reset_query(b"task_id=101&seed=-7") == {"task_id": 101, "seed": -7}
    assert parse_reset_query(b"task_id=007&split=heldout") == {"task_id": "007", "split": "heldout"}
    assert parse_reset_query(b"task_id=a%26b") == {"task_id": "a&b"}
    with pytest.raises(RefusedRequest):
        parse_reset_query(b"Seed=1")
