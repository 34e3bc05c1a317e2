"""Types of rollouts: an episode as token ids for training, and the chat format that encodes
conversations as token ids.

Authors of environments do not need this module, only ``realhf.api.environment``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from realhf.api.environment import (
    FAILURE_KINDS,
    AssistantMessage,
    ChatMessage,
    Task,
    TaskLimits,
)

VALID_STATUSES = frozenset({"achieved", "finished", "max_turns", "token_budget"})
"""Statuses of episodes that count for training and evaluation. ``achieved``: the task was solved;
``finished``: the episode ended without success; ``max_turns`` and ``token_budget``: the limit of
turns or of tokens ended it."""
POLICY_FAILED = "policy"
"""Status of an episode for which no tokens could be generated."""
AGENT_FAILED = "agent"
"""Status of an episode whose agent, a program of the user, raised, timed out or returned no
reward."""
FAILURE_STATUSES = frozenset({*FAILURE_KINDS, POLICY_FAILED, AGENT_FAILED})
"""Statuses of failed episodes, which have no reward."""
MAX_BRANCHES = 64
"""Maximum number of conversations that an agent may hold in one episode. Each becomes a sequence of
its own in training."""


def parse_task(metadata: Mapping[str, Any]) -> Task:
    """Parse the task from the metadata of a sample.

    Required keys are ``task`` (the payload as JSON text), ``task_id`` and ``task_seed``; ``group``,
    ``template_name``, ``max_turns``, ``environment`` and ``limits`` (``TaskLimits`` as JSON text)
    are optional. Raises ValueError that names what is missing
    or invalid.
    """
    if missing := [name for name in ("task_id", "task", "task_seed") if metadata.get(name) is None]:
        raise ValueError(
            f"a sample needs the metadata {', '.join(missing)}, which describe its task"
        )
    try:
        payload = json.loads(metadata["task"])
    except (TypeError, ValueError):
        payload = None
    if not isinstance(payload, dict):
        raise ValueError(
            f"task of {metadata['task_id']} is no JSON object, but {metadata['task']!r:.100}"
        )
    return Task(
        str(metadata["task_id"]),
        str(metadata.get("group", "")),
        payload,
        seed=int(metadata["task_seed"]),
        template=str(metadata.get("template_name", "")),
        max_turns=int(metadata.get("max_turns", 0)),
        environment=str(metadata.get("environment", "")),
        limits=TaskLimits(**json.loads(metadata.get("limits", "{}"))),
    )


class ChatFormat(Protocol):
    """Encoder of conversations as token ids. Sampled ids are never re-tokenized."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Token ids that end a policy turn."""
        ...

    def opening(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of the first prompt: tools and messages, up to the start of the policy's
        turn."""
        ...

    def following_messages(
        self,
        messages: Sequence[ChatMessage],
        *,
        ended: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        end: int | None = None,
    ) -> list[int]:
        """Return the ids between two policy turns: the end of the earlier turn, the messages, and
        the start of the later turn. If ``ended``, the policy has sampled a stop id itself, which is
        not repeated; ``end`` is that id, or None if it is not known."""
        ...

    def parse(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> AssistantMessage:
        """Parse the token ids of a policy turn into a message. ``tools`` are the tools passed to
        ``opening``."""
        ...

    def find_forgotten_turns(
        self, shape: Sequence[Sequence[str]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[bool, ...]:
        """Return, for each policy turn, whether the chat template omits its reasoning from the next
        prompt.

        ``shape`` lists the roles of the opening's messages, then the roles of the answer to each
        turn.
        """
        ...

    def without_reasoning(self, token_ids: Sequence[int]) -> list[int] | None:
        """Return the ids of a turn without its leading reasoning block, or None if no reasoning
        block is closed in it."""
        ...

    def without_open_reasoning(self, token_ids: Sequence[int]) -> list[int]:
        """Return the ids of a prompt, without the tag at its end (``<think>``) that opens the
        reasoning of the next turn, if there is one."""
        ...


@dataclass(frozen=True)
class PlayedTurn:
    """One turn of an episode in readable form."""

    text: str
    """Text of the policy's turn."""
    output: str
    """Text of the environment's answer."""
    reward: float
    """Reward of the turn."""
    policy_turn: AssistantMessage | None = field(default=None, compare=False)
    """The policy's turn as a parsed message."""
    messages: Sequence[ChatMessage] = field(default=(), compare=False)
    """Messages of the environment's answer."""
    rewards: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Components of the reward, see ``Turn.rewards``."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Metrics of the environment, see ``Turn.metrics``."""
    info: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Details for people, see ``Turn.info``."""


@dataclass(frozen=True)
class RolloutOutcome:
    """A finished or failed episode, with the token ids of its conversation.

    A failed episode has ``valid == False`` and ``reward is None``: a failure never counts as a
    reward of 0.
    """

    status: str
    """One of ``VALID_STATUSES`` or ``FAILURE_STATUSES``."""
    prompt_ids: list[int]
    """Token ids of the first prompt."""
    completion_ids: list[int]
    """Token ids after the first prompt: policy turns, and the environment's answers between
    them."""
    logprobs: list[float]
    """Log-probability of each completion token at sampling, under the token mask if it had one;
    0.0 for tokens that were not sampled."""
    versions: list[int]
    """Weight version that sampled each completion token; -1 for tokens that were not sampled."""
    loss_mask: list[bool]
    """Whether the policy sampled each completion token. ``completion_ids``, ``logprobs``,
    ``versions`` and ``loss_mask`` have the same length."""
    reward: float | None
    """Total reward of the episode; None for a failed one."""
    achieved: bool
    """Whether the task was solved."""
    progress: float
    """Progress towards the solution, from 0 to 1."""
    turns: tuple[PlayedTurn, ...]
    """The turns in readable form."""
    task_id: str
    """``Task.id``."""
    group: str
    """``Task.group``."""
    seed: int
    """``Task.seed``."""
    template: str = ""
    """``Task.template``."""
    environment: str = ""
    """``Task.environment``."""
    task_text: str = ""
    """The task as the policy read it, to show to people."""
    message: str = ""
    """Cause of a failure."""
    timings: dict[str, float] = field(default_factory=dict)
    """Durations in seconds by name."""
    last_turn_cut: bool = False
    """Whether a limit of tokens ended the last policy turn."""
    out_of_turns: bool = False
    """Whether ``rollout.max_turns`` ended the episode although its task allowed another turn."""
    broken_rules: float | None = None
    """Fraction of the policy's turns whose answer broke a rule of the agent's request, of the turns
    whose request had one; None if none had."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward by name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the environment by name."""
    branches: tuple[RolloutOutcome, ...] = ()
    """Further conversations of an episode whose agent held several. Each becomes a sequence of its
    own in training."""
    unmasked_logprobs: Sequence[float] = ()
    """``logprobs`` without token masks, under the policy itself; () if no token had a mask, so that
    both are equal."""
    turn_starts: Sequence[int] = ()
    """Index in the completion of the first token of each policy turn."""
    turn_rewards: Sequence[float] = ()
    """Reward of each turn of the whole episode, including its other conversations. The sum is
    ``reward``."""
    turn_states: Sequence[int] = ()
    """Number of the state in which each turn of ``turn_rewards`` began, see ``state_number``."""
    first_turn: int = 0
    """Index in ``turn_rewards`` of the first turn of ``turn_starts``."""
    opening: Sequence[ChatMessage] = field(default=(), compare=False)
    """Messages before the first turn."""
    tools: Sequence[Mapping[str, Any]] = field(default=(), compare=False)
    """JSON schemas of the tools."""
    feedback_prompt: Sequence[int] = field(default=(), compare=False)
    """Token ids of the prompt with feedback on this episode, for self-distillation; empty without
    feedback."""
    info: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Details for people from the environment's reset, see ``Opening.info``."""
    steps: tuple[PlayedTurn, ...] = field(default=(), compare=False)
    """Actions of an agent in the environment, if ``turns`` are the turns of the agent's own
    conversations with the policy."""

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens ended the episode.

        The limit of turns does not count: a policy that has used all turns without success has
        failed, and should learn from that.
        """
        return self.status == "token_budget" or (self.status == "max_turns" and self.last_turn_cut)

    @property
    def valid(self) -> bool:
        """Whether the episode counts for training and evaluation."""
        return self.status in VALID_STATUSES
