"""Serves the page and what it asks for: files of runs, read when they are asked for; nothing is ever written."""

from __future__ import annotations

import asyncio
import json
import mimetypes
from collections.abc import Awaitable, Callable
from importlib.resources.abc import Traversable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from realhf.view.packed import MEDIA_TYPE
from realhf.view.page import static_files
from realhf.view.rollout_routes import RolloutRoutes
from realhf.view.run import Run
from realhf.view.run_list import RunList
from realhf.view.web_guard import WebGuard

CHANGES_S = 20.0
"""How long a request for changes waits, in seconds; the page asks again at once."""
LOOK_S = 0.25
Handler = Callable[[Request], Awaitable[Response]]


def create_app(runs: RunList, *, follow: bool) -> Starlette:
    """Make the application. ``follow``: the page asks for changes all the time."""
    api = Api(runs, follow)
    files = static_files()
    routes: list[BaseRoute] = [Route("/", _file(files["index.html"]))]
    routes += [Route(f"/static/{name}", _file(file)) for name, file in files.items()]
    routes += [
        Route("/api/runs", api.list_runs),
        Route("/api/changes", api.changes),
        Route("/api/runs/{run:int}/metrics", api.metrics),
        Route("/api/runs/{run:int}/evaluations", api.evaluations),
        Route("/api/runs/{run:int}/advisories", api.advisories),
        Route("/api/runs/{run:int}/about", api.about),
        Route("/api/runs/{run:int}/spans", api.spans),
    ]
    routes += RolloutRoutes(api.run_of).routes()
    handlers = {OSError: _unreadable}
    return Starlette(routes=routes, middleware=[Middleware(WebGuard)], exception_handlers=handlers)


class Api:
    """Answers what the page asks. Files are read in threads, so that a slow disk delays nobody else."""

    def __init__(self, runs: RunList, follow: bool) -> None:
        self._runs = runs
        self._follow = follow

    async def list_runs(self, request: Request) -> Response:
        """List all runs with their states."""
        return _json(await run_in_threadpool(self._list))

    async def changes(self, request: Request) -> Response:
        """Wait until a part of the runs ``?run=..`` differs from what ``seen`` says, at most ``CHANGES_S``."""
        numbers = [int(text) for text in request.query_params.getlist("run") if text.isdecimal()][:16]
        seen = request.query_params.get("seen", "")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CHANGES_S
        while True:
            found = await run_in_threadpool(self._changes, numbers)
            if found["seen"] != seen or loop.time() > deadline or not self._follow:
                return _json(found)
            if await request.is_disconnected():
                return Response(status_code=204)
            try:
                await asyncio.sleep(LOOK_S)
            except asyncio.CancelledError:  # the server ends
                return Response(status_code=204)

    async def metrics(self, request: Request) -> Response:
        """Return the rows of a run behind ``start``, column by column."""
        run = self.run_of(request)

        def read() -> dict[str, Any]:
            run.metrics.refresh()
            return run.metrics.columns(_number(request, "epoch"), _number(request, "start"))

        return _json(await run_in_threadpool(read))

    async def evaluations(self, request: Request) -> Response:
        """Return the held-out evaluations of a run."""
        return _json(await run_in_threadpool(self.run_of(request).evaluations))

    async def advisories(self, request: Request) -> Response:
        """Return what seems wrong with a run."""
        return _json(await run_in_threadpool(self.run_of(request).advisories))

    async def about(self, request: Request) -> Response:
        """Return configuration and origin of a run."""
        return _json(await run_in_threadpool(self.run_of(request).about))

    async def spans(self, request: Request) -> Response:
        """Return the spans of a run behind ``start``, packed."""
        arguments = _number(request, "epoch"), _number(request, "start")
        return Response(await run_in_threadpool(self.run_of(request).spans.packed, *arguments), media_type=MEDIA_TYPE)

    def _list(self) -> dict[str, Any]:
        runs = [{"number": number, **run.described()} for number, run in enumerate(self._runs.refresh())]
        left_off = self._runs.left_off()
        return {
            "follow": self._follow,
            "runs": runs,
            "left_off": len(left_off),
            "one_left_off": str(left_off[0]) if left_off else "",
        }

    def _changes(self, numbers: list[int]) -> dict[str, Any]:
        runs = [(number, run) for number in numbers if (run := self._runs.get(number)) is not None]
        stamps = {str(number): run.stamps() for number, run in runs}
        states = {str(number): {"number": number, **run.described()} for number, run in runs}
        return {
            "seen": json.dumps([stamps, {n: s["state"] for n, s in states.items()}]),
            "runs": stamps,
            "states": states,
        }

    def run_of(self, request: Request) -> Run:
        """Return the run whose number is in the path. Raises HTTPException 404 when there is none."""
        run = self._runs.get(request.path_params["run"])
        if run is None:
            raise HTTPException(404, "there is no run with this number")
        return run


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    return int(text) if text.isdecimal() and len(text) < 16 else -1


def _json(content: Any) -> Response:
    """Encode as ASCII, so that halves of characters arrive as they are."""
    return Response(json.dumps(content, separators=(",", ":")), media_type="application/json")


def _file(source: Traversable) -> Handler:
    content, kind = source.read_bytes(), mimetypes.guess_type(source.name)[0] or "application/octet-stream"

    async def file(request: Request) -> Response:
        return Response(content, media_type=kind)

    return file


async def _unreadable(request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    return JSONResponse({"detail": f"{error.filename or 'a file'} cannot be read: {error.strerror}"}, 410)
