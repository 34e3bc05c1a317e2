"""Broken on purpose: an instance that has played before goes on where it was."""


class Broken:
    """Counts turns from its making and not from reset."""

    def __init__(self):
        self.turns = 0

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "Talk."}]}

    async def step(self, message):
        self.turns += 1
        answer = f"That was turn {self.turns}."
        return {"messages": [{"role": "user", "content": answer}], "done": self.turns >= 3, "reward": 0.0}
