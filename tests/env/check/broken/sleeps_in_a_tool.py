"""Broken on purpose: a tool of a class that does not await never comes back."""

import threading


class Broken:
    """Asks somebody who never answers."""

    def reset(self):
        return "Ask."

    def ask(self) -> str:
        """Ask somebody."""
        threading.Event().wait()
        return "an answer"

    def get_reward(self) -> float:
        return 0.0
