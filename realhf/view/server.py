"""Server of the page about runs, for this machine only. It reads the files of runs on request and
writes nothing."""

from __future__ import annotations

import asyncio
import json
import mimetypes
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from importlib.resources.abc import Traversable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from realhf.base import process_clock
from realhf.view.report import static_files
from realhf.view.run import Run, RunList
from realhf.view.run_data import MEDIA_TYPE
from realhf.web.guard import (
    PAGE_HEADERS,
    SAME_ORIGIN_POLICY,
    GuardRules,
    PageRules,
    RequestGuard,
    ServedHosts,
)

CHANGES_S = 20.0
"""Maximum seconds for which a request for changes waits; afterwards the page sends a new
request."""
LOOK_S = 0.25
"""Seconds between two checks of the files while a request waits."""
SEARCH_S = 30.0
"""Maximum seconds of a full-text search; its result says how much was searched."""
MAX_SEARCH_CHARS = 1000
"""Maximum number of characters of a search text."""
Handler = Callable[[Request], Awaitable[Response]]
"""Handler of a request."""


def create_app(runs: RunList, *, follow: bool) -> Starlette:
    """Return the application. ``follow``: whether the page keeps asking for changes."""
    api = Api(runs, follow)
    files = static_files()
    routes: list[BaseRoute] = [Route("/", _file(files["index.html"]))]
    routes += [Route(f"/static/{name}", _file(file)) for name, file in files.items()]
    routes += [Route("/api/runs", api.list_runs), Route("/api/changes", api.changes)]
    routes += [
        Route(f"/api/runs/{{run:int}}/{name}", api.part(read_part))
        for name, read_part in PARTS_OF_A_RUN.items()
    ]
    routes += [Route("/api/runs/{run:int}/search", api.search)]
    handlers = {OSError: _on_unreadable_file}
    return Starlette(
        routes=routes,
        middleware=[Middleware(RequestGuard, rules=guard_rules())],
        exception_handlers=handlers,
    )


class Api:
    """Handlers of the page's requests. Files are read in threads, so that a slow disk does not
    delay other requests."""

    def __init__(self, runs: RunList, follow: bool) -> None:
        self._runs = runs
        self._follow = follow

    async def list_runs(self, request: Request) -> Response:
        """Return all runs with their states."""
        return _json(await run_in_threadpool(self._list))

    async def changes(self, request: Request) -> Response:
        """Return the states of the runs in ``?run=..`` once they differ from those in ``?seen=..``,
        or after ``CHANGES_S`` seconds."""
        numbers = [int(text) for text in request.query_params.getlist("run") if text.isdecimal()][
            :16
        ]
        known_state = request.query_params.get("seen", "")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CHANGES_S
        while True:
            changes = await run_in_threadpool(self._changes, numbers)
            if changes["seen"] != known_state or loop.time() > deadline or not self._follow:
                return _json(changes)
            if await request.is_disconnected():
                return Response(status_code=204)
            try:
                await asyncio.sleep(LOOK_S)
            except asyncio.CancelledError:  # the server is shutting down
                return Response(status_code=204)

    def part(self, read_part: Callable[[Run, Request], Any]) -> Handler:
        """Return a handler for a part of a run. ``read_part`` returns the part as bytes, or as a
        value for JSON."""

        async def answer(request: Request) -> Response:
            part = await run_in_threadpool(read_part, self._find_run(request), request)
            return Response(part, media_type=MEDIA_TYPE) if isinstance(part, bytes) else _json(part)

        return answer

    async def search(self, request: Request) -> Response:
        """Stream the ids of rollouts that contain ``text``, as lines of JSON, until all rollouts
        are searched or ``SEARCH_S`` seconds have passed."""
        text = request.query_params.get("text", "")[:MAX_SEARCH_CHARS]
        stop_requested = threading.Event()
        results = self._find_run(request).rollouts.search(
            text, process_clock.now() + SEARCH_S, stop_requested.is_set
        )
        return StreamingResponse(
            _stream_lines(results, stop_requested), media_type="application/x-ndjson"
        )

    def _list(self) -> dict[str, Any]:
        runs = [
            {"number": number, **run.describe()} for number, run in enumerate(self._runs.refresh())
        ]
        left_off = self._runs.left_off()
        return {
            "follow": self._follow,
            "runs": runs,
            "first": self._runs.first(),
            "left_off": len(left_off),
            "one_left_off": str(left_off[0]) if left_off else "",
        }

    def _changes(self, numbers: list[int]) -> dict[str, Any]:
        runs = [(number, run) for number in numbers if (run := self._runs.get(number)) is not None]
        stamps = {str(number): run.stamps() for number, run in runs}
        states = {str(number): {"number": number, **run.describe()} for number, run in runs}
        return {
            "seen": json.dumps([stamps, {n: s["state"] for n, s in states.items()}]),
            "runs": stamps,
            "states": states,
        }

    def _find_run(self, request: Request) -> Run:
        run = self._runs.get(request.path_params["run"])
        if run is None:
            raise HTTPException(404, "there is no run with this number")
        return run


def _metrics(run: Run, request: Request) -> dict[str, Any]:
    run.metrics.refresh()
    return run.metrics.columns(_number(request, "epoch"), _number(request, "start"))


def _rollout(run: Run, request: Request) -> dict[str, Any]:
    rollout = run.rollouts.read_rollout(
        request.query_params.get("id", ""), request.query_params.get("seen", "")
    )
    if rollout is None:
        raise HTTPException(404, "there is no rollout with this id")
    return rollout


PARTS_OF_A_RUN: Mapping[str, Callable[[Run, Request], Any]] = {
    "metrics": _metrics,
    "evaluations": lambda run, _: run.evaluations(),
    "advisories": lambda run, _: run.advisories(),
    "about": lambda run, _: run.about(),
    "spans": lambda run, request: run.spans.pack(
        _number(request, "epoch"), _number(request, "start")
    ),
    "rollouts": lambda run, _: run.rollouts.pack(),
    "rollout": _rollout,
}
"""Handlers of the routes below ``/api/runs/<number>/``. Metrics and spans are returned from
``start`` on. A rollout (``id``) is returned in full only if it has changed since the answer with
the stamp ``seen``."""


def _number(request: Request, name: str) -> int:
    """Return a number from the query; 0 if it is missing, -1 if it is invalid."""
    text = request.query_params.get(name, "0")
    return int(text) if text.isdecimal() and len(text) < 16 else -1


def _json(content: Any) -> Response:
    """Return a JSON response in ASCII, so that unpaired surrogates arrive unchanged."""
    return Response(json.dumps(content, separators=(",", ":")), media_type="application/json")


def _file(source: Traversable) -> Handler:
    """Return a handler that serves a file of the page."""
    content, kind = (
        source.read_bytes(),
        mimetypes.guess_type(source.name)[0] or "application/octet-stream",
    )

    async def file(request: Request) -> Response:
        return Response(content, media_type=kind)

    return file


async def _on_unreadable_file(request: Request, error: Exception) -> Response:
    """Return the response for a file that cannot be read."""
    assert isinstance(error, OSError)
    return JSONResponse(
        {"detail": f"{error.filename or 'a file'} cannot be read: {error.strerror}"}, 410
    )


async def _stream_lines(
    results: Iterator[dict[str, Any]], stop_requested: threading.Event
) -> AsyncIterator[bytes]:
    """Yield search results as lines of JSON. The search is stopped when the request ends."""
    loop = asyncio.get_running_loop()
    try:
        while (item := await loop.run_in_executor(None, next, results, None)) is not None:
            yield json.dumps(item).encode() + b"\n"
    finally:
        stop_requested.set()


SERVER_HEADER = "X-Realhf-Server"
"""Response header with a random name of this process, by which an open page notices that another
server, with other runs, now uses the port."""


def guard_rules() -> GuardRules:
    """Return the rules of the page's server: requests come from this machine, and from the page
    itself."""
    local_only = "this page is served to 127.0.0.1 and localhost only"
    headers = {
        **PAGE_HEADERS,
        "Content-Security-Policy": SAME_ORIGIN_POLICY,
        "Cache-Control": "no-store",
    }
    return GuardRules(
        pages=PageRules(ServedHosts(local_only), schemes=frozenset({"http"})),
        error_body=lambda refusal: {"detail": refusal.detail},
        local_only_reason=local_only,
        headers={**headers, SERVER_HEADER: secrets.token_hex(8)},
    )
