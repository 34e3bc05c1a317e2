"""Broken on purpose: it spins, so that not even a cancellation gets through."""


class Broken:
    """Counts for ever."""

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "Say something."}]}

    async def step(self, message):
        count = 0
        while count >= 0:
            count += 1
