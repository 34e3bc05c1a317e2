"""Broken on purpose: it takes the interpreter down with it."""

import ctypes


class Broken:
    """Reads where nothing is."""

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "Say something."}]}

    async def step(self, message):
        ctypes.string_at(0)
        return {"done": True}
