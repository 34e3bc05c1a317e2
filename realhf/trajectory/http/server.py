"""Builds the application: middlewares, routes, errors.

``uvicorn realhf.trajectory.http.server:app`` serves it with the settings of the environment variables. Source:
docs/reference/trajectory.md 1.1, 2.1.
"""

from __future__ import annotations

import gc
import logging
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from realhf.trajectory.base.refusal import Refusal
from realhf.trajectory.http import routes_producer, routes_trainer, routes_watch, status_page
from realhf.trajectory.http.allocator import keep_buffers
from realhf.trajectory.http.auth import AuthMiddleware
from realhf.trajectory.http.config import TrajectoryConfig, resolve
from realhf.trajectory.http.drained_send import drained_send
from realhf.trajectory.http.middleware import BodyMiddleware, CompressMiddleware, EpochMiddleware
from realhf.trajectory.http.service import Service
from realhf.trajectory.http.web_guard import WebGuard
from realhf.trajectory.store.base import StoreFailure
from realhf.trajectory.wire.lax_groups import MAX_ERRORS, shown

logger = logging.getLogger(__name__)
_SWITCH_INTERVAL_S = 0.001
"""How long a thread that encodes rows may hold the interpreter before the event loop gets its turn, in seconds."""


class TrajectoryApp(FastAPI):
    """Is the application, under any ASGI server: it sets up on each connection what it needs there."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; batches are written so that a send counts only when the kernel has it."""
        if scope["type"] == "http" and scope["path"].endswith("/batch"):
            drained = drained_send(send)
            scope["traj.drained"], send = drained is not None, drained or send
        with suppress(ConnectionResetError):
            await super().__call__(
                scope, receive, self._told_in_one_line(send) if scope["type"] == "lifespan" else send
            )

    def _told_in_one_line(self, send: Send) -> Send:
        """Leave the traceback out where the store does not open: its error names the cause."""

        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed" and self.state.start_failure:
                message = {**message, "message": self.state.start_failure}
            await send(message)

        return told

    def openapi(self) -> dict[str, Any]:
        """Return the description of the API; where tokens are used, its page can be given one."""
        if self.openapi_schema is None and self.state.tokens_required:
            schema = super().openapi()
            schema.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"token": []}]
        return super().openapi()


def create_app(config: TrajectoryConfig) -> FastAPI:
    """Make the server of one configuration; the store is opened when it starts. Raises ConfigError."""
    service = Service(config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        keep_buffers()
        _use_all_descriptors()
        try:
            try:
                await service.open()
            except StoreFailure as error:
                app.state.start_failure = f"the store does not open: {error}"
                raise
            gc.freeze()  # a full collection through all imported modules makes every request wait 30 ms and more
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
    app.state.tokens_required = service.tokens.required
    for module in (routes_producer, routes_trainer, routes_watch, status_page):
        app.include_router(module.router(service))
    _handle_errors(app, service)
    return app


def _use_all_descriptors() -> None:
    """Raise the limit of open descriptors to what the host allows: idle connections exhaust the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _middlewares(service: Service) -> list[Middleware]:
    config = service.config
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
        Middleware(WebGuard, config=config),
        Middleware(CompressMiddleware, level=config.gzip_level),
        Middleware(AuthMiddleware, tokens=service.tokens),
        Middleware(BodyMiddleware, max_bytes=config.max_body_bytes, budget=service.bodies),
    ]


def _handle_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        if error.status == 503:
            service.metrics.unavailable()
        return JSONResponse({"detail": error.detail}, error.status, error.headers)

    @app.exception_handler(StoreFailure)
    async def unavailable(request: Request, error: StoreFailure) -> Response:
        service.metrics.unavailable()
        return JSONResponse({"detail": f"the store failed: {error}"}, 503, {"Retry-After": "1"})

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return JSONResponse({"detail": [_problem(item) for item in error.errors()[:MAX_ERRORS]]}, 422)


def _problem(item: dict[str, Any]) -> dict[str, Any]:
    loc = [step if isinstance(step, int) else shown(str(step)) for step in item["loc"]]
    return {"type": item["type"], "loc": loc, "msg": shown(str(item["msg"])), "input": shown(item.get("input"))}


app = create_app(resolve())
