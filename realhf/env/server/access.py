"""Decides who may use the environment server: bearer tokens, the Host and Origin of requests, browsers of the
playground. Source: docs/reference/environment.md 1, 2.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from realhf.base.loopback import is_loopback_host, request_problem
from realhf.env.server.config import ServerConfig
from realhf.env.server.wire import VALIDATION_ERROR, WireError

_SCHEME = b"bearer "


def authorized(headers: Iterable[tuple[bytes, bytes]], token: str) -> bool:
    """Return whether raw ASGI headers carry ``Authorization: Bearer <token>``; always true without a token. Compares in
    constant time."""
    if not token:
        return True
    for name, value in headers:
        if name.lower() == b"authorization" and value[: len(_SCHEME)].lower() == _SCHEME:
            return hmac.compare_digest(value[len(_SCHEME) :].strip(), token.encode())
    return False


class OriginGuard:
    """Answers HTTP and WebSocket requests of foreign pages, or for foreign hosts, with 403; an ASGI middleware.

    Served are loopback hosts, the configured host and ``allowed_hosts``; where the server listens on more than the
    loopback, which takes a token, also addresses and the name of the machine.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._unserved = (
            f"this host is not served here; {config.named('allowed_hosts')} names further ones that clients may use"
        )
        named = [config.host, *config.allowed_hosts.split(",")]
        self._hosts = {name.strip().strip("[]").lower() for name in named} - {""}
        self._open = not is_loopback_host(config.host)
        if self._open:
            self._hosts.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with 403."""
        known = scope["type"] in ("http", "websocket")
        problem = request_problem(scope, self._serves, unserved=self._unserved) if known else ""
        if not problem:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await refuse_handshake(scope, send, 403, {"code": "FOREIGN_ORIGIN", "message": problem})
        else:
            await JSONResponse({"detail": problem, "code": "FOREIGN_ORIGIN"}, 403)(scope, receive, send)

    def _serves(self, host: str) -> bool:
        if is_loopback_host(host) or host in self._hosts:
            return True
        return self._open and _is_address(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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


MAX_BODY_BYTES = 64 * 1024
CSRF_HEADER = "x-csrf-token"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
Handler = Callable[[Request], Awaitable[Response]]


class Refused(Exception):
    """A request is not served. ``code`` is a word for the page, ``more`` further keys of the body."""

    def __init__(self, status: int, code: str, message: str, **more: object) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"code": code, "message": message, **more}


class BrowserAuth:
    """Lets browsers in. With ``token`` "" nobody logs in, but nobody from elsewhere is served. The signing key lives as
    long as the process."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._key = secrets.token_bytes(32)

    def guarded(self, handler: Handler, *, open_to_all: bool = False) -> Handler:
        """Return ``handler`` behind the checks; ``open_to_all`` needs neither cookie nor CSRF token, as before a
        login."""

        async def guard(request: Request) -> Response:
            try:
                self._check(request, open_to_all)
                response = await handler(request)
            except Refused as refused:
                response = JSONResponse(refused.body, refused.status)
            except WireError as error:
                status = 422 if error.code == VALIDATION_ERROR else 500
                response = JSONResponse({"code": error.code, "message": error.message}, status)
            for name, value in HEADERS.items():
                response.headers[name] = value
            response.headers.setdefault("Cache-Control", "no-store")
            return response

        return guard

    def _check(self, request: Request, open_to_all: bool) -> None:
        if not self._token:
            self._check_local(request)
        if request.method == "POST":
            self._check_origin(request)
            length = request.headers.get("content-length", "")
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                raise Refused(413, "TOO_LARGE", f"a body has a Content-Length of at most {MAX_BODY_BYTES}")
        if open_to_all:
            return
        visitor = self.visitor(request)
        if visitor is None:
            raise Refused(401, "NO_SESSION", "open /web first")
        if request.method == "POST":
            sent = request.headers.get(CSRF_HEADER, "").encode()
            if not hmac.compare_digest(sent, self.csrf_token(visitor).encode()):
                raise Refused(403, "CSRF", "the CSRF token is missing or wrong; reload the page")

    @staticmethod
    def _check_local(request: Request) -> None:
        """Refuse foreigners by the Host header too: a foreign name that resolves to loopback must not reach the
        playground."""
        peer = request.client.host if request.client else ""
        if not is_loopback_host(peer) or not is_loopback_host(request.url.hostname or ""):
            raise Refused(403, "NOT_LOCAL", "without a token the playground is for this machine only")

    @staticmethod
    def _check_origin(request: Request) -> None:
        origin = request.headers.get("origin")
        if origin is None:
            same = request.headers.get("sec-fetch-site") == "same-origin"
        else:
            same = urlsplit(origin).netloc == request.headers.get("host")
        if not same:
            raise Refused(403, "FOREIGN_ORIGIN", "only the playground's own page may do this")

    def visitor(self, request: Request) -> str | None:
        """Return which visitor a browser is, by its cookie; None without a valid one."""
        visitor, _, signature = request.cookies.get(_cookie(request), "").partition(".")
        return visitor if hmac.compare_digest(signature.encode(), self._sign(f"visitor:{visitor}").encode()) else None

    def csrf_token(self, visitor: str) -> str:
        """Return what a browser's page must send with every request that changes something."""
        return self._sign(f"csrf:{visitor}")

    @property
    def needs_login(self) -> bool:
        """Whether visitors have to log in."""
        return bool(self._token)

    def knows(self, token: str) -> bool:
        """Return whether this is the server's token; compares in constant time."""
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())

    def new_visitor(self) -> str:
        """Return a new visitor, who has no cookie yet."""
        return secrets.token_urlsafe(18)

    def admit(self, visitor: str, request: Request, response: Response) -> None:
        """Give a browser its cookie."""
        value = f"{visitor}.{self._sign(f'visitor:{visitor}')}"
        secure = request.url.scheme == "https"
        response.set_cookie(_cookie(request), value, path="/web", httponly=True, samesite="strict", secure=secure)

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def _cookie(request: Request) -> str:
    """Return the cookie's name. Browsers share cookies between the ports of a host, so the name tells servers apart."""
    return f"realhf_playground_{request.url.port or 0}"
