"""Checks bearer tokens: who may open sessions and send requests (docs/reference/environment.md 1, TOKEN)."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

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
