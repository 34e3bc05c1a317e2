"""Broken on purpose: a mean over nothing is its reward."""


class Broken:
    """Pays the mean length of words."""

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "Use short words."}]}

    async def step(self, message):
        return {"done": True, "reward": float("inf") - float("inf")}
