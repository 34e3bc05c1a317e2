"""Broken on purpose: it looks for something wrong, and finds nothing wrong in silence."""


class Broken:
    """Forbids a word."""

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "Write a sentence without the letter e."}]}

    async def step(self, message):
        right = float("e" not in message.content)
        return {"done": True, "reward": right, "metrics": {"success": right}}
