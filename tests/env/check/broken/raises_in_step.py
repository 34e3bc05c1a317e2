"""Broken on purpose: a policy that does not say a number raises in its step."""


class Broken:
    """Takes every message for a number."""

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "What is 6 times 7?"}]}

    async def step(self, message):
        number = int(message.content)
        return {"done": True, "reward": float(number == 42)}
