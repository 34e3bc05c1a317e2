"""Gives an evaluation its ceiling and its floor: an expert that knows the solution, and an agent that guesses."""

from __future__ import annotations

import random
from collections.abc import Sequence

from realhf.aws.evaluation.agent import Conversation, TextAgent
from realhf.aws.tasks.captures import resolve
from realhf.aws.tasks.loader import instantiate, load_templates
from realhf.aws.tasks.names import is_name

_SEED_BITS = 31


class ScriptedExpert(TextAgent):
    """Plays the canonical solution, command by command."""

    name = "scripted expert"

    def act(self, conversations: Sequence[Conversation]) -> list[str]:
        """Return the next canonical command of each conversation."""
        return [self._next(conversation) for conversation in conversations]

    def _next(self, conversation: Conversation) -> str:
        played = len(conversation.outputs)
        if played >= len(conversation.reference):
            return ""
        return resolve(conversation.reference[played], conversation.outputs)


class RandomAgent(TextAgent):
    """Plays commands that solve some task, drawn without reading the present one except for its names: it shows what a
    policy would reach that knows the CLI and not what it is asked."""

    name = "random agent"

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(f"random agent:{seed}")
        self._templates = [template.task_id for template in load_templates(split="train")]

    def act(self, conversations: Sequence[Conversation]) -> list[str]:
        """Return a drawn command for each conversation."""
        return [self._guess(conversation.task_text) for conversation in conversations]

    def _guess(self, task_text: str) -> str:
        task = instantiate(self._rng.choice(self._templates), self._rng.getrandbits(_SEED_BITS))
        command = self._rng.choice(task.solution)
        names = [word for word in task_text.replace(",", " ").replace(".", " ").split() if is_name(word)]
        if names:
            for value in task.params.values():
                if is_name(value):
                    command = command.replace(value, self._rng.choice(names))
        return command
