"""Broken on purpose: it draws from the generator that everybody shares."""

import random


class Broken:
    """Asks for a number that nobody can draw again."""

    async def reset(self, task, *, seed):
        self.secret = random.randint(1, 10**9)
        return {"messages": [{"role": "user", "content": f"Repeat {self.secret}."}]}

    async def step(self, message):
        return {"done": True, "reward": float(message.content == str(self.secret))}
