"""Contracts between environments, agents and rollout pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

VALID_STATUSES = frozenset({"achieved", "finished", "max_turns", "token_budget"})
FAILURE_STATUSES = frozenset({"env_error", "env_timeout", "connection_lost", "capacity", "policy_error"})


@dataclass(frozen=True)
class StepResult:
    """Reply of an environment to reset or step: the observation map of the OpenEnv wire."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class EnvClient(Protocol):
    """One session of an environment. Raises ConnectionError, TimeoutError or RuntimeError."""

    async def reset(self, **kwargs: Any) -> StepResult: ...

    async def step(self, command: str) -> StepResult: ...

    async def close(self) -> None: ...


class ChatFormat(Protocol):
    """Turns text into the exact ids of a conversation; never re-tokenises what was sampled."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Ids that end a policy turn."""
        ...

    def first(self, task: str) -> list[int]:
        """Ids of the conversation up to the point where the policy speaks."""
        ...

    def following(self, observation: str, *, ended: bool) -> list[int]:
        """Ids that follow a policy turn: its end (unless ``ended`` by a sampled stop id), the observation
        and the cue for the next policy turn."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a policy turn without stop tokens."""
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
    """One episode. Ids, logprobs, versions and loss_mask cover the completion only and have equal lengths;
    logprobs are 0.0 and versions -1 where loss_mask is False (environment or template tokens).
    A failed episode has ``valid == False`` and ``reward is None``: a failure is never a reward of 0.
    ``last_turn_cut``: the last policy turn was ended by a limit of tokens."""

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
        return self.status in VALID_STATUSES
