"""Broken on purpose: all instances share one secret."""


class Broken:
    """Keeps the number of an episode in the class."""

    async def reset(self, task, *, seed):
        Broken.secret = seed
        return {"messages": [{"role": "user", "content": "Guess."}]}

    async def step(self, message):
        answer = f"It was {Broken.secret}."
        return {"messages": [{"role": "user", "content": answer}], "done": True, "reward": 0.0}
