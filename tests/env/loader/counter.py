"""A class with tools, which the tests play and break."""

COUNTER = """
class Counter:
    done = False

    def reset(self, goal: int = 3, **row):
        self.goal, self.count, self.done = goal, 0, False
        return f"Reach {goal}."

    def add(self, amount: int, twice: bool = False) -> int:
        \"\"\"
        Add to the count.

        Args:
            amount: how much is added
            twice: whether it is added twice
        \"\"\"
        if amount < 0:
            raise ValueError("amounts are positive")
        self.count += amount * (1 + twice)
        return self.count

    def stop(self) -> None:
        \"\"\"End the game.\"\"\"
        self.done = True

    def get_reward(self) -> float:
        return 1.0 if self.count == self.goal else 0.0
"""
