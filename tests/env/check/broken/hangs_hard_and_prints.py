"""Broken on purpose: it spins and prints all the while."""

import os

TEXT = b"still here\n" * 100


class Broken:
    """Prints for ever."""

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "Say something."}]}

    async def step(self, message):
        while True:
            os.write(1, TEXT)
