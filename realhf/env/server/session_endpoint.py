"""Serves ``/ws``: a lease is taken first and only then is the handshake accepted
(docs/reference/environment.md 2.3)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from realhf.env.server import wire
from realhf.env.server.access import authorized
from realhf.env.server.capacity import RETRY_AFTER_S, SlotLeases
from realhf.env.server.config import ServerConfig
from realhf.env.server.metrics import ServerMetrics
from realhf.env.server.origin_guard import refuse_handshake
from realhf.env.server.served import ServedEnvironment
from realhf.env.server.session import Receive, Send, Session

_STOP_SESSIONS_S = 5.0
_STOP_RELEASES_S = 2.0
_LOG = logging.getLogger(__name__)


class SessionEndpoint:
    """Is the ASGI application of ``/ws``."""

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
        self._make_player = served.make_player
        self._threads = threads
        self._config = config
        self._metrics = metrics
        self._injected = config.injected if config.injected.described() else None
        self._sessions: set[Session] = set()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Take a lease, accept the handshake and serve a session; without token or free slot the handshake is
        refused."""
        await receive()
        if not authorized(scope.get("headers") or (), self._config.token):
            await refuse_handshake(scope, send, 401, {"code": "UNAUTHORIZED", "message": "a bearer token is needed"})
            return
        try:
            slot = await self._leases.take()
        except Exception as error:
            await self._refuse(scope, send, 500, self._no_session(error))
            return
        if slot is None:
            retry = (b"retry-after", str(RETRY_AFTER_S).encode())
            await self._refuse(scope, send, 503, self._leases.refusal(), retry)
            return
        try:
            session = self._make_session(slot)
        except Exception as error:
            self._leases.give_back(slot)
            await self._refuse(scope, send, 500, self._no_session(error))
            return
        await self._serve(session, slot, receive, send)

    def _make_session(self, slot: Any) -> Session:
        return Session(
            self._make_player(slot),
            self._served,
            self._threads,
            self._metrics,
            self._config,
            trouble=self._injected.session() if self._injected else None,
        )

    async def _serve(self, session: Session, slot: Any, receive: Receive, send: Send) -> None:
        self._sessions.add(session)
        close = None
        try:
            await send({"type": "websocket.accept"})
            self._metrics.sessions_opened.inc()
            close = await session.serve(receive, send)
        except OSError:
            pass
        finally:
            self._sessions.discard(session)
            self._leases.give_back_after(slot, session.unfinished)
        if close is not None:
            await send({"type": "websocket.close", "code": close[0], "reason": close[1]})

    async def stop(self) -> None:
        """Refuse new sessions, end the open ones with 1001, wait until their slots are back."""
        self._leases.close()
        for session in list(self._sessions):
            session.stop()
        deadline = time.monotonic() + _STOP_SESSIONS_S
        while self._sessions and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self._leases.returned(_STOP_RELEASES_S)

    def _no_session(self, error: Exception) -> dict[str, Any]:
        """Count and log that an environment could not be made; returns what its client is told."""
        name = getattr(self._make_player, "__name__", type(self._make_player).__name__)
        _LOG.error("no environment for a new session (%s)", name, exc_info=error)
        self._metrics.errors.labels(wire.FACTORY_ERROR).inc()
        message = f"the environment could not be made ({type(error).__name__})"
        return {"code": wire.FACTORY_ERROR, "message": message, "factory_name": name}

    async def _refuse(
        self, scope: Mapping[str, Any], send: Send, status: int, body: dict[str, Any], *headers: tuple[bytes, bytes]
    ) -> None:
        if self._config.capacity_mode == "openenv":
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "text": wire.encode_reply("error", body)})
            await send({"type": "websocket.close", "code": 1000, "reason": ""})
            return
        await refuse_handshake(scope, send, status, body, *headers)
