"""MCP clients over streamable HTTP: requests of the official protocol to ``/mcp``.

An MCP session is a session of the environment: ``initialize`` leases a slot and starts an episode,
which the query of the address selects, and ``DELETE`` or an idle timeout ends it. The official SDK
(the extra ``mcp``) speaks the protocol (``mcp_session``); it is imported with the first client.

The same address also serves OpenEnv's JSON-RPC without sessions (``mcp``). By the protocol, an MCP
client accepts ``text/event-stream`` or names its session in every request, which OpenEnv's clients
do not. Source: MCP 2025-11-25, transports.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from realhf.base.installation import MissingExtra, require_modules
from realhf.env.server import wire
from realhf.env.server.access import MCP_PATH
from realhf.env.server.capacity import ServerMetrics, SlotLeases, capacity_body
from realhf.env.server.config import ServerConfig
from realhf.env.server.interfaces import ServedEnvironment
from realhf.env.server.mcp import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    PARSE_ERROR,
    SERVER_ERROR,
    rpc_error,
)
from realhf.env.server.session import MeasuredPlayer
from realhf.env.server.wire import WireError
from realhf.web.bodies import BODY

if TYPE_CHECKING:
    from realhf.env.server.mcp_session import McpSession

EXTRA = "mcp"
"""Name of the extra that installs the SDK."""
UNSUPPORTED_VERSION = -32022
"""JSON-RPC error code for a protocol revision that is not served."""
HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
"""Protocol revisions that begin a session with ``initialize``. Later ones have no sessions, and an
episode needs one; their clients fall back to ``initialize`` when they read this list."""
SESSION_HEADER = "mcp-session-id"
_VERSION_HEADER = "mcp-protocol-version"
_EVENT_STREAM = "text/event-stream"
_RESET_KEYS = ("task_id", "seed", "split", "episode_id")
"""Parameters that the query of the address may have."""
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_STOP_S = 5.0
"""Seconds that sessions may take to end when the server stops."""
_LOG = logging.getLogger(__name__)


def is_mcp_client(scope: Scope) -> bool:
    """Return whether a request comes from an MCP client, by its path and headers."""
    if scope["type"] != "http" or scope["path"] != MCP_PATH:
        return False
    headers = Headers(scope=scope)
    return SESSION_HEADER in headers or _EVENT_STREAM in headers.get("accept", "").lower()


class McpClients:
    """ASGI middleware that passes the requests of MCP clients to ``endpoint``."""

    def __init__(self, app: ASGIApp, endpoint: McpEndpoint) -> None:
        self._app = app
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request."""
        await (self._endpoint if is_mcp_client(scope) else self._app)(scope, receive, send)


class RefusedRequest(Exception):
    """Raised for a request that gets a JSON-RPC error.

    ``status``: status of the HTTP response. ``body``: the JSON-RPC error.
    """

    def __init__(
        self,
        status: int,
        code: int,
        message: str,
        *,
        request_id: Any = None,
        data: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = rpc_error(request_id, code, message, data)
        self.headers = headers


class McpEndpoint:
    """ASGI application for the requests of MCP clients. Belongs to one event loop."""

    def __init__(
        self,
        leases: SlotLeases,
        served: ServedEnvironment,
        threads: Executor,
        config: ServerConfig,
        metrics: ServerMetrics,
    ) -> None:
        self._leases = leases
        self._served = served
        self._threads = threads
        self._config = config
        self._metrics = metrics
        self._sessions: dict[str, McpSession] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request: of a session, or the ``initialize`` that begins one."""
        try:
            session = await self._find_session(scope)
        except RefusedRequest as refused:
            response = JSONResponse(refused.body, refused.status, refused.headers)
            await response(scope, receive, send)
            return
        status = None
        try:
            status = await session.handle(scope, receive, send)
        finally:
            # Without the answer to its initialize, no client knows the session.
            if SESSION_HEADER not in Headers(scope=scope) and status != 200:
                session.end()

    async def stop(self) -> None:
        """Refuse new sessions, and end the open ones."""
        self._is_stopping = True
        for session in list(self._sessions.values()):
            session.end()
        if self._ends:
            await asyncio.wait(self._ends, timeout=_STOP_S)

    async def _find_session(self, scope: Scope) -> McpSession:
        """Return the session of a request, which is a new one for ``initialize``. Raises
        RefusedRequest."""
        headers = Headers(scope=scope)
        session_id = headers.get(SESSION_HEADER)
        if session_id is not None:
            session = self._sessions.get(session_id)
            if session is None:
                raise RefusedRequest(404, INVALID_REQUEST, "Session not found")
            return session
        if scope["method"] != "POST":
            raise RefusedRequest(400, INVALID_REQUEST, f"{SESSION_HEADER} is missing")
        message = _parse_message(scope[BODY])
        request_id = message.get("id")
        version = headers.get(_VERSION_HEADER, HANDSHAKE_VERSIONS[-1])
        if message.get("method") == "server/discover" or version not in HANDSHAKE_VERSIONS:
            raise RefusedRequest(
                400,
                UNSUPPORTED_VERSION,
                "this server has sessions, which begin with initialize",
                request_id=request_id,
                data={"supported": [*HANDSHAKE_VERSIONS], "requested": version},
            )
        if message.get("method") != "initialize":
            text = f"a session begins with initialize, and its {SESSION_HEADER} goes with the rest"
            raise RefusedRequest(400, INVALID_REQUEST, text, request_id=request_id)
        try:
            return await self._open_session(scope, parse_reset_query(scope["query_string"]))
        except RefusedRequest as refused:
            refused.body["id"] = request_id
            raise

    async def _open_session(self, scope: Scope, reset: dict[str, Any]) -> McpSession:
        """Check an ``initialize``, lease a slot, start an episode on it and return its session.
        Raises RefusedRequest."""
        try:
            data = self._served.check_reset(reset)
        except WireError as error:
            raise RefusedRequest(400, INVALID_PARAMS, error.message) from None
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, _import_session)
        except MissingExtra as error:
            text = f"this server cannot talk to MCP clients: {error}"
            raise RefusedRequest(501, SERVER_ERROR, text) from None
        from realhf.env.server.mcp_session import check_initialize

        check_initialize(scope)
        slot = await self._take_slot()
        session = await self._begin_episode(slot, data)
        self._sessions[session.id] = session
        self._metrics.sessions_opened.inc()
        ended = asyncio.create_task(self._release_at_end(session, slot))
        self._ends.add(ended)
        ended.add_done_callback(self._ends.discard)
        return session

    async def _take_slot(self) -> Any:
        """Lease a slot. Raises RefusedRequest if none is free, or if the server stops."""
        slot = None if self._is_stopping else await self._leases.take()
        if slot is None:
            refusal = self._leases.refuse()
            raise RefusedRequest(
                refusal.status,
                SERVER_ERROR,
                str(refusal),
                data=capacity_body(refusal),
                headers=refusal.headers,
            )
        return slot

    async def _begin_episode(self, slot: Any, data: dict[str, Any]) -> McpSession:
        """Reset a player on the slot and return its session. Raises RefusedRequest, and gives the
        slot back then."""
        from realhf.env.server.mcp_session import McpSession

        session = None
        work = None
        try:
            player = MeasuredPlayer(self._served.make_player(slot), self._served, self._metrics)
            work = asyncio.get_running_loop().run_in_executor(self._threads, player.reset, data)
            observation, _, done = await asyncio.shield(work)
            if self._is_stopping:
                raise WireError(wire.UNAVAILABLE, "the server stops")
            session = McpSession(self._served, player, observation, self._threads, self._config)
            await session.start(done)
            if self._is_stopping:
                session.end()
                raise WireError(wire.UNAVAILABLE, "the server stops")
        except asyncio.CancelledError:
            if session is not None:
                session.end()
            self._leases.give_back_after(slot, work)
            raise
        except WireError as error:
            self._leases.give_back(slot)
            self._metrics.errors.labels(error.code).inc()
            raise RefusedRequest(500, SERVER_ERROR, error.message, data=error_data(error)) from None
        except Exception as error:
            self._leases.give_back(slot)
            _LOG.exception("no environment for an MCP session")
            self._metrics.errors.labels(wire.FACTORY_ERROR).inc()
            text = f"the environment could not be made ({type(error).__name__})"
            raise RefusedRequest(
                500, SERVER_ERROR, text, data={"code": wire.FACTORY_ERROR}
            ) from error
        return session

    async def _release_at_end(self, session: McpSession, slot: Any) -> None:
        """Wait for the end of a session; then forget it and give back its slot."""
        try:
            await session.wait_until_ended()
        finally:
            del self._sessions[session.id]
            self._leases.give_back_after(slot, session.unfinished)
        if session.expired_by == "first_message_timeout_s":
            self._metrics.sessions_unused.inc()
        elif session.expired_by:
            self._metrics.sessions_reaped.inc()


def _import_session() -> None:
    """Import the SDK, which takes about a second. Raises MissingExtra."""
    require_modules(EXTRA, "mcp", "mcp_types")
    import realhf.env.server.mcp_session  # noqa: F401


def error_data(error: WireError) -> dict[str, Any]:
    """Return the ``data`` of the JSON-RPC error for a failure of the environment."""
    kind = {"kind": error.kind} if error.kind else {}
    return {"code": error.code, **kind, **({"retryable": True} if error.retryable else {})}


def _parse_message(body: bytes) -> Mapping[str, Any]:
    """Return the JSON-RPC message in a body. Raises RefusedRequest."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedRequest(400, PARSE_ERROR, "the body is not JSON") from None
    if not isinstance(message, Mapping):
        raise RefusedRequest(400, INVALID_REQUEST, "a request is an object")
    return message


def parse_reset_query(query: bytes) -> dict[str, Any]:
    """Return the data of a reset that the query of an address holds, such as
    ``?task_id=3&seed=7``. Raises RefusedRequest for an unknown or repeated parameter and for a seed
    that is not an integer."""
    data: dict[str, Any] = {}
    for key, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if key not in _RESET_KEYS:
            text = f"unknown parameter {key[:64]!a} in the address: {', '.join(_RESET_KEYS)}"
            raise RefusedRequest(400, INVALID_PARAMS, text)
        if key in data:
            raise RefusedRequest(400, INVALID_PARAMS, f"{key} is twice in the address")
        is_integer = key in ("task_id", "seed") and _INTEGER.fullmatch(value[:32])
        if key == "seed" and not is_integer:
            text = f"seed in the address must be an integer, not {value[:64]!a}"
            raise RefusedRequest(400, INVALID_PARAMS, text)
        data[key] = int(value[:32]) if is_integer else value
    return data
