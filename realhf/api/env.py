"""Defines the contracts between environments, agents and rollout players."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

VALID_STATUSES = frozenset({"achieved", "finished", "max_turns", "token_budget"})
FAILURE_STATUSES = frozenset({"env_error", "env_timeout", "connection_lost", "capacity", "policy_error"})


@dataclass(frozen=True)
class StepResult:
    """An environment's reply to reset or step. ``observation`` is the map of the OpenEnv wire."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class EnvClient(Protocol):
    """Drives one session of an environment. Its methods raise ConnectionError, TimeoutError or RuntimeError."""

    async def reset(self, **kwargs: Any) -> StepResult:
        """Begin an episode; ``kwargs`` are the reset's arguments on the wire, e.g. the task. Returns the first
        observation."""
        ...

    async def step(self, command: str) -> StepResult:
        """Run one command of the agent and return what the environment answered."""
        ...

    async def close(self) -> None:
        """End the session and give its slot back."""
        ...


class ChatFormat(Protocol):
    """Turns text into the exact ids of a conversation; never re-tokenises what was sampled."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Ids that end a policy turn."""
        ...

    def first(self, task: str) -> list[int]:
        """Return the ids of the conversation up to the point where the policy speaks."""
        ...

    def following(self, observation: str, *, ended: bool) -> list[int]:
        """Return the ids that follow a policy turn: its end (unless ``ended`` by a sampled stop id), the observation
        and the cue for the next policy turn."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a policy turn without stop tokens."""
        ...


@dataclass(frozen=True)
class Turn:
    """One policy turn as a person reads it."""

    text: str
    command: str | None
    output: str
    reward: float


@dataclass(frozen=True)
class RolloutOutcome:
    """One finished episode.

    Ids, logprobs, versions and loss_mask cover the completion only and have equal lengths; logprobs are 0.0 and
    versions -1 where loss_mask is False (environment or template tokens). A failed episode has ``valid == False`` and
    ``reward is None``: a failure is never a reward of 0. ``last_turn_cut``: a limit of tokens ended the last policy
    turn.
    """

    status: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    loss_mask: list[bool]
    reward: float | None
    achieved: bool
    progress: float
    turns: tuple[Turn, ...]
    task_id: int
    tier: str
    seed: int
    task_text: str = ""
    message: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    last_turn_cut: bool = False

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens ended the episode. The limit of turns does not count: an agent that used its turns
        without success has failed, and learns from it."""
        return self.status == "token_budget" or (self.status == "max_turns" and self.last_turn_cut)

    @property
    def valid(self) -> bool:
        """Whether the episode counts: its ``status`` is one of ``VALID_STATUSES``."""
        return self.status in VALID_STATUSES
