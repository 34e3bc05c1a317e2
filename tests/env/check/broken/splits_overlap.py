"""Broken on purpose: the held-out split holds a task of training."""

from realhf.api.environment import Task


class Tasks:
    """One row per task."""

    def __init__(self, numbers):
        self.group_of = {f"n{number}": "numbers" for number in numbers}
        self.groups = ["numbers"]

    def instantiate(self, template_id, seed):
        return Task(template_id, "numbers", {"number": int(template_id[1:])})


class Broken:
    """Holds out what it trains on."""

    @staticmethod
    def tasks(split):
        return Tasks(range(6) if split == "train" else range(5, 8))

    async def reset(self, task, *, seed):
        self.number = task["number"]
        return {"messages": [{"role": "user", "content": f"Repeat {self.number}."}]}

    async def step(self, message):
        return {"done": True, "reward": float(message.content == str(self.number))}
