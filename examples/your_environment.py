"""An environment of your own in one file: a lock that opens by the right digit, tried with a tool.

    .venv/bin/python -m realhf.env check examples/your_environment.py:Lock
    .venv/bin/python -m realhf.env play examples/your_environment.py:Lock
    .venv/bin/python -m realhf.launch experiment=grpo env.path=examples/your_environment.py:Lock
    .venv/bin/python -m realhf.launch experiment=grpo_async env.path=examples/your_environment.py:Lock

The untrained policy tries the machinery at once and learns next to nothing; actor.path names a model of yours. TRL's
GRPOTrainer takes the same class as ``environment_factory``. docs/extend/environment.md explains what a class may say.
"""

import random

DIGITS = 10


class Lock:
    """Opens by one digit; a wrong one is answered with the direction. Nothing of this package is imported."""

    def reset(self, seed: int = 0, **row) -> str:
        """Begin an episode; what is returned is the task."""
        self.digit, self.tries, self.open, self.done = random.Random(seed).randrange(DIGITS), 0, False, False
        return "A lock opens by one digit. Try digits with the tool; the fewer tries, the better."

    def turn(self, digit: int) -> str:
        """
        Turn the lock to a digit.

        Args:
            digit: from 0 to 9

        Returns:
            "open", or whether the right digit is higher or lower.
        """
        if not 0 <= digit < DIGITS:
            raise ValueError("the lock has the digits 0 to 9")
        self.tries += 1
        self.open = self.done = digit == self.digit
        return "open" if self.open else "higher" if digit < self.digit else "lower"

    def get_reward(self) -> float:
        """Return what the state is worth now: 1 for an open lock at the first try, less with every other."""
        return 1.0 / self.tries if self.open else 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Return numbers for charts; ``success`` is what evaluation counts."""
        return {"success": float(self.open), "tries": float(self.tries)}
