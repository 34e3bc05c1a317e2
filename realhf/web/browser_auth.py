"""Authentication of browsers for a page that changes something: signed cookies, CSRF tokens, and a
login if the server has a token."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from realhf.base.loopback import is_loopback_host
from realhf.web.bodies import check_declared_length
from realhf.web.guard import (
    FOREIGN_ORIGIN,
    PAGE_HEADERS,
    STRICT_POLICY,
    is_same_origin,
    refusal_response,
)
from realhf.web.refusal import Refusal
from realhf.web.tokens import TokenTable, encode_token

MAX_BODY_BYTES = 64 * 1024
"""Largest body of a request, in bytes."""
CSRF_HEADER = "x-csrf-token"
"""Header in which the page sends its CSRF token back."""
Handler = Callable[[Request], Awaitable[Response]]


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return the body of an error in the format that the page expects: ``code``, ``message`` and
    further keys."""
    return {"code": refusal.code, "message": refusal.detail, **refusal.more}


class BrowserAuth:
    """Authentication of browsers for the routes below ``path``.

    Without a token no login is needed, but only clients on this machine are served. The key that
    signs cookies is valid as long as the process lives.
    """

    def __init__(self, token: str, *, path: str, cookie: str) -> None:
        self._tokens = TokenTable([(token, True)])
        self._path = path
        self._cookie = cookie
        self._key = secrets.token_bytes(32)

    def guard(self, handler: Handler, *, open_to_all: bool = False) -> Handler:
        """Return ``handler`` wrapped in the checks. ``open_to_all``: it needs neither cookie nor
        CSRF token, as before a login."""

        async def guarded(request: Request) -> Response:
            try:
                self._check(request, open_to_all)
                response = await handler(request)
            except Refusal as refusal:
                response = refusal_response(refusal, error_body)
            for name, value in PAGE_HEADERS.items():
                response.headers[name] = value
            response.headers["Content-Security-Policy"] = STRICT_POLICY
            response.headers.setdefault("Cache-Control", "no-store")
            return response

        return guarded

    def _check(self, request: Request, open_to_all: bool) -> None:
        if not self._tokens:
            _check_local(request)
        if request.method == "POST":
            _check_own_page(request)
            check_declared_length(request.scope, MAX_BODY_BYTES, required=True, code="TOO_LARGE")
        if open_to_all:
            return
        visitor = self.visitor(request)
        if visitor is None:
            raise Refusal(401, f"open {self._path} first", code="NO_SESSION")
        if request.method == "POST":
            sent_token = request.headers.get(CSRF_HEADER, "").encode()
            if not hmac.compare_digest(sent_token, self.csrf_token(visitor).encode()):
                raise Refusal(
                    403, "the CSRF token is missing or wrong; reload the page", code="CSRF"
                )

    def visitor(self, request: Request) -> str | None:
        """Return a browser's id from its cookie; None if the cookie is missing or invalid."""
        visitor, _, signature = request.cookies.get(self._cookie_name(request), "").partition(".")
        return (
            visitor
            if hmac.compare_digest(signature.encode(), self._sign(f"visitor:{visitor}").encode())
            else None
        )

    def csrf_token(self, visitor: str) -> str:
        """Return the CSRF token that the browser's page must send with every request that changes
        something."""
        return self._sign(f"csrf:{visitor}")

    @property
    def needs_login(self) -> bool:
        """Whether visitors have to log in."""
        return bool(self._tokens)

    def accepts_token(self, token: str) -> bool:
        """Return whether ``token`` is the server's token; compares in constant time."""
        return bool(self._tokens.find_grants(encode_token(token)))

    def new_visitor(self) -> str:
        """Return an id for a browser that has no cookie yet."""
        return secrets.token_urlsafe(18)

    def set_cookie(self, visitor: str, request: Request, response: Response) -> None:
        """Add the browser's cookie to the response."""
        value = f"{visitor}.{self._sign(f'visitor:{visitor}')}"
        secure = request.url.scheme == "https"
        name = self._cookie_name(request)
        response.set_cookie(
            name, value, path=self._path, httponly=True, samesite="strict", secure=secure
        )

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, encode_token(text), hashlib.sha256).hexdigest()

    def _cookie_name(self, request: Request) -> str:
        """Return the name of the cookie. It contains the port, because browsers share cookies
        between all ports of a host."""
        return f"{self._cookie}_{request.url.port or 0}"


def _check_local(request: Request) -> None:
    """Refuse clients on other machines. The Host header is checked too: a foreign name that
    resolves to the loopback must not reach the page. Behind a proxy, the proxy counts as the
    client."""
    peer = request.client.host if request.client else ""
    if not is_loopback_host(peer) or not is_loopback_host(request.url.hostname or ""):
        raise Refusal(
            403, "without a token the playground is for this machine only", code="NOT_LOCAL"
        )


def _check_own_page(request: Request) -> None:
    """Refuse a request whose headers do not say that a page of this server caused it. Programs
    other than browsers are refused as well."""
    origins = request.headers.getlist("origin")
    if origins:
        is_own_page = len(origins) == 1 and is_same_origin(
            origins[0], request.headers.get("host", "")
        )
    else:
        is_own_page = request.headers.get("sec-fetch-site") == "same-origin"
    if not is_own_page:
        raise Refusal(403, "only the playground's own page may do this", code=FOREIGN_ORIGIN)
