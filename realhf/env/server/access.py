"""Access rules of the environment server: which hosts, pages and tokens are served.

Source: docs/reference/environment.md 1, 2.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from starlette.types import Scope

from realhf.base.loopback import is_loopback_host
from realhf.env.server.config import ServerConfig
from realhf.web.guard import GuardRules, PageRules, ServedHosts, is_write
from realhf.web.refusal import Refusal
from realhf.web.tokens import TokenTable, bearer_token

MCP_PATH = "/mcp"
"""Path of requests to tools, with a session or without. Each of them needs the token, whatever its
method."""


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return the JSON body of an HTTP error."""
    return {"detail": refusal.detail} | ({"code": refusal.code} if refusal.code else {})


def token_check(config: ServerConfig) -> Callable[[Scope], Refusal | None]:
    """Return a function that returns a refusal (401) for a request without the bearer token, else
    None."""
    tokens = TokenTable([(config.token, True)])

    def check(scope: Scope) -> Refusal | None:
        if not tokens or tokens.find_grants(bearer_token(scope["headers"])):
            return None
        return Refusal(
            401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"}, code="UNAUTHORIZED"
        )

    return check


def has_own_check(scope: Scope, own_guard: str) -> bool:
    """Return whether a request's path lies below ``own_guard`` ("" for no path), whose pages check
    requests themselves."""
    return bool(own_guard) and scope["path"].startswith(own_guard)


def guard_rules(config: ServerConfig, own_guard: str) -> GuardRules:
    """Return the rules by which requests are served. Every POST and every request to ``MCP_PATH``
    needs the token, except that pages below the path ``own_guard`` ("" for none) check their
    visitors themselves."""
    is_open = not is_loopback_host(config.host)
    names = config.allowed_names | {config.host.strip("[]").lower()}
    hosts = ServedHosts(
        f"this host is not served here; {config.setting_label('allowed_hosts')} names further "
        f"ones that "
        f"clients may use",
        names=names | {socket.gethostname().lower()} if is_open else names,
        addresses=is_open,
    )
    check_token = token_check(config)

    def authorize(scope: Scope) -> Refusal | None:
        if scope.get("path") == MCP_PATH:
            return check_token(scope)
        needs_token = scope["method"] == "POST" and not has_own_check(scope, own_guard)
        return check_token(scope) if needs_token else None

    return GuardRules(
        pages=PageRules(hosts, lambda scope: is_write(scope) or scope.get("path") == MCP_PATH),
        error_body=error_body,
        authorize=authorize,
        local_only_reason=""
        if config.token
        else f"without a token this server is for its own machine only: set "
        f"{config.setting_label('token')}",
        websockets=True,
    )
