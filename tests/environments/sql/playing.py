"""Plays episodes without a player: text in, turns out."""

from __future__ import annotations

from collections.abc import Sequence

from realhf.api.environment import AssistantMessage, Task, Turn
from realhf.environments.sql import DEFINITION, SqlOptions


async def play(task: Task, turns: Sequence[str], **options: object) -> list[Turn]:
    """Return the environment's turns, up to the one that ends the episode."""
    environment = DEFINITION.build(SqlOptions(**options)).make("")
    await environment.reset(task.payload, seed=task.seed)
    answers: list[Turn] = []
    for text in turns:
        answers.append(await environment.step(AssistantMessage(text)))
        if answers[-1].done:
            break
    await environment.close()
    return answers


def score(turns: Sequence[Turn]) -> float:
    """Return what the rewards sum to."""
    return sum(turn.reward or 0.0 for turn in turns)


def said(turn: Turn) -> str:
    """Return what the policy reads."""
    (message,) = turn.messages
    assert message["role"] == "user"
    return message["content"]
