"""Separates the two ways into a simulator and what each may ask for.

An agent's worker, and any other process that finds it, comes in by the ``port``: AWS alone, from no browser. Set-up,
grading and control come in by a connection of the ``owner``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from realhf.aws.cli.http_grammar import is_internal_path
from realhf.aws.simulator.account_state import AccountState, TooLarge
from realhf.aws.simulator.asgi_http import AsgiApp, Receive, Send
from realhf.aws.simulator.module_switches import ModuleSwitches
from realhf.aws.simulator.parsed_requests import ParsedRequests
from realhf.base.loopback import is_loopback_authority

RESET_PATH = "/_realhf/reset"
REQUESTS_PATH = "/_realhf/requests"
SWITCHES_PATH = "/_realhf/switches"
SNAPSHOT_PATH = "/_realhf/snapshot"
_OF_BROWSERS = frozenset({b"origin", b"sec-fetch-site", b"sec-fetch-mode"})


def port_app(app: AsgiApp, parsed: ParsedRequests) -> AsgiApp:
    """Return ``app`` without its control paths, and for hosts of this machine alone."""

    async def guarded(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        reason = _reason(scope)
        if reason:
            parsed.refuse(reason)
            await _answer(send, 403, {"message": reason})
        else:
            await app(scope, receive, send)

    return guarded


def _reason(scope: dict[str, Any]) -> str:
    if is_internal_path(scope["raw_path"].decode("ascii")):
        return "this path is not part of AWS"
    for name, value in scope["headers"]:
        if name in _OF_BROWSERS:
            return "a web page may not call a simulator"
        if name == b"host" and not is_loopback_authority(value.decode("latin-1")):
            return "this host is not served here"
    return ""


def owner_app(
    app: AsgiApp,
    seed: Callable[[int], None],
    switches: ModuleSwitches,
    parsed: ParsedRequests,
    state: AccountState,
) -> AsgiApp:
    """Return ``app`` with its control paths and ours: reset to a seed, the account of requests, the modules'
    switches, all that the account holds."""

    async def controlled(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path, number = scope["path"], scope["query_string"] or b"0"
        if path == RESET_PATH:
            await app({**scope, "path": "/_ministack/reset", "query_string": b""}, receive, send)
            switches.restore()
            seed(int(number))
            state.forget()
        elif path == REQUESTS_PATH:
            await _answer(send, 200, parsed.report(int(number)))
        elif path == SWITCHES_PATH:
            await _answer(send, 200, switches.values())
        elif path == SNAPSHOT_PATH:
            try:
                await _send(send, 200, "\n".join(state.report()))
            except (TooLarge, RuntimeError) as error:  # one of its threads may change a store meanwhile
                await _answer(send, 507, {"message": str(error)})
        else:
            await app(scope, receive, send)

    return controlled


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    await _send(send, status, json.dumps(body, separators=(",", ":")))


async def _send(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
