"""HTTP server of the agents' endpoint on the loopback interface, with one base URL for each session:
``/sessions/<id>/v1``.

It serves the APIs in ``APIS``, ``GET .../v1/models``, and ``POST /sessions/<id>/reward`` with
``{"reward": x}`` or ``{"rewards": {id of a completion: x}}``, which ends the session. Sessions are
created only within this process, never over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from realhf.rollout.anthropic_messages import MESSAGES
from realhf.rollout.api_errors import ApiError, from_validation
from realhf.rollout.chat_completions import CHAT_COMPLETIONS
from realhf.rollout.endpoint_api import MODEL, EndpointApi
from realhf.rollout.openai_responses import RESPONSES
from realhf.rollout.openai_sessions import OpenAiSession, OpenAiSessions, Reward
from realhf.web.connections import guarded_http

APIS: tuple[EndpointApi, ...] = (CHAT_COMPLETIONS, RESPONSES, MESSAGES)
"""The APIs that are served. Errors of addresses that belong to none have the first one's form."""
MAX_BODY_BYTES = 1 << 20
"""Maximum size of a request's body, in bytes."""


def model_list() -> dict[str, Any]:
    """Return the model list, whose only entry is the policy."""
    return {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "realhf"}],
    }


class RewardReport(BaseModel):
    """Body of ``POST /sessions/<id>/reward``: one reward for all conversations of the session, or
    one reward per conversation, keyed by the id of a completion in it."""

    reward: float | None = None
    rewards: dict[str, float] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Self:
        if (self.reward is None) == (self.rewards is None):
            raise ValueError("give either reward or rewards")
        return self

    def to_reward(self) -> Reward:
        """Return the reported reward, or the rewards by completion id."""
        return self.rewards or self.reward or 0.0


def build_app(sessions: OpenAiSessions) -> FastAPI:
    """Return the application. It must be served on the event loop on which ``sessions`` are
    used."""
    app = FastAPI(title="realhf policy", openapi_url=None)
    app.add_middleware(_BodyLimit)
    _add_errors(app)
    for api in APIS:
        api.add_routes(app, sessions)

    @app.get("/sessions/{key}/v1/models")
    async def models(key: str) -> dict[str, Any]:
        sessions.find(key)
        return model_list()

    @app.post("/sessions/{key}/reward")
    async def reward(key: str, body: RewardReport) -> dict[str, Any]:
        session = sessions.find(key)
        session.report(body.to_reward())
        return {"trajectories": len(session.ledger.branches), "turns": session.ledger.turns}

    return app


class _BodyLimit:
    """Middleware that refuses a request body that is too long or has no Content-Length, without
    reading it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            length = dict(scope["headers"]).get(b"content-length", b"")
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                error = ApiError(
                    413, "too_large", f"a body has a Content-Length of at most {MAX_BODY_BYTES}"
                )
                await _error_response(Request(scope), error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _error_response(request: Request, error: ApiError) -> Response:
    """Return an error in the form of the API that the request was made with."""
    api = next((api for api in APIS if api.handles(request)), APIS[0])
    # In ASCII, because a message may quote half of a surrogate pair from the request.
    text = json.dumps(api.error_body(error))
    return Response(text, error.status, media_type="application/json")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return _error_response(request, error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(
            error.status_code, "invalid_request"
        )
        routes = ", ".join(route for api in APIS for route in api.routes)
        text = (
            f"{error.detail}: under a session's address, the server has {routes}, GET models and, "
            "next to /v1, POST reward"
        )
        response = _error_response(request, ApiError(error.status_code, code, text))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> Response:
        text = f"the endpoint failed: {type(error).__name__}: {error}"[:300]
        return _error_response(request, ApiError(500, "internal_error", text))

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        return _error_response(request, from_validation(error.errors()))


_START_S = 10.0
"""Seconds that the server gets to start."""
_STOP_S = 3.0
"""Seconds that the server gets to stop."""


class _Server(uvicorn.Server):
    """Uvicorn server that installs no signal handlers, because signals are handled by the process
    around it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Context manager that does nothing: it installs no signal handlers."""
        yield


class OpenAiServer:
    """HTTP server for ``sessions``. ``url`` is its address once started."""

    def __init__(self, sessions: OpenAiSessions) -> None:
        self.sessions = sessions
        self.url = ""
        self._server = _Server(
            uvicorn.Config(
                build_app(sessions),
                http=guarded_http("h11"),
                loop="none",  # the caller's loop
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    def base_url(self, session: OpenAiSession) -> str:
        """Return the base URL of a session, for a client of any of the APIs."""
        return f"{self.url}/sessions/{session.key}/v1"

    async def start(self) -> None:
        """Start the server on a free port, unless it is already running. Raises RuntimeError if it
        does not start."""
        if self._serving is not None and not self._serving.done():
            return
        listener = socket.create_server(("127.0.0.1", 0))
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        deadline = asyncio.get_running_loop().time() + _START_S
        while not self._server.started:
            if self._serving.done() or asyncio.get_running_loop().time() > deadline:
                raise RuntimeError(
                    f"the endpoint of black-box agents did not start within {_START_S:g} s"
                )
            await asyncio.sleep(0.005)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Stop the server. Idempotent."""
        serving = self._serving
        self._serving = None
        if serving is None:
            return
        self._server.should_exit = True
        await asyncio.wait((serving,), timeout=_STOP_S)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
