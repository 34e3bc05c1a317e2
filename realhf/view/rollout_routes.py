"""Answers what the page asks about rollouts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from realhf.view.packed import MEDIA_TYPE
from realhf.view.run import Run

SEARCH_S = 30.0
"""How long a full-text search may take, in seconds; it says how far it came."""
LONGEST_SEARCH = 1000


class RolloutRoutes:
    """Holds the routes below ``/api/runs/<number>/``. ``run_of`` finds the run that a request is about."""

    def __init__(self, run_of: Callable[[Request], Run]) -> None:
        self._run_of = run_of

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            Route("/api/runs/{run:int}/rollouts", self.table),
            Route("/api/runs/{run:int}/rollout", self.one),
            Route("/api/runs/{run:int}/search", self.search),
        ]

    async def table(self, request: Request) -> Response:
        """Return all rollouts as columns."""
        return Response(await run_in_threadpool(self._run_of(request).rollouts.packed), media_type=MEDIA_TYPE)

    async def one(self, request: Request) -> Response:
        """Return everything about the rollout ``id``, unless nothing has changed since the answer with the stamp
        ``seen``."""
        arguments = request.query_params.get("id", ""), request.query_params.get("seen", "")
        found = await run_in_threadpool(self._run_of(request).rollouts.one, *arguments)
        if found is None:
            raise HTTPException(404, "there is no rollout with this id")
        return Response(json.dumps(found, separators=(",", ":")), media_type="application/json")

    async def search(self, request: Request) -> Response:
        """Stream the ids of rollouts that hold ``text``, a line of JSON for each find, until all were looked at or
        ``SEARCH_S`` have passed."""
        text = request.query_params.get("text", "")[:LONGEST_SEARCH]
        stopped = threading.Event()
        found = self._run_of(request).rollouts.search(text, time.monotonic() + SEARCH_S, stopped.is_set)
        return StreamingResponse(_streamed(found, stopped), media_type="application/x-ndjson")


async def _streamed(found: Iterator[dict[str, Any]], stopped: threading.Event) -> AsyncIterator[bytes]:
    """Turn finds into lines; the thread that looks for them ends with the request."""
    loop = asyncio.get_running_loop()
    try:
        while (item := await loop.run_in_executor(None, next, found, None)) is not None:
            yield json.dumps(item).encode() + b"\n"
    finally:
        stopped.set()
