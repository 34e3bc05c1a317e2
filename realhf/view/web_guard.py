"""Keeps the page to this machine: refuses foreign hosts and pages, and forbids the browser every other source."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realhf.base.loopback import is_loopback_authority

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SERVER_HEADER = "X-Realhf-Server"
_OWN = frozenset({"same-origin", "none"})


class WebGuard:
    """Answers requests for foreign hosts (a foreign name may resolve to this machine) and of foreign pages with 403; an
    ASGI middleware. Every answer gets ``HEADERS`` and the name of this server, by which an open page notices that
    another one, with other runs, has taken its place on the port."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._headers = {**HEADERS, SERVER_HEADER: secrets.token_hex(8)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        problem = _problem(scope)
        app = self._app if not problem else JSONResponse({"detail": problem}, 403)
        await app(scope, receive, guarded)


def _problem(scope: Mapping[str, Any]) -> str:
    hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
    if len(hosts) != 1 or not is_loopback_authority(hosts[0]):
        return "this page is served to 127.0.0.1 and localhost only"
    if any(urlsplit(origin).netloc.lower() != hosts[0].lower() for origin in origins if _is_url(origin)):
        return "only pages of this server may ask it"
    if not all(_is_url(origin) for origin in origins):
        return "only pages of this server may ask it"
    if set(_values(scope, b"sec-fetch-site")) <= _OWN or _values(scope, b"sec-fetch-mode") == ["navigate"]:
        return ""
    return "only pages of this server may ask it"


def _is_url(origin: str) -> bool:
    try:
        return urlsplit(origin).scheme == "http"
    except ValueError:
        return False


def _values(scope: Mapping[str, Any], name: bytes) -> list[str]:
    return [value.decode("latin-1") for known, value in scope["headers"] if known.lower() == name]
