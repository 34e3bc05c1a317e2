"""Defines agents that read and write text: an evaluation plays them beside, or instead of, a policy of tokens.

A *conversation* is one episode as its agent sees it; an *agent* answers many of them at once, so that a local model can
batch and an endpoint can be asked concurrently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Reply:
    """One turn of an agent. ``command`` is None when the text holds no command or the agent gives up."""

    text: str
    command: str | None


@dataclass
class Conversation:
    """One episode. ``slot`` names it while it lasts; ``turns`` are the replies, each with the observation map that
    followed. ``reference`` is the canonical solution, for the scripted expert alone."""

    slot: int
    task_text: str
    reference: Sequence[str] = ()
    turns: list[tuple[Reply, Mapping[str, Any]]] = field(default_factory=list)


class AgentError(RuntimeError):
    """The agent cannot answer at all (the endpoint is gone, the model does not load); this ends the evaluation."""


class Agent(Protocol):
    """Answers conversations with commands. ``name`` labels tables and plots."""

    name: str

    def act(self, conversations: Sequence[Conversation]) -> list[Reply]:
        """Return the next turn of each conversation, in order. Raises AgentError."""
        ...

    def finish(self, slots: Sequence[int]) -> None:
        """Forget these conversations: they are over."""
        ...
