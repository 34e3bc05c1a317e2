"""Decides which browser may use the playground: a signed cookie per browser, same-origin and CSRF checks, a login where
the server has a token, loopback only where it has none (docs/reference/environment.md 11)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from realhf.base.loopback import is_loopback_host
from realhf.env.server.wire import VALIDATION_ERROR, WireError

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
