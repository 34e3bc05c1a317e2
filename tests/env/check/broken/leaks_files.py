"""Broken on purpose: every instance leaves an open file behind."""

import os
import tempfile

KEPT = []


class Broken:
    """Opens a file in reset, and has no close."""

    async def reset(self, task, *, seed):
        number, path = tempfile.mkstemp(prefix="broken-")
        KEPT.append(number)
        os.unlink(path)
        return {"messages": [{"role": "user", "content": "Say something."}]}

    async def step(self, message):
        return {"done": True, "reward": 0.0}
