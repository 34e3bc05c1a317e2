"""Writes the endpoint's answers in the JSON shapes of the OpenAI API."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from realhf.api.chat import TemplateChat
from realhf.rollout.openai_endpoint.token_ledger import OpenTurn

MODEL = "policy"
DONE = "data: [DONE]\n\n"


def completion(turn: OpenTurn, chat: TemplateChat, *, logprobs: bool) -> dict[str, Any]:
    """Return a whole ``chat.completion``."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": turn.text, "refusal": None},
        "finish_reason": turn.finish_reason,
        "logprobs": _logprobs(turn, chat) if logprobs else None,
    }
    return _head("chat.completion") | {"choices": [choice], "usage": _usage(turn)}


def chunks(turn: OpenTurn, chat: TemplateChat, *, logprobs: bool, usage: bool) -> Iterator[str]:
    """Yield the same completion as server-sent events."""
    head = _head("chat.completion.chunk")
    parts = [
        ({"role": "assistant", "content": ""}, None, None),
        ({"content": turn.text}, None, _logprobs(turn, chat) if logprobs else None),
        ({}, turn.finish_reason, None),
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


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(turn: OpenTurn) -> dict[str, int]:
    prompt, sampled = len(turn.prompt), len(turn.ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(turn: OpenTurn, chat: TemplateChat) -> dict[str, Any]:
    content = []
    for token, value in zip(turn.ids, turn.logprobs, strict=True):
        text = chat.decode([token])
        content.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}
