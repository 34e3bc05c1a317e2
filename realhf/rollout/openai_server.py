"""OpenAI-compatible chat endpoint on the loopback interface, with one base URL for each session:
``/sessions/<id>/v1``.

``POST .../v1/chat/completions`` (also streamed), ``GET .../v1/models``, and ``POST
/sessions/<id>/reward`` with ``{"reward": x}`` or ``{"rewards": {id of a completion: x}}``, which
ends the session. Sessions are created only within this process, never over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from realhf.api.chat_template import TemplateChat
from realhf.rollout.openai_requests import ApiError, ChatRequest, call_body
from realhf.rollout.openai_sessions import OpenAiSession, OpenAiSessions, OpenTurn, Reward
from realhf.web.connections import guarded_http

MAX_BODY_BYTES = 1 << 20
"""Maximum size of a request's body, in bytes."""
MODEL = "policy"
"""Model name in answers; requests may use any name."""
_SERVED = "POST chat/completions, GET models and, next to /v1, POST reward"
"""Available routes below a session's address, for error messages."""


def build_completion(turn: OpenTurn, chat: TemplateChat, *, logprobs: bool) -> dict[str, Any]:
    """Return the body of a ``chat.completion``."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", **_content(turn), "refusal": None},
        "finish_reason": _finish_reason(turn),
        "logprobs": _logprobs(turn, chat) if logprobs else None,
    }
    return _head("chat.completion", turn) | {"choices": [choice], "usage": _usage(turn)}


async def stream_chunks(
    turn: OpenTurn, chat: TemplateChat, *, logprobs: bool, usage: bool
) -> AsyncIterator[str]:
    """Yield a completion as server-sent events. ``usage`` adds a chunk with token counts."""
    head = _head("chat.completion.chunk", turn)
    content = _content(turn)
    for position, call in enumerate(content.get("tool_calls", ())):
        call["index"] = position
    parts = [
        ({"role": "assistant", "content": ""}, None, None),
        (content, None, _logprobs(turn, chat) if logprobs else None),
        ({}, _finish_reason(turn), None),
    ]
    for delta, reason, values in parts:
        yield _event(
            head
            | {
                "choices": [
                    {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": values}
                ]
            }
        )
    if usage:
        yield _event(head | {"choices": [], "usage": _usage(turn)})
    yield "data: [DONE]\n\n"


def model_list() -> dict[str, Any]:
    """Return the model list, whose only entry is the policy."""
    return {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "realhf"}],
    }


def _event(body: dict[str, Any]) -> str:
    """Return one server-sent event."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def _content(turn: OpenTurn) -> dict[str, Any]:
    """Return the fields ``content`` and ``tool_calls`` of a message.

    With tool calls, an empty content is null and reasoning is in a separate field. Without tool
    calls, reasoning stays in the content.
    """
    answer = turn.answer
    if not answer.calls:
        return {"content": answer.content}
    body: dict[str, Any] = {
        "content": answer.content or None,
        "tool_calls": [call_body(call) for call in answer.calls],
    }
    return body | ({"reasoning_content": turn.parsed.reasoning} if turn.parsed.reasoning else {})


def _finish_reason(turn: OpenTurn) -> str:
    return (
        "tool_calls" if turn.answer.calls and turn.finish_reason == "stop" else turn.finish_reason
    )


def _head(kind: str, turn: OpenTurn) -> dict[str, Any]:
    return {"id": turn.reply, "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(turn: OpenTurn) -> dict[str, int]:
    n_prompt = len(turn.prompt)
    n_sampled = len(turn.ids)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_sampled,
        "total_tokens": n_prompt + n_sampled,
    }


def _logprobs(turn: OpenTurn, chat: TemplateChat) -> dict[str, Any]:
    content = []
    for token, value in zip(turn.ids, turn.logprobs, strict=True):
        token_bytes = chat.bytes_of(token)
        entry = {
            "token": chat.decode([token]),
            "logprob": value,
            "bytes": None if token_bytes is None else list(token_bytes),
        }
        content.append({**entry, "top_logprobs": []})
    return {"content": content, "refusal": None}


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

    @app.get("/sessions/{key}/v1/models")
    async def models(key: str) -> dict[str, Any]:
        sessions.find(key)
        return model_list()

    @app.post("/sessions/{key}/v1/chat/completions")
    async def complete(key: str, body: ChatRequest, request: Request) -> Response:
        session = sessions.find(key)
        messages = body.conversation()
        turn = await _wait_while_connected(session.sample(messages, body.parse_tools()), request)
        if turn is None:
            return Response(status_code=499)
        if await request.is_disconnected():
            session.discard(turn)
            return Response(status_code=499)
        session.keep(turn)
        logprobs = bool(body.logprobs)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            events = stream_chunks(turn, sessions.chat, logprobs=logprobs, usage=usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(build_completion(turn, sessions.chat, logprobs=logprobs))

    @app.post("/sessions/{key}/reward")
    async def reward(key: str, body: RewardReport) -> dict[str, Any]:
        session = sessions.find(key)
        session.report(body.to_reward())
        return {"trajectories": len(session.ledger.branches), "turns": session.ledger.turns}

    return app


async def _wait_while_connected(
    sampling: Coroutine[Any, Any, OpenTurn], request: Request
) -> OpenTurn | None:
    """Wait for a turn to be sampled and return it. If the client disconnects first, cancel the
    sampling and return None."""
    work = asyncio.ensure_future(sampling)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        disconnect.cancel()
        await asyncio.wait((work, disconnect))


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
                await JSONResponse(error.body(), 413)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(
            error.status_code, "invalid_request"
        )
        text = f"{error.detail}: under a session's address, the server has {_SERVED}"
        return JSONResponse(
            ApiError(error.status_code, code, text).body(), error.status_code, error.headers
        )

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        # pydantic's prefix for errors of our validators
        problem = first["msg"].removeprefix("Value error, ")
        return JSONResponse(
            ApiError(400, "invalid_request", f"{where}: {problem}"[:300]).body(), 400
        )


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
        """Return the base URL of a session, for the agent's client."""
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
