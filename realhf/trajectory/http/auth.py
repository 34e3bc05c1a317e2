"""Checks who may do what: bearer tokens of producers, trainers and the administrator (docs/reference/trajectory.md
3.11)."""

from __future__ import annotations

import hmac
from enum import Flag, auto

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from realhf.trajectory.http.config import TrajectoryConfig
from realhf.trajectory.http.ui_files import UI_FILES


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


class Tokens:
    """Knows the roles of the tokens of a configuration."""

    def __init__(self, config: TrajectoryConfig) -> None:
        self.required = config.has_tokens
        everyone = (
            (config.secret("token"), Role.PRODUCER | Role.TRAINER),
            (config.secret("producer_token"), Role.PRODUCER),
            (config.secret("trainer_token"), Role.TRAINER),
            (config.secret("admin_token"), Role.ANY),
        )
        self._roles = [(token.encode(), role) for token, role in everyone if token]

    def roles(self, authorization: str) -> Role:
        """Return the roles of an Authorization header; every known token is compared, in constant time."""
        if not self.required:
            return Role.ANY
        kind, _, sent = authorization.partition(" ")
        found = Role.NOBODY
        for token, role in self._roles:
            if hmac.compare_digest(token, sent.strip().encode()) and kind.lower() == "bearer":
                found |= role
        return found


class AuthMiddleware:
    """Answers 401 without a known token and 403 with one that does not suffice. Leaves the roles in
    ``scope["traj.roles"]``."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request if its token allows it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        roles = self._tokens.roles(Headers(scope=scope).get("authorization", ""))
        scope["traj.roles"] = roles
        path = route_path(scope)
        wanted = needed(scope["method"], path)
        if path in OPEN_PATHS or scope["method"] == "OPTIONS" or (wanted and roles & wanted):
            await self._app(scope, receive, send)
        elif roles and wanted is None:
            await JSONResponse({"detail": "Not Found"}, 404)(scope, receive, send)
        elif not roles:
            answer = JSONResponse({"detail": "a bearer token is needed"}, 401, {"WWW-Authenticate": "Bearer"})
            await answer(scope, receive, send)
        else:
            await JSONResponse({"detail": "this token does not allow that"}, 403)(scope, receive, send)
