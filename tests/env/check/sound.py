"""An environment without faults: a counter with tools, tasks, a solver and everything else that a
check looks at."""

from __future__ import annotations

import asyncio
import random

from realhf.api.environment import Demonstration, Task

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add a number to the counter.",
            "parameters": {
                "type": "object",
                "properties": {"amount": {"type": "integer"}},
                "required": ["amount"],
            },
        },
    }
]

GROUP_OF = {"below ten": "small", "below a hundred": "large"}


class Tasks:
    """Two groups of targets; the seeds of the held-out split are odd."""

    groups = ("small", "large")
    group_of = GROUP_OF

    def __init__(self, split: str) -> None:
        self.offset = int(split == "heldout")

    def instantiate(self, template_id: str, seed: int) -> Task:
        number = 2 * seed + self.offset
        most = 10 if template_id == "below ten" else 100
        return Task(
            f"{template_id}/{number}", self.group_of[template_id], {"most": most}, seed=number
        )


class Sound:
    """A counter that must reach a target."""

    system_prompt = "Use the tool."
    tasks = Tasks

    @staticmethod
    def demonstrate(request):
        for template in Tasks.group_of:
            task = Tasks("train").instantiate(template, request.seed)
            call = (
                f'<tool_call>\n{{"name": "add", "arguments": {{"amount": '
                f"{target_of(task.payload, task.seed)}}}}}\n"
            )
            yield Demonstration(task, (f"{call}</tool_call>",))

    async def reset(self, task, *, seed):
        await self.close()
        self.target = target_of(task, seed)
        self.count = 0
        self.turns = 0
        self.ticking = asyncio.create_task(asyncio.sleep(60))
        question = {"role": "user", "content": f"The counter is at 0. Bring it to {self.target}."}
        return {"messages": [question], "tools": TOOLS}

    async def step(self, message):
        await asyncio.sleep(0)
        self.turns += 1
        answers = [
            {"role": "tool", "name": call.name, "content": self.called(call)}
            for call in message.tool_calls
        ]
        right = self.count == self.target
        return {
            "messages": answers or [{"role": "user", "content": "Call the tool."}],
            "done": right or self.turns >= 8,
            "reward": float(right),
            "metrics": {"success": float(right)},
        }

    def called(self, call):
        amount = call.arguments.get("amount")
        if call.problem or call.name != "add" or type(amount) is not int:
            return f"error: {call.problem or 'add takes a whole number'}"
        self.count += amount
        return f"The counter is at {self.count}."

    async def close(self):
        if ticking := getattr(self, "ticking", None):
            ticking.cancel()


def target_of(task, seed):
    return random.Random(seed).randint(1, task["most"])
