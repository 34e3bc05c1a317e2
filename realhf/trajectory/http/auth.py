"""Checks who may do what: tokens and roles, the name of a trainer without one, hosts and pages of a server without
tokens.

Without it all trainers behind one address are one, and acknowledge each other's batches. It is handed out only with
answers that carry no batch, and not while another answer carries one to the same address: the lease of a batch belongs
to the name that asked for it, and no other client's pull acknowledges it. Source: docs/reference/trajectory.md 3.10.

A browser carries out what any web page asks of ``http://127.0.0.1``, and a page may give its own name that address (DNS
rebinding). Programs that are not browsers send neither Origin nor Sec-Fetch-Site and notice nothing of this.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Mapping
from enum import Flag, auto
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from realhf.base.loopback import is_loopback_host
from realhf.trajectory.http.config import TrajectoryConfig

PAGE_PATH = "/ui"


def _files() -> Mapping[str, Traversable]:
    own = resources.files("realhf.trajectory.http").joinpath("static")
    shared = resources.files("realhf.base").joinpath("look")
    found = {
        f"{PAGE_PATH}/{file.name}": file for folder in (shared, own) for file in folder.iterdir() if file.is_file()
    }
    return MappingProxyType(found | {PAGE_PATH: own.joinpath("status.html")})


UI_FILES: Mapping[str, Traversable] = _files()
"""By path, what anybody may load: the page shows nothing before it is given a token."""


class Role(Flag):
    """Says what a token allows."""

    NOBODY = 0
    PRODUCER = auto()
    TRAINER = auto()
    ADMIN = auto()
    ANY = PRODUCER | TRAINER | ADMIN


OPEN_PATHS = frozenset({"/", "/healthz", *UI_FILES, "/docs", "/openapi.json"})
"""Paths that need no token: signs of life, and pages that show nothing until they are given one."""
_BY_PATH = {
    **dict.fromkeys(
        ("/wandb_info", "/info", "/status", "/latest_example", "/reset_data", "/envs", "/buffers", "/leases",
         "/quarantine", "/readyz", "/metrics", "/ui/data", "/redoc", "/docs/oauth2-redirect"), Role.ANY,
    ),
    "/register": Role.TRAINER, "/batch": Role.TRAINER, "/batch/ack": Role.TRAINER, "/batch/nack": Role.TRAINER,
    "/batch/renew": Role.TRAINER, "/policy_version": Role.TRAINER, "/register-env": Role.PRODUCER,
    "/disconnect-env": Role.PRODUCER, "/status-env": Role.PRODUCER, "/scored_data": Role.PRODUCER,
    "/scored_data_list": Role.PRODUCER, "/quarantine/requeue": Role.ADMIN,
}  # fmt: skip
"""Roles that each path is for; the administrator may use all of them. No other path is served."""


def route_path(scope: Scope) -> str:
    """Return the path by which a route is found, without what a proxy or ``--root-path`` put before it."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def needed(method: str, path: str) -> Role | None:
    """Return the roles of which one is needed; None for a path that there is not."""
    path = path.rstrip("/") or "/"  # with a slash it is redirected
    if path in OPEN_PATHS:
        return Role.ANY
    if path == "/quarantine" and method == "DELETE":
        return Role.ADMIN
    return _BY_PATH[path] | Role.ADMIN if path in _BY_PATH else None


COOKIE = "realhf_trainer"
_VALUE = re.compile(r"[0-9a-f]{32}")


def cookie_name(request: Request) -> str | None:
    """Return the name that was handed out to this client, if it carries it."""
    value = request.cookies.get(COOKIE, "")
    return value if _VALUE.fullmatch(value) else None


def handed_out(request: Request) -> dict[str, str]:
    """Return headers that hand out a name to a client that has none of any kind; empty for the others."""
    if request.headers.get("x-trainer-id") or request.query_params.get("trainer_id") or cookie_name(request):
        return {}
    return {"Set-Cookie": f"{COOKIE}={secrets.token_hex(16)}; Path=/; HttpOnly; SameSite=Strict"}


READ_PATHS = frozenset({
    "", "/wandb_info", "/info", "/status", "/envs", "/buffers", "/leases", "/quarantine", "/healthz", "/readyz",
    "/metrics", "/ui", "/docs", "/redoc", "/openapi.json",
})  # fmt: skip
"""Paths that any page may read: a GET changes nothing there (as it does at ``/batch``, ``/status-env`` and
``/reset_data``), and shows nothing of what is trained on (as ``/latest_example`` and ``/ui/data`` do)."""
_READ_METHODS = ("GET", "HEAD", "OPTIONS")
_LOOKED_AT = (b"host", b"origin", b"sec-fetch-site", b"referer", b"user-agent")
_REMEMBERED_HOSTS = 64
"""Number of Host headers that are remembered, so that a client cannot fill the memory with them."""


class AccessGuard:
    """Refuses what a client may not do. Leaves its roles in ``scope["traj.roles"]``.

    With tokens it answers 401 without a known one and 403 with one that does not suffice; foreign pages do not know
    them. Without tokens it answers 403 to requests that must not be served then.
    """

    def __init__(self, app: ASGIApp, config: TrajectoryConfig) -> None:
        self._app = app
        self._open = not config.has_tokens
        everyone = (
            (config.secret("token"), Role.PRODUCER | Role.TRAINER),
            (config.secret("producer_token"), Role.PRODUCER),
            (config.secret("trainer_token"), Role.TRAINER),
            (config.secret("admin_token"), Role.ANY),
        )
        self._roles = [(token.encode(), role) for token, role in everyone if token]
        self._insecure = config.insecure
        self._allowed = frozenset(name.strip().lower() for name in config.allowed_hosts.split(",") if name.strip())
        self._own = socket.gethostname().lower()
        self._is_good = lru_cache(_REMEMBERED_HOSTS)(self._may_name_this)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or answer with the reason why not."""
        answer = self._refusal(scope) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        if self._open and (problem := self._problem(scope)):
            return JSONResponse({"detail": problem}, 403)
        roles = scope["traj.roles"] = self._roles_of(Headers(scope=scope).get("authorization", ""))
        path = route_path(scope)
        wanted = needed(scope["method"], path)
        if path in OPEN_PATHS or scope["method"] == "OPTIONS" or (wanted and roles & wanted):
            return None
        if not roles:
            return JSONResponse({"detail": "a bearer token is needed"}, 401, {"WWW-Authenticate": "Bearer"})
        if wanted is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"detail": "this token does not allow that"}, 403)

    def _roles_of(self, authorization: str) -> Role:
        """Return the roles of an Authorization header; every known token is compared, in constant time."""
        if self._open:
            return Role.ANY
        kind, _, sent = authorization.partition(" ")
        found = Role.NOBODY
        for token, role in self._roles:
            if hmac.compare_digest(token, sent.strip().encode()) and kind.lower() == "bearer":
                found |= role
        return found

    def _problem(self, scope: Scope) -> str | None:
        found = {name: value.decode("latin-1") for name, value in scope["headers"] if name in _LOOKED_AT}
        host = found.get(b"host", "").lower()
        server = scope.get("server")
        if not self._insecure and server and server[1] is not None and not is_loopback_host(server[0]):
            return "without a token this server is for its own machine only: set --token, or say --insecure"
        if not self._is_good(host):
            return f"this server is not known as {host[:80]!r}; --allowed-hosts names it"
        if scope["method"] in _READ_METHODS and route_path(scope).rstrip("/") in READ_PATHS:
            return None
        if _is_foreign(found, host):
            return "only the server's own pages may do this without a token, not those of another site"
        return None

    def _may_name_this(self, host: str) -> bool:
        """Return whether a Host header may name this server. No stranger can own an address or a name without a dot."""
        name = _split(f"//{host}").hostname or "."
        known = _is_local(name) or name == self._own or bool(self._allowed & {"*", name})
        return not host or known or (self._insecure and not self._allowed)


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
