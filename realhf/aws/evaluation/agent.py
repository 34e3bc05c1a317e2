"""Defines agents that read and write text: an evaluation plays them beside, or instead of, a policy of tokens.

A *conversation* is one episode as its agent sees it. ``TextAgent`` makes an agent out of a function from conversations
to turns: it is asked for all of a round at once, so that a model can batch and an endpoint can be asked concurrently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from realhf.api.env import RolloutOutcome
from realhf.api.environment import AssistantMessage, ChatMessage, Environment, Opening
from realhf.api.generation import TokenSource
from realhf.api.model import GenOutput, GenRequest
from realhf.aws.tasks.captures import fill_setup
from realhf.rollout.episode import ContextFull, EpisodeRequest, Witness, play_episode
from realhf.rollout.player import EpisodeAgent


@dataclass
class Conversation:
    """One episode: what was said, in the form of the chat API, the task first. ``reference`` is the canonical solution
    and ``outputs`` what its commands printed so far, for the scripted expert alone."""

    messages: list[dict[str, Any]]
    reference: Sequence[str] = ()
    outputs: list[str] = field(default_factory=list)

    @property
    def task_text(self) -> str:
        """What the agent was asked to do."""
        return str(self.messages[0]["content"])


class AgentError(RuntimeError):
    """The agent cannot answer at all (the endpoint is gone, the model does not load); this ends the evaluation."""


class Agent(Protocol):
    """Plays episodes, and is the engine (``BatchEngine``) that their turns come from. ``name`` labels tables and
    plots."""

    name: str

    def speaker(self, max_turns: int) -> EpisodeAgent:
        """Return who plays episodes of at most this many turns."""
        ...

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """Return the next turn of each episode, in order. Raises AgentError."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Forget the episodes on these slots: they are over."""
        ...


class TextAgent(ABC):
    """Is an ``Agent`` without tokens."""

    name: str

    @abstractmethod
    def act(self, conversations: Sequence[Conversation]) -> list[str]:
        """Return the next turn of each conversation, in order; "" gives up. Raises AgentError."""

    def speaker(self, max_turns: int) -> EpisodeAgent:
        """See ``Agent``."""
        return _TextTurns(max_turns)

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """See ``Agent``."""
        del round_index
        texts = self.act([request.conversation for request in requests if isinstance(request, _Ask)])
        return [_Said([], [], [], "stop", text=text) for text in texts]

    def free(self, slots: Sequence[int]) -> None:
        """See ``Agent``: there is nothing to forget."""
        del slots


@dataclass(frozen=True, kw_only=True)
class _Ask(GenRequest):
    conversation: Conversation


@dataclass(frozen=True, kw_only=True)
class _Said(GenOutput):
    text: str


class _TextTurns:
    """Plays in turns of text; see ``EpisodeAgent``."""

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns

    async def play(self, env: Environment, wanted: EpisodeRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """See ``EpisodeAgent``."""
        seen = Witness(env)
        speaker = _TextSpeaker(seen, wanted.task.payload["task"]["solution"], llm, slot)
        return await play_episode(seen, wanted, speaker, self._max_turns)


class _TextSpeaker:
    """Is a ``Speaker`` without tokens. One that gives up ends the episode as one whose context is full."""

    tokens = None
    cut = False

    def __init__(self, seen: Witness, solution: Sequence[str], llm: TokenSource, slot: int) -> None:
        self._seen, self._solution, self._llm, self._slot = seen, solution, llm, slot
        self._conversation = Conversation([])

    def open(self, opening: Opening) -> None:
        """See ``Speaker``."""
        reference = fill_setup(list(self._solution), opening.info["setup_answers"])
        self._conversation = Conversation([dict(message) for message in opening.messages], reference)

    async def speak(self) -> AssistantMessage:
        """See ``Speaker``."""
        said = await self._llm.generate(_Ask(self._slot, (), conversation=self._conversation))
        if not isinstance(said, _Said):
            raise TypeError("an agent without tokens was played with an engine of tokens")
        if not said.text:
            raise ContextFull
        self._conversation.messages.append({"role": "assistant", "content": said.text})
        return AssistantMessage(said.text, text=said.text)

    def hear(self, messages: Sequence[ChatMessage]) -> bool:
        """See ``Speaker``."""
        observation: Mapping[str, Any] = self._seen.turns[-1].info.get("observation", {})
        self._conversation.outputs.append(observation.get("command_output", ""))
        self._conversation.messages += [dict(message) for message in messages]
        return True
