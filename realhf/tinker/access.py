"""Decides who may use the server: API keys, and the Host and Origin of requests."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from realhf.base.loopback import is_loopback_host, request_problem
from realhf.tinker.options import ServerOptions

OWNER = "tinker.owner"
"""Where the scope of a request says whose it is."""
_OPEN = ("/api/v1/healthz", "/api/v1/download/")
"""Beginnings of paths that need no key: a sign of life, and files whose address is signed."""


class AccessGuard:
    """Passes on requests of who may use this server, and leaves in the scope whose they are: 401 without a known key,
    403 for foreign pages and hosts. Without a file of keys every key is an owner of its own."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._keys = [key.encode() for key in options.api_keys()]
        named = {name.strip().strip("[]").lower() for name in (options.host, *options.allowed_hosts.split(","))}
        self._hosts, self._open = named - {""}, not is_loopback_host(options.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = request_problem(
            scope, self._serves, unserved="this host is not served here; --allowed-hosts names further ones"
        )
        key = Headers(scope=scope).get("x-api-key", "").encode()
        if problem:
            answer: ASGIApp = error_answer(403, problem)
        elif not scope["path"].startswith(_OPEN) and not self._known(key):
            answer = error_answer(401, "this server does not know the API key (X-API-Key)")
        else:
            scope[OWNER] = hashlib.sha256(key).hexdigest()[:16]
            answer = self._app
        await answer(scope, receive, send)

    def _known(self, key: bytes) -> bool:
        found = not self._keys
        for each in self._keys:
            found |= hmac.compare_digest(each, key)
        return found

    def _serves(self, host: str) -> bool:
        if is_loopback_host(host) or host in self._hosts:
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return self._open


def error_answer(status: int, text: str) -> JSONResponse:
    """Return an error as the client reads it."""
    return JSONResponse({"detail": text, "message": text}, status)
