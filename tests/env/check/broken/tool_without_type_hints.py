"""Broken on purpose: nobody can tell what its tool takes."""


class Broken:
    """A counter with a tool."""

    def reset(self):
        self.count = 0
        return "Bring the counter to 3."

    def add(self, amount):
        """Add to the counter.

        Args:
            amount: How much.
        """
        self.count += amount
        return str(self.count)

    def get_reward(self) -> float:
        return float(self.count == 3)
