"""Broken on purpose: every instance leaves a thread behind."""

import asyncio
import threading


class Broken:
    """Starts a thread in reset, which the loop does not wait for, and has no close."""

    async def reset(self, task, *, seed):
        self.ended = threading.Event()
        await asyncio.to_thread(threading.Thread(target=self.watch, daemon=True).start)
        return {"messages": [{"role": "user", "content": "Say something."}]}

    def watch(self):
        self.ended.wait()

    async def step(self, message):
        return {"done": True, "reward": 0.0}
