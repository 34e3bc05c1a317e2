"""Broken on purpose: no episode is ever done."""


class Broken:
    """Asks for more."""

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "Talk."}]}

    async def step(self, message):
        return {"messages": [{"role": "user", "content": "Go on."}], "reward": 0.0}
