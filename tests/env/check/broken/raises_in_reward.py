"""Broken on purpose: its reward cannot be worked out when nothing was called."""


class Broken:
    """Pays for the mean of what was added."""

    def reset(self):
        self.added = []
        return "Add numbers with a mean of 3."

    def add(self, amount: int) -> str:
        """Add a number.

        Args:
            amount: The number.
        """
        self.added.append(amount)
        return "noted"

    def get_reward(self) -> float:
        return float(sum(self.added) / len(self.added) == 3)
