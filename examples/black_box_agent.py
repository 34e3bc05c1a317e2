"""A black-box agent: a program that knows a base URL and a way to run commands, and nothing of training.

    python -m realhf.launch experiment=grpo_aws_async rollout.agent=examples.black_box_agent:solve

Given in the folder of the checkout, the command trains the model behind the base URL while agents like this one use it.
The agent speaks plain HTTP, to show all there is on the wire; `experiments/agents/openai_agent.py` is one around the
`openai` package.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

LIMITS = ("turn_limit", "context_length_exceeded")
"""Codes of a 400: the episode has had all its turns or tokens. An agent that stops there has done nothing wrong."""
NO_COMMAND = "error: say one command in a line that starts with aws"
AGAIN = "It failed; here is the message. Say the corrected command.\n"


async def solve(task_text: str, base_url: str, run_command: Callable[[str], Awaitable[Any]]) -> float | None:
    """Let the model say commands until the environment has had enough. None: the reward is the environment's."""
    messages = [{"role": "user", "content": task_text}]
    # The model is on this machine, so neither proxies nor certificates have a part in it.
    local = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    async with httpx.AsyncClient(base_url=base_url, timeout=None, trust_env=False, verify=local) as model:
        while (said := await reply(model, messages)) is not None:
            messages.append({"role": "assistant", "content": said})
            command = next((line for line in said.splitlines() if line.startswith("aws ")), None)
            if command is None:
                messages.append({"role": "user", "content": NO_COMMAND})
                continue
            result = await run_command(command)
            if result.done:
                return None
            failed = result.output.startswith("error:")
            messages.append({"role": "user", "content": AGAIN + result.output if failed else result.output})
    return None


async def reply(model: httpx.AsyncClient, messages: list[dict[str, str]]) -> str | None:
    """The model's next turn, byte for byte as it must be sent back; None when a limit was reached."""
    answer = await model.post("chat/completions", json={"model": "policy", "messages": messages})
    body = answer.json()
    if answer.status_code == 400 and body["error"]["code"] in LIMITS:
        return None
    answer.raise_for_status()
    return body["choices"][0]["message"]["content"] or ""
