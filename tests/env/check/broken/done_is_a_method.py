"""Broken on purpose: a method says whether the episode is over, which would be a tool."""


class Broken:
    """Counts to three."""

    def reset(self, **row):
        self.count, self.earned = 0, 0.0
        return "Call the tool three times."

    def add(self) -> str:
        """Count one."""
        self.count += 1
        self.earned = 0.25
        return str(self.count)

    def get_reward(self) -> float:
        return self.count / 3

    def done(self) -> bool:
        """Whether the episode is over."""
        return self.count == 3
