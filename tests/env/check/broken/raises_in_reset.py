"""Broken on purpose: its reset raises for some tasks."""


class Broken:
    """Looks a word up that is not there."""

    WORDS = ("one", "two")

    async def reset(self, task, *, seed):
        self.word = self.WORDS[seed]
        return {"messages": [{"role": "user", "content": "Say the word."}]}

    async def step(self, message):
        return {"done": True, "reward": float(message.content == self.word)}
