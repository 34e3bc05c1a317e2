"""Broken on purpose: every instance leaves a task on the event loop behind."""

import asyncio


class Broken:
    """Starts a task in reset, and has no close."""

    async def reset(self, task, *, seed):
        self.ticking = asyncio.create_task(self.tick())
        return {"messages": [{"role": "user", "content": "Say something."}]}

    async def tick(self):
        await asyncio.sleep(3600)

    async def step(self, message):
        return {"done": True, "reward": 0.0}
