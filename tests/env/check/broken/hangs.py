"""Broken on purpose: it waits for somebody who never comes."""

import asyncio


class Broken:
    """Waits without a deadline."""

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "Say something."}]}

    async def step(self, message):
        await self.answer()

    async def answer(self):
        await asyncio.Event().wait()
