"""LiteLLM's chat completions."""

from __future__ import annotations

from typing import Any

import litellm


async def rollout(task: Any, base_url: str, session: Any) -> None:
    """Let the model act until the environment ends the episode."""
    messages = list(session.messages)
    while True:
        reply = await litellm.acompletion(
            model="openai/policy",
            api_base=base_url,
            api_key="none",
            messages=messages,
            tools=session.tools,
        )
        said = reply.choices[0].message
        answer = await session.step(said)
        if answer.done:
            return
        messages += [said, *answer.messages]
