"""Limits a server without tokens to this machine, and among the pages in its browsers to the server's own.

A browser carries out what any web page asks of ``http://127.0.0.1``, and a page may give its own name that address (DNS
rebinding). Programs that are not browsers send neither Origin nor Sec-Fetch-Site and notice nothing of this.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import SplitResult, urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from realhf.trajectory.http.auth import route_path
from realhf.trajectory.http.config import TrajectoryConfig, is_loopback

READ_PATHS = frozenset({
    "", "/wandb_info", "/info", "/status", "/envs", "/buffers", "/leases", "/quarantine", "/healthz", "/readyz",
    "/metrics", "/ui", "/docs", "/redoc", "/openapi.json",
})  # fmt: skip
"""Paths that any page may read: a GET changes nothing there (as it does at ``/batch``, ``/status-env`` and
``/reset_data``), and shows nothing of what is trained on (as ``/latest_example`` and ``/ui/data`` do)."""
_READ_METHODS = ("GET", "HEAD", "OPTIONS")
_LOOKED_AT = (b"host", b"origin", b"sec-fetch-site", b"referer", b"user-agent")
_REMEMBERED_HOSTS = 64
"""Number of accepted Host headers that are remembered, so that a client cannot fill the memory with them."""


class WebGuard:
    """Answers 403 to requests that must not be served without a token. With tokens nothing is checked here, because
    foreign pages do not know them."""

    def __init__(self, app: ASGIApp, config: TrajectoryConfig) -> None:
        self._app = app
        self._open = not config.has_tokens
        self._insecure = config.insecure
        self._allowed = frozenset(name.strip().lower() for name in config.allowed_hosts.split(",") if name.strip())
        self._own = socket.gethostname().lower()
        self._good_hosts: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or answer 403 with the reason."""
        problem = self._problem(scope) if self._open and scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"detail": problem}, 403)(scope, receive, send)

    def _problem(self, scope: Scope) -> str | None:
        found = {name: value.decode("latin-1") for name, value in scope["headers"] if name in _LOOKED_AT}
        host = found.get(b"host", "").lower()
        server = scope.get("server")
        if not self._insecure and server and server[1] is not None and not is_loopback(server[0]):
            return "without a token this server is for its own machine only: set --token, or say --insecure"
        if not self._is_good(host):
            return f"this server is not known as {host[:80]!r}; --allowed-hosts names it"
        if scope["method"] in _READ_METHODS and route_path(scope).rstrip("/") in READ_PATHS:
            return None
        if _is_foreign(found, host):
            return "only the server's own pages may do this without a token, not those of another site"
        return None

    def _is_good(self, host: str) -> bool:
        """Return whether a Host header may name this server. No stranger can own an address or a name without a dot."""
        if host in self._good_hosts or not host:
            return True
        name = _split(f"//{host}").hostname or "."
        good = _is_local(name) or name == self._own or bool(self._allowed & {"*", name})
        good |= self._insecure and not self._allowed
        if good and len(self._good_hosts) < _REMEMBERED_HOSTS:
            self._good_hosts.add(host)
        return good


def _is_local(name: str) -> bool:
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_foreign(headers: dict[bytes, str], host: str) -> bool:
    """Return whether a page of another site caused this request. What a browser reports about its page comes first; if
    it reports nothing, the address of the page decides."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get(b"origin")
    if origin is not None:
        return _split(origin).netloc.lower() != host
    if "Mozilla/" not in headers.get(b"user-agent", ""):
        return False
    return _split(headers.get(b"referer", "")).netloc.lower() != host


def _split(url: str) -> SplitResult:
    """Return the parts of an address; all empty for a malformed one."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
