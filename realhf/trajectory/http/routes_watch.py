"""Endpoints for monitoring and maintaining the server.

Source: docs/reference/trajectory.md 2.2, 2.9, 3.5, 3.7, 3.11.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import PlainTextResponse, Response

from realhf.trajectory.http.service import (
    Requeue,
    TrajectoryService,
    accepts_msgpack,
    answer,
    may_reset,
)
from realhf.trajectory.state import quarantine, registry, views
from realhf.trajectory.store.base import StoreFailure
from realhf.trajectory.wire.encode import encode_group
from realhf.trajectory.wire.intake import MSGPACK_TYPES
from realhf.web.refusal import Refusal

_NO_EXAMPLE = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "generation_params", "messages",
    "images",
)  # fmt: skip


def router(service: TrajectoryService) -> APIRouter:
    """Return a router with the endpoints that any token may use, and those for the
    administrator."""
    routes = APIRouter(tags=["server"])
    engine = service.engine

    @routes.get("/")
    async def root() -> dict[str, str]:
        """Return the original server's greeting, by which clients recognise the server."""
        return {"message": "AtroposLib API"}

    for view in (
        views.wandb_info,
        views.info,
        views.status,
        views.envs,
        views.buffers,
        views.leases,
    ):
        routes.add_api_route(
            f"/{view.__name__}",
            _view_route(service, view),
            name=view.__name__,
            description=view.__doc__,
        )

    @routes.get("/quarantine")
    async def quarantined(
        limit: Annotated[int, Query(ge=0, le=10_000)] = 100,
        after: Annotated[int | None, Query(ge=-1)] = None,
    ) -> Response:
        """List groups in quarantine, with reasons. ``after`` is the last id of the previous page."""
        return answer(await engine.read(views.quarantine, limit, after))

    @routes.post("/quarantine/requeue")
    async def requeue(request: Requeue) -> Response:
        """Move groups from quarantine to the tail of the queue if they can be served now."""
        return answer(await engine.write(quarantine.requeue, request.ids))

    @routes.delete("/quarantine")
    async def clear_quarantine() -> Response:
        """Delete all groups in quarantine."""
        return answer(await engine.write(quarantine.clear))

    @routes.get("/latest_example")
    async def latest_example(request: Request) -> Response:
        """Return the last group that entered the queue."""
        msgpack = accepts_msgpack(request)
        found = await service.latest()
        if found is None:
            return answer({name: [] for name in _NO_EXAMPLE})
        group, data = found
        return Response(
            await encode_group(group.payload, data, msgpack=msgpack),
            media_type=MSGPACK_TYPES[0] if msgpack else "application/json",
        )

    @routes.get("/reset_data")
    async def reset_data(request: Request) -> Response:
        """Delete the whole state and begin a new epoch."""
        if not may_reset(service, request):
            raise Refusal(
                403,
                "resets are off"
                if service.config.resets == "off"
                else "a reset needs the admin token",
            )
        await engine.write(registry.reset)
        return PlainTextResponse("Reset successful")

    @routes.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Answer that the process is alive."""
        return {"status": "ok"}

    @routes.get("/readyz")
    async def readyz() -> Response:
        """Answer 200 if the state is restored and the store accepts a write; otherwise 503."""
        if not service.ready:
            raise Refusal(503, "starting", {"Retry-After": "1"})
        try:
            # Use a write, because a store that can only be read is not ready.
            await engine.write(views.status)
        except StoreFailure as error:
            raise Refusal(503, str(error), {"Retry-After": "1"}) from error
        return answer({"status": "ready", "store": engine.store.name})

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        text = await engine.peek(lambda state, now: service.metrics.text())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def _view_route(
    service: TrajectoryService, view: Callable[..., dict[str, Any]]
) -> Callable[[], Awaitable[Response]]:
    async def show() -> Response:
        return answer(await service.engine.read(view))

    return show
