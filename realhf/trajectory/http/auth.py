"""Access rules of the HTTP server: the role that each path needs, the paths that other web sites
may read, and names for trainers that do not send one.

A trainer that names itself neither in a header nor in the query is given a name in a cookie.
Without it, all trainers behind one address would count as one and acknowledge each other's batches.
The cookie is set only on answers without a batch, and not while an answer with a batch is being
sent to the same address: a batch's lease belongs to the name that asked for it, and a pull under
another name would not acknowledge it. Source: docs/reference/trajectory.md 3.10, 3.11.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Mapping
from enum import Flag, auto
from functools import reduce
from importlib import resources
from importlib.resources.abc import Traversable
from operator import or_
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from realhf.trajectory.http.config import TrajectoryConfig
from realhf.web.guard import GuardRules, PageRules, ServedHosts, is_write
from realhf.web.refusal import Refusal
from realhf.web.tokens import TokenTable, bearer_token

PAGE_PATH = "/ui"


def _find_files() -> Mapping[str, Traversable]:
    own = resources.files("realhf.trajectory.http").joinpath("static")
    shared = resources.files("realhf.base").joinpath("look")
    files = {
        f"{PAGE_PATH}/{file.name}": file
        for folder in (shared, own)
        for file in folder.iterdir()
        if file.is_file()
    }
    return MappingProxyType(files | {PAGE_PATH: own.joinpath("status.html")})


UI_FILES: Mapping[str, Traversable] = _find_files()
"""Files of the status page, by URL path. They need no token, because the page shows no data until
the user enters one."""
ROLES = "trajectory.roles"
"""Key in an ASGI scope under which the client's roles are stored."""


class Role(Flag):
    """Permissions that a token grants."""

    NOBODY = 0
    PRODUCER = auto()
    TRAINER = auto()
    ADMIN = auto()
    ANY = PRODUCER | TRAINER | ADMIN


OPEN_PATHS = frozenset({"/", "/healthz", *UI_FILES, "/docs", "/openapi.json"})
"""Paths that need no token: health checks, and pages that show no data until the user enters a
token."""
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
"""Roles that may use each path; the administrator may use all of them. Any other path is
unknown."""


def route_path(scope: Scope) -> str:
    """Return the path of a route, without the prefix of a proxy or of ``--root-path``."""
    path = scope["path"]
    root = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def needed_roles(method: str, path: str) -> Role | None:
    """Return the roles of which a client needs at least one; None for an unknown path."""
    path = path.rstrip("/") or "/"  # a final slash is redirected
    if path in OPEN_PATHS:
        return Role.ANY
    if path == "/quarantine" and method == "DELETE":
        return Role.ADMIN
    return _BY_PATH[path] | Role.ADMIN if path in _BY_PATH else None


COOKIE = "realhf_trainer"
_VALUE = re.compile(r"[0-9a-f]{32}")


def cookie_name(request: Request) -> str | None:
    """Return the trainer name in the request's cookie; None without a valid one."""
    value = request.cookies.get(COOKIE, "")
    return value if _VALUE.fullmatch(value) else None


def new_cookie(request: Request) -> dict[str, str]:
    """Return the headers that set a cookie with a new trainer name; {} if the client already has a
    name."""
    if (
        request.headers.get("x-trainer-id")
        or request.query_params.get("trainer_id")
        or cookie_name(request)
    ):
        return {}
    return {"Set-Cookie": f"{COOKIE}={secrets.token_hex(16)}; Path=/; HttpOnly; SameSite=Strict"}


READ_PATHS = frozenset({
    "", "/wandb_info", "/info", "/status", "/envs", "/buffers", "/leases", "/quarantine", "/healthz", "/readyz",
    "/metrics", "/ui", "/docs", "/redoc", "/openapi.json",
})  # fmt: skip
"""Paths that pages of any web site may read. A GET of these changes nothing (unlike ``/batch``,
``/status-env`` and ``/reset_data``) and shows no training data (unlike ``/latest_example`` and
``/ui/data``)."""


def is_protected(scope: Scope) -> bool:
    """Return whether a request changes something, or shows training data."""
    return is_write(scope) or route_path(scope).rstrip("/") not in READ_PATHS


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return the JSON body of an error, in FastAPI's format."""
    return {"detail": refusal.detail}


def guard_rules(config: TrajectoryConfig) -> GuardRules:
    """Return the rules by which requests are served.

    With tokens, the token alone decides, because pages of other sites do not know it. Without
    tokens, only clients on this machine are served (unless ``insecure`` is set), and pages of other
    sites may read ``READ_PATHS`` only.
    """
    roles = TokenTable([
        (config.secret("token"), Role.PRODUCER | Role.TRAINER),
        (config.secret("producer_token"), Role.PRODUCER),
        (config.secret("trainer_token"), Role.TRAINER),
        (config.secret("admin_token"), Role.ANY),
    ])  # fmt: skip
    if config.has_tokens:
        return GuardRules(
            pages=None, error_body=error_body, authorize=lambda scope: _authorize(scope, roles)
        )
    hosts = ServedHosts(
        "this server is not known as {host}; --allowed-hosts names it",
        names=config.allowed_names | {socket.gethostname().lower()},
        addresses=True,
        local_names=True,
        any_host="*" in config.allowed_names or (config.insecure and not config.allowed_names),
        absent=True,
    )
    return GuardRules(
        pages=PageRules(hosts, is_protected=is_protected, open_reads=True),
        error_body=error_body,
        authorize=lambda scope: _authorize(scope, None),
        local_only_reason=""
        if config.insecure
        else "without a token this server is for its own machine only: set --token, or say "
        "--insecure",
    )


def _authorize(scope: Scope, roles: TokenTable[Role] | None) -> Refusal | None:
    """Store the client's roles in ``scope[ROLES]`` and return None, or return a refusal if the
    roles do not suffice. If ``roles`` is None (no tokens are set), every request has all roles."""
    granted = Role.ANY
    if roles is not None:
        granted = reduce(or_, roles.find_grants(bearer_token(scope["headers"])), Role.NOBODY)
    scope[ROLES] = granted
    path = route_path(scope)
    needed = needed_roles(scope["method"], path)
    if path in OPEN_PATHS or scope["method"] == "OPTIONS" or (needed and granted & needed):
        return None
    if not granted:
        return Refusal(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})
    if needed is None:
        return Refusal(404, "Not Found")
    return Refusal(403, "this token does not allow that")
