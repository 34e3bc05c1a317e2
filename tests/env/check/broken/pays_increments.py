"""Broken on purpose: its reward is what was earned since it was asked last."""


class Broken:
    """Counts to three."""

    def reset(self, **row):
        self.count, self.earned, self.done = 0, 0.0, False
        return "Call the tool three times."

    def add(self) -> str:
        """Count one."""
        self.count += 1
        self.earned = 0.25
        self.done = self.count == 3
        return str(self.count)

    def get_reward(self) -> float:
        earned, self.earned = self.earned, 0.0
        return earned
