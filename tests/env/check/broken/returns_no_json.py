"""Broken on purpose: what it answers is no text."""


class Broken:
    """Answers with bytes."""

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "Say something."}]}

    async def step(self, message):
        return {"messages": [{"role": "user", "content": b"bytes"}], "done": True, "reward": 0.0}
