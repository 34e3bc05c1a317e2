"""Broken on purpose: it sleeps without awaiting, so nothing else is played meanwhile."""

import time


class Broken:
    """Asks something that is slow."""

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "Wait for me."}]}

    async def step(self, message):
        self.ask()
        return {"done": True, "reward": 0.0}

    def ask(self):
        time.sleep(0.09)
