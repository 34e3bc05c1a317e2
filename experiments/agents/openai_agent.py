"""A black-box agent: an ordinary program around the ``openai`` package that knows nothing of training.

rollout.agent=experiments.agents.openai_agent:solve
"""

from __future__ import annotations

import ssl

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletionMessageParam

from realhf.rollout.agents.black_box_agent import RunCommand

NO_COMMAND = "error: no command; reply with one line that starts with aws"


async def solve(task_text: str, base_url: str, run_command: RunCommand) -> float | None:
    """Let the model write commands until the environment has had enough. The reward is the environment's (None)."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": task_text}]
    # The model is on this machine, over plain HTTP: no proxy has a part in it, and certificates, whose reading would
    # take longer than an answer, are not loaded.
    http = DefaultAsyncHttpxClient(trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    async with AsyncOpenAI(base_url=base_url, api_key="none", http_client=http) as ai:
        while True:
            reply = await ai.chat.completions.create(model="policy", messages=messages)
            text = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            command = next((line.strip() for line in text.splitlines() if line.strip().startswith("aws ")), None)
            if command is None:
                messages.append({"role": "user", "content": NO_COMMAND})
                continue
            result = await run_command(command)
            if result.done:
                return None
            messages.append({"role": "user", "content": result.output})
