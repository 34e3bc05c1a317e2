"""The chat completions API of the agents' endpoint: its routes and the form of its answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from realhf.api.chat_template import TemplateChat
from realhf.rollout.api_errors import openai_error
from realhf.rollout.endpoint_api import MODEL, EndpointApi, answer_request, format_event
from realhf.rollout.openai_requests import ChatRequest, call_body
from realhf.rollout.openai_sessions import OpenAiSessions, OpenTurn


def add_routes(app: FastAPI, sessions: OpenAiSessions) -> None:
    """Add ``chat/completions``."""

    @app.post("/sessions/{key}/v1/chat/completions")
    async def complete(key: str, body: ChatRequest, request: Request) -> Response:
        session = sessions.find(key)
        messages = body.conversation()
        tools = body.parse_tools()
        rules = body.parse_rules()
        turn = await answer_request(session, request, messages, tools, rules, id_prefix="chatcmpl-")
        if turn is None:
            return Response(status_code=499)
        logprobs = bool(body.logprobs)
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            events = stream_chunks(turn, sessions.chat, logprobs=logprobs, usage=usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(build_completion(turn, sessions.chat, logprobs=logprobs))


CHAT_COMPLETIONS = EndpointApi(("POST chat/completions",), add_routes, openai_error)


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
        yield format_event(
            head
            | {
                "choices": [
                    {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": values}
                ]
            }
        )
    if usage:
        yield format_event(head | {"choices": [], "usage": _usage(turn)})
    yield "data: [DONE]\n\n"


def _content(turn: OpenTurn) -> dict[str, Any]:
    """Return the fields ``content``, ``tool_calls`` and ``reasoning_content`` of a message.

    With tool calls, an empty content is null.
    """
    answer = turn.answer
    body: dict[str, Any] = {"content": answer.content}
    if answer.calls:
        body["content"] = answer.content or None
        body["tool_calls"] = [call_body(call) for call in answer.calls]
    if turn.parsed.reasoning:
        body["reasoning_content"] = turn.parsed.reasoning
    return body


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
