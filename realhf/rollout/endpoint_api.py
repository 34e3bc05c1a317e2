"""What the APIs of the agents' endpoint share. Each API has a module of its own, which parses its
requests, samples with ``answer_request``, and writes its answers and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response

from realhf.api.chat_template import TemplateChat
from realhf.rollout.answer_rules import AnswerRules
from realhf.rollout.api_errors import ApiError
from realhf.rollout.openai_requests import OpenAiMessage, ToolSchemas
from realhf.rollout.openai_sessions import OpenAiSession, OpenAiSessions, OpenTurn

MODEL = "policy"
"""Model name in answers; requests may use any name."""


@dataclass(frozen=True)
class EndpointApi:
    """One API that the endpoint speaks."""

    routes: tuple[str, ...]
    """Its routes below a session's ``/v1/``, for example ``POST chat/completions``, which errors
    about unknown addresses list."""
    add_routes: Callable[[FastAPI, OpenAiSessions], None]
    """Function that adds the routes to the application."""
    error_body: Callable[[ApiError], dict[str, Any]]
    """Function that writes an error in the API's form."""
    header: str = ""
    """Header that its clients send with every request, by which errors about other addresses get
    its form; "" if they send none."""

    def handles(self, request: Request) -> bool:
        """Return whether errors of this request have this API's form."""
        if self.header and self.header in request.headers:
            return True
        # Anthropic's clients append /v1 to a base URL that ends with it already.
        path = request.url.path.partition("/v1/")[2].removeprefix("v1/")
        return any(path == route.split()[1] for route in self.routes)


async def answer_request(
    session: OpenAiSession,
    request: Request,
    messages: Sequence[OpenAiMessage],
    tools: ToolSchemas,
    rules: AnswerRules,
    *,
    id_prefix: str,
    after: str = "",
) -> OpenTurn | None:
    """Sample the turn that answers a request, and add it to its trajectory.

    Returns None, and keeps no turn, if the client has disconnected. Raises ApiError. ``id_prefix``
    is the start of the answer's id, ``after`` the id of the completion that the request continues,
    if the request contains it.
    """
    turn = await _wait_while_connected(session.sample(messages, tools, rules, after=after), request)
    if turn is None:
        return None
    if await request.is_disconnected():
        session.discard(turn)
        return None
    turn.reply = id_prefix + turn.reply
    session.keep(turn)
    return turn


def count_reasoning(turn: OpenTurn, chat: TemplateChat) -> int:
    """Return how many tokens of a turn are its leading reasoning block."""
    if not turn.parsed.reasoning:
        return 0
    words = chat.without_reasoning(turn.ids)
    return len(turn.ids) - len(words or ())


def json_response(body: dict[str, Any]) -> Response:
    """Return a JSON body in ASCII, because it may repeat half of a surrogate pair from the
    request."""
    return Response(json.dumps(body), media_type="application/json")


def format_event(body: dict[str, Any], name: str = "") -> str:
    """Return one server-sent event, which has a name in some APIs."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, separators=(',', ':'))}\n\n"


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
