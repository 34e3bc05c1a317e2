"""Gives trainers without a name one: a cookie, which HTTP sessions carry along without knowing.

Without it all trainers behind one address are one, and acknowledge each other's batches. It is handed out only with
answers that carry no batch, and not while another answer carries one to the same address: the lease of a batch belongs
to the name that asked for it, and no other client's pull acknowledges it. Source: docs/reference/trajectory.md 3.10.
"""

from __future__ import annotations

import re
import secrets

from starlette.requests import Request

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
