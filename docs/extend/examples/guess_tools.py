"""An environment that is a class with tools: guess a number. TRL takes it too, as ``environment_factory``."""

import random

HIGHEST, MAX_GUESSES = 100, 10


class Guess:
    """``done`` ends the episode, and so does a turn without a tool call."""

    def reset(self, seed: int = 0, **row) -> str:
        """Begin an episode; what is returned follows the row's prompt."""
        self.secret, self.guesses, self.done = random.Random(seed).randint(1, HIGHEST), 0, False
        return f"Guess a number from 1 to {HIGHEST} with the tool; you have {MAX_GUESSES} guesses."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: your guess

        Returns:
            Whether the number is higher or lower than the guess, or the guess is right.
        """
        if self.done:
            raise ValueError("the game is over")
        self.guesses += 1
        self.done = number == self.secret or self.guesses == MAX_GUESSES
        self.right = number == self.secret
        return "right" if self.right else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        """Return what the state is worth now; this is asked after every turn."""
        return float(self.guesses > 0 and self.right)
