"""Writes the endpoint's answers in the JSON shapes of the OpenAI API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from realhf.api.chat_template import TemplateChat
from realhf.rollout.openai_requests import call_body
from realhf.rollout.openai_sessions import OpenTurn

MODEL = "policy"
DONE = "data: [DONE]\n\n"


def completion(turn: OpenTurn, chat: TemplateChat, *, logprobs: bool) -> dict[str, Any]:
    """Return a whole ``chat.completion``."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", **_content(turn), "refusal": None},
        "finish_reason": _finish_reason(turn),
        "logprobs": _logprobs(turn, chat) if logprobs else None,
    }
    return _head("chat.completion", turn) | {"choices": [choice], "usage": _usage(turn)}


def chunks(turn: OpenTurn, chat: TemplateChat, *, logprobs: bool, usage: bool) -> Iterator[str]:
    """Yield the same completion as server-sent events."""
    head, content = _head("chat.completion.chunk", turn), _content(turn)
    for position, call in enumerate(content.get("tool_calls", ())):
        call["index"] = position
    parts = [
        ({"role": "assistant", "content": ""}, None, None),
        (content, None, _logprobs(turn, chat) if logprobs else None),
        ({}, _finish_reason(turn), None),
    ]
    for delta, reason, values in parts:
        yield event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": values}]})
    if usage:
        yield event(head | {"choices": [], "usage": _usage(turn)})
    yield DONE


def models() -> dict[str, Any]:
    """Return the list of models: the policy, whatever name a request uses."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "realhf"}]}


def event(body: dict[str, Any]) -> str:
    """Return one server-sent event."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def _content(turn: OpenTurn) -> dict[str, Any]:
    """The content, null beside calls if empty, and the calls; the reasoning beside calls, which else stays in the
    content."""
    said = turn.answer
    if not said.calls:
        return {"content": said.content}
    body: dict[str, Any] = {"content": said.content or None, "tool_calls": [call_body(call) for call in said.calls]}
    return body | ({"reasoning_content": turn.said.reasoning} if turn.said.reasoning else {})


def _finish_reason(turn: OpenTurn) -> str:
    return "tool_calls" if turn.answer.calls and turn.finish_reason == "stop" else turn.finish_reason


def _head(kind: str, turn: OpenTurn) -> dict[str, Any]:
    return {"id": turn.reply, "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(turn: OpenTurn) -> dict[str, int]:
    prompt, sampled = len(turn.prompt), len(turn.ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(turn: OpenTurn, chat: TemplateChat) -> dict[str, Any]:
    content = []
    for token, value in zip(turn.ids, turn.logprobs, strict=True):
        text = chat.decode([token])
        content.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}
