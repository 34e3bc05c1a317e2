"""Guards everything that the environment server serves: requests must be meant for it, and come from no foreign page.

A browser sends whatever page asks it to any port of its own machine, with or without an answer for the page. Such
requests say where they come from (Origin, Sec-Fetch-Site), or, when a foreign name was made to resolve to this address,
where they were meant to go (Host). Programs send no Origin and are not concerned. Source:
docs/reference/environment.md 1, 2.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from realhf.base.loopback import host_of, is_loopback_host
from realhf.env.server.config import ServerConfig

_NO_PAGE = frozenset({"same-origin", "none"})


class OriginGuard:
    """Answers HTTP and WebSocket requests of foreign pages, or for foreign hosts, with 403; an ASGI middleware.

    Served are loopback hosts, the configured host and ``allowed_hosts``; where the server listens on more than the
    loopback, which takes a token, also addresses and the name of the machine.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._option = config.named("allowed_hosts")
        named = [config.host, *config.allowed_hosts.split(",")]
        self._hosts = {name.strip().strip("[]").lower() for name in named} - {""}
        self._open = not is_loopback_host(config.host)
        if self._open:
            self._hosts.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with 403."""
        problem = self._problem(scope) if scope["type"] in ("http", "websocket") else ""
        if not problem:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await refuse_handshake(scope, send, 403, {"code": "FOREIGN_ORIGIN", "message": problem})
        else:
            said = [(b"content-type", b"application/json")]
            body = json.dumps({"detail": problem, "code": "FOREIGN_ORIGIN"}).encode()
            await send({"type": "http.response.start", "status": 403, "headers": said})
            await send({"type": "http.response.body", "body": body})

    def _problem(self, scope: Mapping[str, Any]) -> str:
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        if len(hosts) != 1 or not self._serves(host_of(hosts[0])):
            return f"this host is not served here; {self._option} names further ones that clients may use"
        if origins and (len(origins) > 1 or not _same(origins[0], hosts[0])):
            return "only pages of this server may call it; programs send no Origin"
        if not set(_values(scope, b"sec-fetch-site")) <= _NO_PAGE and not _is_visit(scope):
            return "only pages of this server may call it"
        return ""

    def _serves(self, host: str) -> bool:
        if is_loopback_host(host) or host in self._hosts:
            return True
        return self._open and _is_address(host)


def _is_visit(scope: Mapping[str, Any]) -> bool:
    """Return whether somebody follows a link from elsewhere: the page that sent them sees nothing of the answer."""
    return (
        scope.get("method") == "GET"
        and _values(scope, b"sec-fetch-mode") == ["navigate"]
        and (_values(scope, b"sec-fetch-dest") == ["document"])
    )


def _same(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _values(scope: Mapping[str, Any], name: bytes) -> list[str]:
    return [value.decode("latin-1") for known, value in scope["headers"] if known.lower() == name]


async def refuse_handshake(
    scope: Mapping[str, Any], send: Any, status: int, body: Mapping[str, Any], *headers: tuple[bytes, bytes]
) -> None:
    """Answer a WebSocket's handshake with HTTP; closes plainly where the server has no such extension."""
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1013, "reason": str(body["message"])[:100]})
        return
    said = [(b"content-type", b"application/json"), *headers]
    await send({"type": "websocket.http.response.start", "status": status, "headers": said})
    await send({"type": "websocket.http.response.body", "body": json.dumps(body).encode()})
