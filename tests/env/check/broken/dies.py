"""Broken on purpose: it ends the process when a call is wrong."""

import os


class Broken:
    """Leaves when it is spoken to in the wrong way."""

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "Say something."}]}

    async def step(self, message):
        if message.tool_calls:
            os._exit(7)
        return {"done": True, "reward": 0.0}
