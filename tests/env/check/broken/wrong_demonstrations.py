"""Broken on purpose: its scripted solver is off by one."""

from realhf.api.environment import Demonstration, Task


class Broken:
    """Counts on from a number."""

    @staticmethod
    def demonstrate(request):
        for number in range(3):
            yield Demonstration(Task(f"d{number}", payload={}, seed=number), (str(number),))

    async def reset(self, task, *, seed):
        self.number = seed
        return {"messages": [{"role": "user", "content": f"What comes after {self.number}?"}]}

    async def step(self, message):
        right = float(message.content == str(self.number + 1))
        return {"done": True, "reward": right, "metrics": {"success": right}}
