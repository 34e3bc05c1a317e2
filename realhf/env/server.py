"""The environment server: FastAPI application and the thread that serves it.

``/ws`` sessions, ``/health``, ``/schema``, ``/metadata``, ``/metrics``. Source: environment spec 2.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, Response
from starlette.routing import WebSocketRoute

from realhf.api.aws_models import AwsAction, AwsObservation, AwsState
from realhf.env import wire
from realhf.env.metrics import ServerMetrics
from realhf.env.server_config import ServerConfig
from realhf.env.session import Player, Receive, Send, Session

_SCRUB_WAIT_S = 2.0
_STOP_SESSIONS_S = 5.0
_STOP_RELEASES_S = 2.0
_LOG = logging.getLogger(__name__)


class SlotPool(Protocol):
    """What the server needs of ``realhf.env.pool.MiniStackPool``."""

    def acquire(self) -> Any: ...

    def release(self, slot: Any) -> None: ...

    @property
    def free_count(self) -> int: ...

    def metrics(self) -> Mapping[str, Any]: ...


class SessionEndpoint:
    """ASGI application of ``/ws``: reserve, acquire, and only then accept."""

    def __init__(
        self, pool: SlotPool, make_player: Callable[[Any], Player], config: ServerConfig, metrics: ServerMetrics
    ) -> None:
        self.active = 0
        self._pool = pool
        self._make_player = make_player
        self._config = config
        self._metrics = metrics
        self._sessions: set[Session] = set()
        self._releases: set[asyncio.Future[None]] = set()
        self._stopping = False
        self._threads = ThreadPoolExecutor(config.pool_size + 2, thread_name_prefix="env-session")

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        await receive()
        slot = await self._reserve()
        if slot is None:
            await self._refuse(scope, send)
            return
        session = Session(
            self._make_player(slot),
            self._threads,
            self._metrics,
            max_command_bytes=self._config.max_command_bytes,
            idle_timeout_s=self._config.idle_timeout_s,
        )
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
            self._leave()
            released = asyncio.get_running_loop().run_in_executor(self._threads, self._pool.release, slot)
            self._releases.add(released)
            released.add_done_callback(self._released)
        if close is not None:
            await send({"type": "websocket.close", "code": close[0], "reason": close[1]})

    async def stop(self) -> None:
        """Refuse new sessions, end the open ones with 1001, wait until their slots are back."""
        self._stopping = True
        for session in list(self._sessions):
            session.stop()
        deadline = time.monotonic() + _STOP_SESSIONS_S
        while self._sessions and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._releases:
            await asyncio.wait(self._releases, timeout=_STOP_RELEASES_S)
        self._threads.shutdown(wait=False)

    async def _reserve(self) -> Any | None:
        """A slot, or None at capacity. When fewer sessions than slots are open, one is being scrubbed or
        replaced, and is waited for."""
        if self._stopping or self.active >= self._config.pool_size:
            return None
        self._enter()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SCRUB_WAIT_S
        try:
            while True:
                try:
                    return await loop.run_in_executor(self._threads, self._pool.acquire)
                except RuntimeError:
                    if loop.time() > deadline:
                        self._leave()
                        return None
                await asyncio.sleep(0.005)
        except BaseException:
            self._leave()
            raise

    async def _refuse(self, scope: Mapping[str, Any], send: Send) -> None:
        self._metrics.sessions_rejected.inc()
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 1013, "reason": "server at capacity"})
            return
        active, most = self.active, self._config.pool_size
        body = {
            "code": wire.CAPACITY_REACHED,
            "message": f"Server at capacity: {active}/{most} sessions active. Cannot accept new connections.",
            "active_sessions": active,
            "max_sessions": most,
        }
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
        await send({"type": "websocket.http.response.start", "status": 503, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": json.dumps(body).encode()})

    def _released(self, future: asyncio.Future[None]) -> None:
        self._releases.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            _LOG.error("a slot could not be released: %s", error)

    def _enter(self) -> None:
        self.active += 1
        self._metrics.sessions_active.set(self.active)

    def _leave(self) -> None:
        self.active -= 1
        self._metrics.sessions_active.set(self.active)


def build_app(pool: SlotPool, endpoint: SessionEndpoint, config: ServerConfig, metrics: ServerMetrics) -> FastAPI:
    """The application. Routes other than ``/ws`` take no slot."""
    app = FastAPI(title="realhf AWS environment")
    app.router.routes.append(WebSocketRoute("/ws", endpoint))

    @app.get("/health")
    async def health() -> Response:
        usable = pool.free_count + endpoint.active
        status, word = (200, "healthy") if usable > 0 else (503, "unhealthy")
        return Response(json.dumps({"status": word}), status, media_type="application/json")

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        return {
            "action": AwsAction.model_json_schema(),
            "observation": AwsObservation.model_json_schema(),
            "state": AwsState.model_json_schema(),
        }

    @app.get("/metadata")
    async def metadata() -> dict[str, Any]:
        return {
            "name": "realhf-aws",
            "description": "AWS tasks on MiniStack, one simulator per session",
            "max_concurrent_envs": config.pool_size,
            "max_steps": config.max_steps,
            "reward_mode": "potential",
            "correlation": True,
        }

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.page(), media_type="text/plain; version=0.0.4")

    return app


class PortTaken(OSError):
    """The server's port is in use."""


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket whose connections notice a half-open peer. Raises PortTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_NODELAY", 1)):
        if hasattr(socket, option):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    try:
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on {host}:{port} (--port): {error.strerror}") from None
    return listener


class EnvServer:
    """The application served on its own thread, so that the main thread is free for signals and RPC.
    ``ended`` is set when that thread is over."""

    def __init__(
        self,
        pool: SlotPool,
        make_player: Callable[[Any], Player],
        config: ServerConfig,
        listener: socket.socket,
    ) -> None:
        metrics = ServerMetrics(pool.metrics)
        self._endpoint = SessionEndpoint(pool, make_player, config, metrics)
        self._listener = listener
        self._address = listener.getsockname()[:2]
        self._server = uvicorn.Server(
            uvicorn.Config(
                build_app(pool, self._endpoint, config, metrics),
                loop="uvloop",
                http="h11",
                ws="websockets-sansio",
                ws_max_size=wire.MAX_FRAME_BYTES,
                ws_ping_interval=config.ws_ping_interval_s,
                ws_ping_timeout=config.ws_ping_timeout_s,
                ws_per_message_deflate=False,
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=2,
            )
        )
        self.ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="env-server", daemon=True)

    @property
    def url(self) -> str:
        """Base address of the server."""
        host, port = self._address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self, timeout_s: float = 10.0) -> None:
        """Serve. Raises RuntimeError when the server does not come up."""
        self._thread.start()
        deadline = time.monotonic() + timeout_s
        while not self._server.started:
            if time.monotonic() > deadline or self.ended.is_set():
                raise RuntimeError(f"the environment server did not start within {timeout_s:g} s")
            time.sleep(0.005)

    def stop(self, timeout_s: float = 9.0) -> None:
        """Close sessions with 1001 and stop serving."""
        deadline = time.monotonic() + timeout_s
        if self._loop is not None and not self.ended.is_set():
            try:
                asyncio.run_coroutine_threadsafe(self._endpoint.stop(), self._loop).result(timeout_s)
            except TimeoutError:
                _LOG.error("sessions did not end within %g s", timeout_s)
            self._server.should_exit = True
            self._thread.join(max(0.5, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                self._loop = runner.get_loop()
                runner.run(self._server.serve(sockets=[self._listener]))
        finally:
            self.ended.set()
