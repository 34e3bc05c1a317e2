"""An agent around the ``openai`` package for tests: it asks for a report in a form that its own
code depends on, by ``response_format`` and by a required call."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from typing import Any, Literal

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic import BaseModel, ValidationError

MISSED = -1.0
"""Reward of an answer that does not have the form."""
_MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["left", "right"]}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}


class Report(BaseModel):
    """What the agent asks for."""

    door: Literal["left", "right"]
    tries: int


async def rollout(task: Mapping[str, Any], base_url: str, session: Any) -> float:
    """Ask twice and pay for the door that is reported and moved to."""
    del task
    http = DefaultAsyncHttpxClient(trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    async with AsyncOpenAI(
        base_url=base_url, api_key="none", http_client=http, max_retries=0
    ) as ai:
        asked = [{"role": "user", "content": session.text}]
        try:
            answer: Any = ai.chat.completions
            parsed = await answer.parse(model="m", messages=asked, response_format=Report)
        except ValidationError:
            return MISSED
        moved = await answer.create(
            model="m",
            messages=[{"role": "user", "content": "move"}],
            tools=[_MOVE],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        calls = moved.choices[0].message.tool_calls
        if not calls:
            return MISSED
        to = json.loads(calls[0].function.arguments).get("to")
        return float(parsed.choices[0].message.parsed.door == "left") + float(to == "left")
