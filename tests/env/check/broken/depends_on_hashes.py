"""Broken on purpose: the order of a set decides what is asked, and every process has another."""

WORDS = {"apple", "pear", "plum", "cherry", "grape", "melon", "quince", "fig", "lemon", "lime", "date", "kiwi"}


class Broken:
    """Asks for words in the order of a set."""

    async def reset(self, task, *, seed):
        self.words = " ".join(WORDS)
        return {"messages": [{"role": "user", "content": f"Repeat {self.words}."}]}

    async def step(self, message):
        return {"done": True, "reward": float(message.content == self.words)}
