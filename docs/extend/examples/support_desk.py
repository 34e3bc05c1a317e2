"""An environment with tools and a user who answers, the support desk of a shop: a class with ``user_reply``."""

import json
import random
import re

WISHES = {
    "refund": "My {item} came broken.",
    "cancel": "I do not want the {item} any more.",
    "move": "Please send the {item} to another city.",
}
ITEMS = {"train": ("lamp", "chair", "table", "clock"), "heldout": ("mirror", "shelf")}
CITIES = ("Rome", "Oslo", "Bern", "Lima")
MAX_REPLIES = 4


def say(tool, **arguments):
    """A call as the policy writes it."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


class SupportDesk:
    """The customer knows what the tools need, says it when asked, and leaves when they hear that it is done."""

    system_prompt = "Ask the customer for what the tools need, use them, and say when it is done."

    @staticmethod
    def tasks(split):
        """A row for each wish; every seed is another order."""
        return [{"id": f"{wish}-{split}", "group": wish, "wish": wish, "split": split} for wish in WISHES]

    @staticmethod
    def demonstrate(request):
        """What a good desk says, and now and then one that asks for nothing; for the warm start."""
        from realhf.api.environment import HABIT, Demonstration
        from realhf.env.loader.tasks import Row, RowTaskSet, tasks_of_rows

        rows = [Row(row, "tasks") for row in SupportDesk.tasks("train")]
        tasks, draw = RowTaskSet(tasks_of_rows(rows), seeded=True), random.Random(request.seed)
        for template in tasks.group_of:
            for kind in request.kinds():
                task, desk = tasks.instantiate(template, draw.getrandbits(31)), SupportDesk()
                desk.reset(**task.payload, seed=task.seed)
                asks = ["The number?", "Which city?"] if desk.wish == "move" else ["The number?"]
                arguments = {"number": desk.number} | ({"city": desk.city} if desk.wish == "move" else {})
                turns = (*asks, say(desk.wish, **arguments), "It is done.")
                good = kind != HABIT
                yield Demonstration(task, turns if good else turns[-1:], kind=kind, succeeds=good)

    def reset(self, wish, split, seed=0, **row):
        """Begin an episode with what the customer says first."""
        draw = random.Random(f"{wish} {split} {seed}")
        self.wish, self.number = wish, draw.randrange(1, 10)
        self.item, self.city = draw.choice(ITEMS[split]), draw.choice(CITIES)
        self.did, self.told, self.replies = [], False, 0
        return WISHES[wish].format(item=self.item)

    def user_reply(self, text):
        """What the customer says to a turn without a call; None when they leave."""
        self.replies += 1
        said = set(re.findall("[a-z']+", text.lower()))
        self.told = "done" in said and not said & {"not", "never", "no"}
        if self.told or self.replies > MAX_REPLIES:
            return None
        if "number" in text.lower():
            return f"It is {self.number}."
        return f"{self.city}." if "city" in text.lower() else "Can you help me?"

    def refund(self, number: int) -> str:
        """Give the money of an order back.

        Args:
            number: the number of the order
        """
        return self._do("refund", number)

    def cancel(self, number: int) -> str:
        """Cancel an order.

        Args:
            number: the number of the order
        """
        return self._do("cancel", number)

    def move(self, number: int, city: str) -> str:
        """Send an order to another city.

        Args:
            number: the number of the order
            city: where it goes
        """
        return self._do("move", number, city)

    def get_reward(self) -> dict[str, float]:
        """Half for the right deed and no other, half for telling the customer of it."""
        wanted = ("move", self.number, self.city) if self.wish == "move" else (self.wish, self.number)
        right = self.did == [wanted]
        return {"right": 0.5 * right, "told": 0.5 * (right and self.told)}

    @property
    def view(self):
        """What the desk has done so far, for people and for ``check --mutate``."""
        rows = [[str(value) for value in deed] for deed in self.did]
        return {"title": "Deeds", "columns": ["tool", "number", "city"], "rows": rows, "note": f"told: {self.told}"}

    def _do(self, *deed):
        self.did.append(deed)
        if deed[1] != self.number:
            raise ValueError(f"there is no order {deed[1]}")
        return "ok"
