"""A shelf whose reward looks at one box alone, and one that pays for the whole shelf."""

from __future__ import annotations

import json

from realhf.api.environment import Demonstration, Task


class Bought:
    """Two boxes stand on a shelf, and one is to be moved. What becomes of the other is not looked
    at."""

    @staticmethod
    def tasks(split):
        return [{"id": f"{box}-{split}", "box": box, "place": "left"} for box in ("tea", "salt")]

    @staticmethod
    def demonstrate(request):
        for row in Bought.tasks("train"):
            row.pop("id")
            call = json.dumps({"name": "move", "arguments": row})
            yield Demonstration(
                Task(f"{row['box']}-train", payload=row), (f"<tool_call>{call}</tool_call>",)
            )

    def reset(self, box, place, **row):
        self.places = {"tea": "right", "salt": "right"}
        self.goal = {box: place}
        return f"Move {box} to the {place}, and leave the other box at the right."

    def move(self, box: str, place: str) -> str:
        """Move a box.

        Args:
            box: its name
            place: left or right
        """
        if box not in self.places:
            raise ValueError(f"there is no {box}")
        self.places[box] = place
        return "moved"

    def get_reward(self) -> float:
        return float(self.goal.items() <= self.places.items())

    @property
    def view(self):
        return {"title": "The shelf", "columns": ["box", "place"], "rows": [*self.places.items()]}


class Paid(Bought):
    """Pays for the state of the whole shelf."""

    def get_reward(self) -> float:
        return float({"tea": "right", "salt": "right"} | self.goal == self.places)


class Undescribed(Bought):
    """Says nothing of its state."""

    view = None


class Unscripted(Bought):
    """Has no solver."""

    demonstrate = None


class Refusing(Bought):
    """Its solver does not solve."""

    def get_reward(self) -> float:
        return 0.0


class Dying(Paid):
    """Fails at a call that is nearly the right one."""

    def move(self, box: str, place: str) -> str:
        """Move a box.

        Args:
            box: its name
            place: left or right
        """
        self.broken = place not in ("left", "right")
        return super().move(box, place)

    def get_reward(self) -> float:
        return super().get_reward() / (not getattr(self, "broken", False))
