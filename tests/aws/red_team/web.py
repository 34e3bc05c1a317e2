"""What a web page in a browser on the server's machine can do, as data, and a range that plays it
on a real server.

A page sends what it likes to any port, as far as forms and scripts can without asking for leave; a
name of its own that resolves to the loopback makes its requests same-origin. ``expected`` is the
HTTP status.
"""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from realhf.aws.episode.player import EpisodePlayer
from realhf.aws.server.program import AwsServed
from realhf.aws.server_config import AwsServerConfig
from realhf.aws.simulator.pool import MiniStackPool
from realhf.env.server.server import EnvServer, listen
from tests.aws.red_team.attacks import Tried

WEB_ROWS = {20: "web pages"}
_CALL = json.dumps(
    {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "aws", "arguments": {"command": "aws s3 mb s3://made-by-a-page"}},
    }
)
_STEP = json.dumps({"action": {"command": "aws s3 mb s3://made-by-a-page"}})
_FORM = "Action=CreateUser&UserName=ghost&Version=2010-05-08"
_PAGES = (
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://localhost:1"},
    {"Origin": "https://127.0.0.1.evil.example"}, {"Host": "evil.example", "Origin": "http://evil.example"},
    {"Host": "evil.example"}, {"Host": "localhost.evil.example"}, {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
)  # fmt: skip
_KINDS = (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/json",
)


@dataclass(frozen=True)
class WebAttack:
    """``to``: the environment ``server`` or the port of a ``simulator``; ``opens``: as a
    WebSocket's handshake."""

    row: int
    to: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: str
    expected: int
    opens: bool = False


def _attacks() -> Iterator[WebAttack]:
    for page in _PAGES:
        headers = tuple(page.items())
        yield WebAttack(20, "server", "GET", "/ws", headers, "", 403, opens=True)
        for path in ("/metrics", "/state", "/metadata"):
            yield WebAttack(20, "server", "GET", path, headers, "", 403)
        for kind in _KINDS:
            for path, body in (("/mcp", _CALL), ("/reset", "{}"), ("/step", _STEP)):
                yield WebAttack(
                    20, "server", "POST", path, (*headers, ("Content-Type", kind)), body, 403
                )
        for path in ("/", "/_ministack/reset", "/_ministack/config", "/survivor"):
            form = ("Content-Type", "application/x-www-form-urlencoded")
            yield WebAttack(20, "simulator", "POST", path, (*headers, form), _FORM, 403)
    for kind in _KINDS[:3]:
        yield WebAttack(20, "server", "POST", "/mcp", (("Content-Type", kind),), _CALL, 415)
    long = json.dumps({"episode_id": "x" * 900_000})
    yield WebAttack(20, "server", "POST", "/reset", (("Content-Type", _KINDS[3]),), long, 422)
    for path in (
        "/_ministack/reset",
        "/_realhf/reset",
        "/%5fministack/config",
        "//_ministack/reset",
    ):
        yield WebAttack(20, "simulator", "POST", path, (), "{}", 403)


WEB_ATTACKS = tuple(_attacks())


class WebRange:
    """A real server on ``pool`` and one leased slot beside it, whose world must not change."""

    def __init__(self, pool: MiniStackPool) -> None:
        self._pool = pool
        self._slot = pool.acquire()
        self._slot.reset()
        self._slot.state.call("s3", "CreateBucket", {"Bucket": "survivor"})
        config = AwsServerConfig(port=0, pool_size=1, web="off")
        self._listener = listen("127.0.0.1", 0)
        self._server = EnvServer(
            AwsServed(config, pool, lambda slot: EpisodePlayer(slot, 5)), config, self._listener
        )
        self._server.start()
        self._leases = pool.metrics()["acquired"]

    def close(self) -> None:
        """Give the slot back and end the server."""
        self._server.stop()
        self._listener.close()
        self._pool.release(self._slot)

    def attempt(self, attack: WebAttack) -> Tried:
        """Send it; the status is what is observed."""
        port = (
            int(self._server.url.rpartition(":")[2]) if attack.to == "server" else self._slot.port
        )
        status = _send(port, attack)
        effects = []
        if self._pool.metrics()["acquired"] != self._leases:
            effects.append("a slot was leased")
        if [bucket["Name"] for bucket in self._call("s3", "ListBuckets")["Buckets"]] != [
            "survivor"
        ]:
            effects.append("a simulator's world changed")
        if self._call("iam", "ListUsers")["Users"]:
            effects.append("a user was made")
        name = f"{attack.method} {attack.to}{attack.path} {attack.headers}"
        return Tried(attack.row, name, f"HTTP {attack.expected}", f"HTTP {status}", tuple(effects))

    def _call(self, service: str, operation: str) -> dict[str, Any]:
        return self._slot.state.call(service, operation)


def _send(port: int, attack: WebAttack) -> int:
    headers = {
        "Host": f"127.0.0.1:{port}",
        "Connection": "close",
        "Content-Length": str(len(attack.body)),
    }
    if attack.opens:
        key = base64.b64encode(b"0123456789abcdef").decode()
        headers |= {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": key,
        }
        del headers["Content-Length"]
    lines = [f"{name}: {value}" for name, value in (headers | dict(attack.headers)).items()]
    head = "\r\n".join([f"{attack.method} {attack.path} HTTP/1.1", *lines, "", ""])
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        connection.sendall(head.encode() + attack.body.encode())
        return int(connection.makefile("rb").readline().split()[1])
