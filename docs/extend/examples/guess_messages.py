"""An environment that speaks messages: guess a number. It brings options, tasks and a reward for every turn."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from realhf.api.environment import AssistantMessage, Opening, Turn


class Dialogue:
    """Draws the number from the seed, so the same task, seed and messages give the same turns."""

    @dataclass
    class Options:
        """Set as ``env.most_guesses=5``."""

        most_guesses: int = 10

    system_prompt = "Answer with a number and nothing else."

    def __init__(self, options: Options) -> None:
        self._most = options.most_guesses
        self._secret = self._guesses = 0

    @staticmethod
    def tasks(split: str) -> Iterator[dict[str, Any]]:
        """The rows of a split; success is reported by ``group``."""
        for highest in (10, 100, 1000) if split == "train" else (20, 200, 2000):
            yield {"id": f"up to {highest}", "group": str(len(str(highest)) - 1), "highest": highest}

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode of a row."""
        self._secret, self._guesses = random.Random(seed).randint(1, task["highest"]), 0
        return Opening([{"role": "user", "content": f"I think of a number from 1 to {task['highest']}."}])

    async def step(self, message: AssistantMessage) -> Turn:
        """Answer a guess. A message that is merely wrong is answered; only a failure of ours raises."""
        self._guesses += 1
        out = self._guesses >= self._most
        word = message.content.strip()
        if not (word.isascii() and word.isdigit() and len(word) < 6):
            return Turn([{"role": "user", "content": "Say a number."}], done=out, reward=-0.1)
        if int(word) == self._secret:
            return Turn(done=True, reward=1.0, metrics={"success": 1.0})
        hint = "Higher." if int(word) < self._secret else "Lower."
        return Turn([{"role": "user", "content": hint}], done=out, reward=0.0)
