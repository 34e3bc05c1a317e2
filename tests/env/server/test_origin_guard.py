"""The environment server serves programs and its own pages: no foreign page, no foreign host, no
body of another kind, no field without a bound."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from realhf.env.server.access import guard_rules
from realhf.env.server.config import ServerConfig
from realhf.web.guard import RequestGuard
from tests.env.server.fake_stage import Stage

FOREIGN = {
    "another origin": {"Origin": "http://evil.example"},
    "another port of this machine": {"Origin": "http://127.0.0.1:1"},
    "an opaque origin": {"Origin": "null"},
    "no scheme": {"Origin": "127.0.0.1"},
    "a broken origin": {"Origin": "http://["},
    "a name that resolves to this machine": {"Host": "evil.example"},
    "the same with its origin": {"Host": "evil.example", "Origin": "http://evil.example"},
    "a name that begins like the loopback": {"Host": "localhost.evil.example"},
    "a name with an address in it": {"Host": "127.0.0.1.evil.example"},
    "a user in front": {"Host": "localhost@evil.example"},
    "another address": {"Host": "192.0.2.7"},
    "an empty host": {"Host": ""},
    "a page that sends no origin": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "a page of the same site": {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
    "a form in a frame": {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "iframe",
    },
}
_QUICK = {"name": "aws", "arguments": {"command": "quick"}}
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": _QUICK}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    served = Stage(2)
    yield served
    for player in served.players:
        player.finish.set()
    served.server.stop()


def _connect(stage: Stage, headers: dict[str, str]) -> Any:
    headers = dict(headers)
    url = stage.server.url.replace("http", "ws") + "/ws"
    if "Host" not in headers:
        return connect(url, additional_headers=headers, proxy=None)
    port = int(stage.server.url.rpartition(":")[2])  # the client writes the host of its address
    url = f"ws://{headers.pop('Host')}:{port}/ws"
    there = socket.create_connection(("127.0.0.1", port))
    return connect(url, sock=there, additional_headers=headers, proxy=None)


@pytest.mark.parametrize(
    "reason", [name for name in FOREIGN if name not in ("a user in front", "an empty host")]
)
def test_a_foreign_page_opens_no_session(stage: Stage, reason: str) -> None:
    headers = FOREIGN[reason]
    opened = len(stage.players)
    with pytest.raises(InvalidStatus) as refused:
        _connect(stage, headers).close()
    assert refused.value.response.status_code == 403 and len(stage.players) == opened


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/mcp"),
        ("POST", "/reset"),
        ("POST", "/step"),
        ("GET", "/metrics"),
        ("GET", "/state"),
        ("GET", "/nowhere"),
        ("OPTIONS", "/mcp"),
        ("DELETE", "/reset"),
    ],
)
@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_page_reaches_no_route(
    stage: Stage, headers: dict[str, str], method: str, path: str
) -> None:
    opened = len(stage.players)
    answer = httpx.request(method, stage.server.url + path, headers=headers, json=CALL)
    assert answer.status_code == 403 and "Access-Control-Allow-Origin" not in answer.headers
    assert len(stage.players) == opened


@pytest.mark.slow
def test_programs_and_the_servers_own_pages_are_served(stage: Stage) -> None:
    url = stage.server.url
    port = stage.server.url.rpartition(":")[2]
    for headers in (
        {},
        {"Host": "localhost"},
        {"Host": f"localhost:{port}"},
        {"Host": "LOCALHOST"},
        {"Host": "[::1]:8"},
        {"Host": "127.0.0.2"},
        {"Origin": url},
        {"Host": "localhost:1", "Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ):
        assert httpx.get(url + "/metadata", headers=headers).status_code == 200, headers
        assert httpx.post(url + "/mcp", headers=headers, json=CALL).status_code == 200, headers
    for headers in ({}, {"Host": f"localhost:{port}"}, {"Origin": url}):
        with connect(
            url.replace("http", "ws") + "/ws",
            additional_headers={"Origin": headers.get("Origin", url)},
            proxy=None,
        ) as session:
            session.send('{"type":"state"}')
            assert json.loads(session.recv(timeout=300))["type"] == "state"
    link = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }
    assert httpx.get(url + "/health", headers=link).status_code == 200
    assert httpx.post(url + "/reset", headers=link, json={}).status_code == 403


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "",
        "text/plain; application/json",
        "application/jsonp",
    ],
)
@pytest.mark.parametrize("path", ["/mcp", "/reset", "/step"])
def test_a_body_is_json_and_says_so(stage: Stage, path: str, kind: str) -> None:
    """A page may send the other kinds anywhere without asking."""
    opened = len(stage.players)
    answer = httpx.post(
        stage.server.url + path, content=json.dumps(CALL), headers={"Content-Type": kind}
    )
    assert answer.status_code == 415 and len(stage.players) == opened


def test_a_reset_needs_no_body(stage: Stage) -> None:
    assert httpx.post(stage.server.url + "/reset").status_code == 200
    json_of_a_client = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert (
        httpx.post(stage.server.url + "/reset", content=b"{}", headers=json_of_a_client).status_code
        == 200
    )


LONG = "x" * 256
BROKEN = "\ud800"
BIG = 1 << 63
UNBOUNDED = [
    {"type": "reset", "data": {"episode_id": LONG}}, {"type": "reset", "data": {"episode_id": "x" * 900_000}},
    {"type": "reset", "data": {"episode_id": BROKEN}}, {"type": "reset", "data": {"seed": BIG}},
    {"type": "reset", "data": {"seed": -BIG}}, {"type": "reset", "data": {"task_id": LONG}},
    {"type": "reset", "data": {"task_id": BIG}}, {"type": "reset", "data": {"task_id": BROKEN}},
    {"type": "reset", "data": {"split": LONG}}, {"type": "reset", "data": {"split": ["train"]}},
    {"type": "state", "id": LONG}, {"type": "state", "id": BIG}, {"type": "state", "id": BROKEN},
    {"type": "step", "data": {"command": "aws", "metadata": {"a": "x" * 20_000}}},
    {"type": "step", "data": {"command": "aws", "metadata": "text"}},
    {"type": "step", "data": {"command": "aws " + "x" * 9000}},
]  # fmt: skip


@pytest.mark.parametrize("message", UNBOUNDED, ids=lambda message: json.dumps(message)[:60])
def test_every_field_of_the_wire_has_a_bound(stage: Stage, message: dict[str, Any]) -> None:
    with stage.open() as session:
        session.send(json.dumps(message))
        reply = session.recv(timeout=300)
        assert json.loads(reply)["data"]["code"] == "VALIDATION_ERROR" and len(reply) < 1000
        session.send('{"type":"state"}')
        assert json.loads(session.recv(timeout=300))["type"] == "state"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/reset", {"episode_id": LONG}),
        ("/reset", {"episode_id": BROKEN}),
        ("/reset", {"seed": BIG}),
        ("/reset", {"task_id": BIG}),
        ("/reset", {"task_id": LONG}),
        ("/reset", {"task": "x" * 100_000}),
        ("/step", {"action": {"command": BROKEN}}),
        ("/step", {"action": {"command": "aws"}, "request_id": LONG}),
        ("/step", {"action": {"command": "aws"}, "timeout_s": 1e9}),
        ("/step", {"action": {"x" * 100_000: 1}}),
    ],
)
def test_every_field_over_http_has_a_bound(stage: Stage, path: str, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(stage.server.url + path, content=json.dumps(body), headers=headers)
    assert answer.status_code == 422 and len(answer.content) < 1000


def test_the_id_of_a_call_has_a_bound(stage: Stage) -> None:
    for request_id in (LONG, BIG, BROKEN):
        answer = httpx.post(
            stage.server.url + "/mcp",
            content=json.dumps({**CALL, "id": request_id}),
            headers={"Content-Type": "application/json"},
        )
        assert "id" in answer.json()["error"]["message"] and len(answer.content) < 1000


@pytest.mark.parametrize(
    ("settings", "host", "served"),
    [
        ({"host": "0.0.0.0"}, "192.0.2.7:8000", True),
        ({"host": "0.0.0.0"}, "[2001:db8::1]:8000", True),
        ({"host": "0.0.0.0"}, "gpu-box.example:8000", False),
        ({"host": "gpu-box.example"}, "gpu-box.example:8000", True),
        ({"host": "0.0.0.0", "allowed_hosts": "gpu-box.example, other"}, "GPU-box.example", True),
        ({"host": "0.0.0.0", "allowed_hosts": "gpu-box.example, other"}, "third", False),
        ({"host": "0.0.0.0"}, "localhost:8000", True),
        ({"host": "10.0.0.3"}, "10.0.0.3:8000", True),
        ({}, "192.0.2.7:8000", False),
        ({"allowed_hosts": "proxy.example"}, "proxy.example", True),
    ],
)
async def test_hosts_beyond_the_loopback(settings: dict[str, Any], host: str, served: bool) -> None:
    """Addresses cannot be made to resolve elsewhere; names are served when they were told. With a
    token, which is needed there, a browser's request still has to come from a page of the
    server."""
    reached: list[bool] = []
    sent: list[Any] = []

    async def app(*_: Any) -> None:
        reached.append(True)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    guard = RequestGuard(app, guard_rules(ServerConfig(token="t", **settings), ""))
    await guard(
        {"type": "http", "method": "GET", "headers": [(b"host", host.encode())]}, receive, send
    )
    assert (bool(reached), sent[:1] == [] or sent[0]["status"] == 403) == (served, True)
    headers = [(b"host", host.encode()), (b"origin", b"http://evil.example")]
    await guard({"type": "http", "method": "GET", "headers": headers}, receive, send)
    assert len(reached) == served and sent[-2]["status"] == 403
