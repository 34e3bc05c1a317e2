"""Plays countdown: one question, one answer, judged by the verifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realhf.api.environment import AssistantMessage, Opening, Turn
from realhf.environments.countdown.levels import prompt
from realhf.environments.countdown.verifier import judge, reward

SYSTEM_PROMPT = (
    "Reach the target with + - * / and the given numbers, each at most once. "
    "The last line of your reply is the steps, such as: 3*4=12, 12+5=17"
)


class CountdownEnvironment:
    """Implements ``realhf.api.environment.Environment`` with a single turn. ``partial_credit`` is the reward of right
    arithmetic that misses the target."""

    def __init__(self, partial_credit: float) -> None:
        self._partial_credit = partial_credit
        self._numbers: list[int] = []
        self._target = 0

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Ask for the puzzle of ``task``: ``numbers`` and ``target``. The seed changes nothing. Raises KeyError or
        ValueError for a task without them."""
        self._numbers = [int(number) for number in task["numbers"]]
        self._target = int(task["target"])
        return Opening([{"role": "user", "content": prompt(self._numbers, self._target)}])

    async def step(self, message: AssistantMessage) -> Turn:
        """Judge the answer, which ends the episode."""
        verdict = judge(message.content, self._numbers, self._target)
        return Turn(
            done=True,
            reward=reward(
                message.content, numbers=self._numbers, target=self._target, partial_credit=self._partial_credit
            ),
            metrics={"success": float(verdict.solved), "valid": float(verdict.valid)},
            info={"problem": verdict.problem},
        )

    async def close(self) -> None:
        """Do nothing: nothing is held."""
