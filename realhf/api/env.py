"""Defines the contracts between environments, agents and rollout players."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from realhf.api.environment import FAILURE_KINDS, AssistantMessage, ChatMessage

VALID_STATUSES = frozenset({"achieved", "finished", "max_turns", "token_budget"})
POLICY_FAILED = "policy"
"""The status of an episode whose tokens could not be had."""
MAX_BRANCHES = 64
"""Conversations that an agent may hold in one episode, each a row that trains."""
AGENT_FAILED = "agent"
"""The status of an episode whose agent, a program of the user's, raised, took too long or gave no reward."""
FAILURE_STATUSES = frozenset({*FAILURE_KINDS, POLICY_FAILED, AGENT_FAILED})


@dataclass(frozen=True)
class StepResult:
    """An environment's reply to reset or step. ``observation`` is the map of the OpenEnv wire."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class ChatFormat(Protocol):
    """Turns text into the exact ids of a conversation; never re-tokenises what was sampled."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Ids that end a policy turn."""
        ...

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the ids of the conversation, tools included, up to the point where the policy speaks."""
        ...

    def following_messages(
        self, messages: Sequence[ChatMessage], *, ended: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the ids that follow a policy turn: its end (unless ``ended`` by a sampled stop id), the messages and
        the cue for the next policy turn."""
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()) -> AssistantMessage:
        """Return what the policy said in a turn; ``tools`` are those of the opening."""
        ...

    def forgotten(self, shape: Sequence[Sequence[str]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[bool, ...]:
        """Return, for each turn of the policy, whether the chat leaves its reasoning out of the next prompt. ``shape``
        are the roles of the messages of the opening and of the answer to each turn."""
        ...

    def without_reasoning(self, token_ids: Sequence[int]) -> list[int] | None:
        """Return the ids of a turn without its leading reasoning; None where it has none that is closed."""
        ...

    def without_open_reasoning(self, token_ids: Sequence[int]) -> list[int]:
        """Return the ids before a turn, without a tag at their end that opens its reasoning."""
        ...


@dataclass(frozen=True)
class PlayedTurn:
    """One turn as a person reads it: what the policy said, what the environment answered, the reward of the turn.

    ``said`` is the policy's turn as it was parsed, ``messages`` are those that followed it; ``rewards``, ``metrics``
    and ``info`` are the environment's (see ``Turn``)."""

    text: str
    output: str
    reward: float
    said: AssistantMessage | None = field(default=None, compare=False)
    messages: Sequence[ChatMessage] = field(default=(), compare=False)
    rewards: Mapping[str, float] = field(default_factory=dict, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    info: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class RolloutOutcome:
    """One finished episode.

    Ids, logprobs, versions and loss_mask cover the completion only and have equal lengths; logprobs are 0.0 and
    versions -1 where loss_mask is False (environment or template tokens). A failed episode has ``valid == False`` and
    ``reward is None``: a failure is never a reward of 0. ``last_turn_cut``: a limit of tokens ended the last policy
    turn. ``rewards`` are the named components of the reward, ``metrics`` the environment's numbers. ``branches`` are
    further trajectories of the episode, where an agent held several conversations; each trains as a row of its own.
    ``turn_starts`` are the places of the completion where policy turns begin, the first of them the turn number
    ``first_turn`` of ``turn_rewards``, which sum to ``reward``. ``opening`` are the messages before the first turn,
    ``tools`` the schemas that came with them, ``info`` what the environment said for people at its reset. ``steps`` is
    what an agent did in the environment, where its turns are conversations of its own.
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
    turns: tuple[PlayedTurn, ...]
    task_id: str
    group: str
    seed: int
    template: str = ""
    task_text: str = ""
    message: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    last_turn_cut: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    branches: tuple[RolloutOutcome, ...] = ()
    turn_starts: Sequence[int] = ()
    turn_rewards: Sequence[float] = ()
    first_turn: int = 0
    opening: Sequence[ChatMessage] = field(default=(), compare=False)
    tools: Sequence[Mapping[str, Any]] = field(default=(), compare=False)
    info: Mapping[str, Any] = field(default_factory=dict, compare=False)
    steps: tuple[PlayedTurn, ...] = field(default=(), compare=False)

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens ended the episode. The limit of turns does not count: an agent that used its turns
        without success has failed, and learns from it."""
        return self.status == "token_budget" or (self.status == "max_turns" and self.last_turn_cut)

    @property
    def valid(self) -> bool:
        """Whether the episode counts: its ``status`` is one of ``VALID_STATUSES``."""
        return self.status in VALID_STATUSES
