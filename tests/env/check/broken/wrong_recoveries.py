"""Broken on purpose: the recoveries of its scripted solver end at the mistake. The solutions are right."""

from realhf.api.environment import RECOVERY, SOLUTION, Demonstration, Task


class Broken:
    """Counts on from a number; an episode has two tries."""

    @staticmethod
    def demonstrate(request):
        for number in range(3):
            for kind in request.kinds():
                turns = ("I guess 99", str(number)) if kind == RECOVERY else (str(number + 1),)
                kind = RECOVERY if kind == RECOVERY else SOLUTION
                yield Demonstration(Task(f"d{number}", payload={}, seed=number), turns, kind=kind)

    async def reset(self, task, *, seed):
        self.number, self.turns = seed, 0
        return {"messages": [{"role": "user", "content": f"What comes after {self.number}?"}]}

    async def step(self, message):
        self.turns += 1
        right = float(message.content == str(self.number + 1))
        done = bool(right) or self.turns == 2
        answer = [{"role": "user", "content": "No."}]
        return {"messages": answer, "done": done, "reward": right, "metrics": {"success": right}}
