"""ASGI application of the trajectory server: middlewares, routes, error handlers, and settings of
the process and its connections.

uvicorn buffers up to 64 KiB of an answer in the process. A batch counts as sent only once none of
it is buffered: if the process is killed, the trainer has either received the whole batch or gets it
again.

``uvicorn realhf.trajectory.http.server:app`` runs the server with settings from environment
variables. Source: docs/reference/trajectory.md 1.1, 2.1.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realhf.trajectory.http import routes_producer, routes_trainer, routes_watch, status_page
from realhf.trajectory.http.auth import error_body, guard_rules, route_path
from realhf.trajectory.http.config import TrajectoryConfig
from realhf.trajectory.http.routes_trainer import DRAINED
from realhf.trajectory.http.service import TrajectoryService
from realhf.trajectory.store.base import StoreFailure
from realhf.trajectory.wire.encode import GZIP_FROM_BYTES
from realhf.trajectory.wire.intake import is_msgpack
from realhf.trajectory.wire.lax_groups import problems
from realhf.web.bodies import BodyReader, BodyRules
from realhf.web.connections import use_all_descriptors
from realhf.web.guard import RequestGuard, refusal_response
from realhf.web.refusal import Refusal

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` of glibc's ``malloc.h``."""
MAX_CACHED_BYTES = 64 << 20
"""Maximum bytes of free memory at the end of the heap that the process keeps."""
_HEAP_BYTES = 16 << 20
"""Size below which buffers are allocated from the heap; larger ones are mapped from the kernel."""


def keep_buffers() -> bool:
    """Configure ``malloc`` to keep freed buffers in the process. Returns False if the C library has
    no such setting."""
    try:
        tune = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(tune(_TRIM_THRESHOLD, MAX_CACHED_BYTES) and tune(_MMAP_THRESHOLD, _HEAP_BYTES))


_LOOK_S = 0.002
"""Seconds between two checks of a TLS connection's buffers."""


def drained_send(send: Send) -> Send | None:
    """Return a ``send`` that first waits until all earlier writes of the connection have left the
    process. It raises ConnectionResetError if the client has disconnected.

    Returns None if the ASGI server does not expose its transport as uvicorn does, or if the
    connection uses TLS under uvloop, which hides the transport below.
    """
    transport: Any = getattr(getattr(send, "__self__", None), "transport", None)
    if getattr(transport, "set_write_buffer_limits", None) is None:
        return None
    if transport.get_extra_info("sslcontext") is None:
        transport.set_write_buffer_limits(high=0)
        return send
    below = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    return None if below is None else _through_tls(send, transport, below)


def _through_tls(send: Send, transport: Any, below: Any) -> Send:
    """Return a ``send`` that polls both buffers of a TLS connection, of plain bytes and of
    encrypted bytes, until they are empty. It polls because asyncio has no event for an empty
    encrypted buffer."""

    async def send_when_drained(message: Message) -> None:
        while not below.is_closing() and (
            transport.get_write_buffer_size() or below.get_write_buffer_size()
        ):
            await asyncio.sleep(_LOOK_S)
        if below.is_closing():  # the buffer was dropped; uvicorn is notified a little later
            raise ConnectionResetError("the client has gone away")
        await send(message)

    return send_when_drained


class EpochMiddleware:
    """Middleware that adds the current epoch to every response, except to batches, which already
    carry the epoch in which they were formed."""

    def __init__(self, app: ASGIApp, epoch: Callable[[], int]) -> None:
        self._app = app
        self._epoch = epoch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request with the header added."""

        async def send_with_epoch(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                if not any(name == b"x-epoch" for name, _ in headers):
                    message["headers"] = [*headers, (b"x-epoch", b"%d" % self._epoch())]
            await send(message)

        await self._app(scope, receive, send_with_epoch if scope["type"] == "http" else send)


class CompressMiddleware:
    """Middleware that compresses answers of 1000 bytes or more with gzip, except batches, which are
    already compressed."""

    def __init__(self, app: ASGIApp, level: int) -> None:
        self._app = app
        self._gzip = GZipMiddleware(app, minimum_size=GZIP_FROM_BYTES, compresslevel=max(1, level))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; compress the answer unless it is a batch."""
        compressor = (
            self._app if scope["type"] != "http" or route_path(scope) == "/batch" else self._gzip
        )
        await compressor(scope, receive, send)


logger = logging.getLogger(__name__)
_SWITCH_INTERVAL_S = 0.001
"""Seconds for which an encoder thread may hold the interpreter lock while the event loop waits."""


class TrajectoryApp(FastAPI):
    """FastAPI application that adapts each connection, whichever ASGI server runs it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. While a batch is sent, ``send`` returns only when the kernel has the
        bytes."""
        if scope["type"] == "http" and scope["path"].endswith("/batch"):
            drained = drained_send(send)
            scope[DRAINED], send = drained is not None, drained or send
        with suppress(ConnectionResetError):
            await super().__call__(
                scope,
                receive,
                self._without_traceback(send) if scope["type"] == "lifespan" else send,
            )

    def _without_traceback(self, send: Send) -> Send:
        """Return a ``send`` that replaces the traceback of a store that cannot be opened with one
        line, because the error's message already names the cause."""

        async def send_short(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed" and self.state.start_failure:
                message = {**message, "message": self.state.start_failure}
            await send(message)

        return send_short

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI schema. If tokens are set, the schema makes ``/docs`` show a field for
        one."""
        if self.openapi_schema is None and self.state.tokens_required:
            schema = super().openapi()
            schema.setdefault("components", {})["securitySchemes"] = {
                "token": {"type": "http", "scheme": "bearer"}
            }
            schema["security"] = [{"token": []}]
        return super().openapi()


def create_app(config: TrajectoryConfig) -> FastAPI:
    """Return the application for a configuration. The store is opened when the application starts.
    Raises SettingError."""
    service = TrajectoryService(config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        keep_buffers()
        use_all_descriptors()
        try:
            try:
                await service.open()
            except StoreFailure as error:
                app.state.start_failure = f"the store does not open: --store {error}"
                raise
            gc.freeze()  # else a full collection scans all imported modules, and delays requests by 30 ms and more
            yield
        finally:
            gc.unfreeze()
            await service.close()
            sys.setswitchinterval(interval)

    app = TrajectoryApp(
        title="realhf trajectory server",
        version="1.0",
        lifespan=lifespan,
        strict_content_type=False,
        middleware=_middlewares(service),
        description="Atropos-compatible buffer of scored trajectories.",
    )
    app.state.start_failure = ""
    app.state.tokens_required = config.has_tokens
    for module in (routes_producer, routes_trainer, routes_watch, status_page):
        app.include_router(module.router(service))
    _handle_errors(app, service)
    return app


def _middlewares(service: TrajectoryService) -> list[Middleware]:
    config = service.config
    body_rules = BodyRules(config.max_body_bytes, error_body, service.bodies, zstd_types=is_msgpack)
    return [
        Middleware(EpochMiddleware, epoch=lambda: service.engine.epoch),
        Middleware(
            CORSMiddleware,
            allow_origin_regex=".*",
            allow_credentials=True,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        ),
        Middleware(RequestGuard, rules=guard_rules(config)),
        Middleware(CompressMiddleware, level=config.gzip_level),
        Middleware(BodyReader, rules=body_rules),
    ]


def _handle_errors(app: FastAPI, service: TrajectoryService) -> None:
    @app.exception_handler(Refusal)
    async def on_refusal(request: Request, error: Refusal) -> Response:
        if error.status == 503:
            service.metrics.count_unavailable()
        return refusal_response(error, error_body)

    @app.exception_handler(StoreFailure)
    async def on_store_failure(request: Request, error: StoreFailure) -> Response:
        service.metrics.count_unavailable()
        return JSONResponse({"detail": f"the store failed: {error}"}, 503, {"Retry-After": "1"})

    @app.exception_handler(RequestValidationError)
    async def on_invalid_request(request: Request, error: RequestValidationError) -> Response:
        return JSONResponse({"detail": problems(error.errors(), [])}, 422)


app = create_app(TrajectoryConfig.resolve())
