"""Access control of the training API: which requests it serves, and to which owner they belong."""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from realhf.base.loopback import is_loopback_host
from realhf.tinker.options import ServerOptions
from realhf.web.guard import GuardRules, PageRules, ServedHosts
from realhf.web.refusal import Refusal
from realhf.web.tokens import TokenTable

OWNER = "tinker.owner"
"""Key of an ASGI scope under which a digest of the request's API key is stored."""
_WITHOUT_KEY = ("/api/v1/healthz", "/api/v1/download/")
"""Prefixes of paths that can be read without a key: the health check, and files with a signed
address."""


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return the body of an error response in the client's format."""
    return {"detail": refusal.detail, "message": refusal.detail}


def guard_rules(options: ServerOptions) -> GuardRules:
    """Return the rules that decide which requests are served: those with a known API key
    (X-API-Key), or with any key if there is no file of keys. Each key is an owner, whose digest is
    stored in ``scope[OWNER]``."""
    keys = TokenTable((key, True) for key in options.api_keys())
    is_open = not is_loopback_host(options.host)

    def authorize(scope: Scope) -> Refusal | None:
        key = Headers(scope=scope).get("x-api-key", "")
        if not _needs_no_key(scope) and keys and not keys.find_grants(key.encode("latin-1")):
            return Refusal(401, "this server does not know the API key (X-API-Key)")
        scope[OWNER] = hashlib.sha256(key.encode()).hexdigest()[:16]
        return None

    hosts = ServedHosts(
        f"this host is not served here; {options.setting_label('allowed_hosts')} names further "
        f"ones",
        names=options.allowed_names | {options.host.strip("[]").lower()},
        addresses=is_open,
    )
    return GuardRules(
        pages=PageRules(hosts),
        error_body=error_body,
        authorize=authorize,
        local_only_reason=""
        if keys
        else f"without API keys this server is for its own machine only: set "
        f"{options.setting_label('token_file')}",
    )


def _needs_no_key(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") and scope["path"].startswith(_WITHOUT_KEY)
