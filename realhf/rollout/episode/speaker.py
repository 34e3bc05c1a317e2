"""Speaks for the policy in an episode: from sampled tokens to messages, and back to the tokens that follow.

A speaker opens with the environment's messages, is asked for a turn, and hears what the environment answered. The token
ids that it keeps are exactly those that the engine saw and sampled (docs/reference/environment.md 9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from realhf.api.env import ChatFormat
from realhf.api.environment import AssistantMessage, ChatMessage, Opening
from realhf.api.generation import GenerationFailed, TokenSource
from realhf.api.model import GenOutput, GenRequest
from realhf.base.text import shorten
from realhf.rollout.episode.request import Limits
from realhf.rollout.episode.token_buffer import TokenBuffer

_SHRINK_ATTEMPTS = 6


class ContextFull(Exception):
    """The engine's context has no room for another turn, although the budget of tokens has."""


class Speaker(Protocol):
    """Says the policy's part of one episode."""

    @property
    def tokens(self) -> TokenBuffer | None:
        """The tokens of the episode; None before its opening, and for a speaker without any."""
        ...

    @property
    def cut(self) -> bool:
        """Whether a limit of tokens ended the last turn."""
        ...

    def open(self, opening: Opening) -> None:
        """Take the opening of the episode. Raises ValueError when it leaves no room for a turn."""
        ...

    async def speak(self) -> AssistantMessage:
        """Return the next turn. Raises GenerationFailed, or ContextFull after the first turn."""
        ...

    def hear(self, messages: Sequence[ChatMessage]) -> bool:
        """Take the environment's answer to the last turn; returns whether there is room for another turn."""
        ...


class PolicySpeaker:
    """Speaks with tokens of a policy. ``slot`` is the cache row that the episode has to itself, ``seed`` starts the
    random numbers of its tokens."""

    def __init__(
        self,
        chat: ChatFormat,
        limits: Limits,
        tokens: TokenSource,
        slot: int,
        seed: int | None,
        system_prompt: str = "",
    ) -> None:
        self.tokens: TokenBuffer | None = None
        self._chat, self._limits, self._source = chat, limits, tokens
        self._slot, self._seed = slot, seed
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._ended = True
        self._spoke = False

    @property
    def cut(self) -> bool:
        """See ``Speaker``."""
        return self._spoke and not self._ended

    def open(self, opening: Opening) -> None:
        """See ``Speaker``."""
        self._tools = opening.tools
        prompt = self._chat.opening([*self._system, *opening.messages], opening.tools)
        self.tokens = TokenBuffer(prompt, self._limits.max_total_tokens)
        if self.tokens.room < self._limits.turn_tokens:
            raise ValueError(
                f"the first prompt of {len(prompt)} tokens and a turn of {self._limits.turn_tokens} do not fit into "
                f"max_total_tokens={self._limits.max_total_tokens}"
            )

    async def speak(self) -> AssistantMessage:
        """See ``Speaker``."""
        assert self.tokens is not None
        sampled: list[int] = []
        while True:
            request = GenRequest(self._slot, self.tokens.prefix(), len(sampled), self._seed)
            output = await self._source.generate(request)
            if not output.token_ids and not (output.finish_reason == "length" and sampled):
                self._no_turn(output)
            self.tokens.append_policy(output, continues=bool(sampled))
            sampled += output.token_ids
            if output.finish_reason != "interrupted":
                break
        self._spoke, self._ended = True, output.finish_reason == "stop"
        return self._chat.parse(sampled, self._tools)

    def _no_turn(self, output: GenOutput) -> None:
        """Raise what it means that the engine sampled nothing."""
        assert self.tokens is not None
        if output.finish_reason != "length":
            raise GenerationFailed("the engine returned no tokens")
        if not self._spoke:
            raise GenerationFailed(
                f"the first prompt of {len(self.tokens.prompt_ids)} tokens fills the engine's context: it is shorter "
                "than rollout.max_total_tokens"
            )
        self.tokens.drop_environment()
        raise ContextFull

    def hear(self, messages: Sequence[ChatMessage]) -> bool:
        """Add the messages, the longest of them cut until a policy turn fits after them."""
        assert self.tokens is not None
        ids = self._fitting(messages, self.tokens.room - self._limits.turn_tokens)
        if ids is not None:
            self.tokens.append_environment(ids)
        return ids is not None

    def _fitting(self, messages: Sequence[ChatMessage], room: int) -> list[int] | None:
        """Return the ids of the messages, the longest of them cut until they are at most ``room``; None where nothing
        is left to cut."""
        shown = [dict(message) for message in messages]
        for _ in range(_SHRINK_ATTEMPTS):
            ids = self._chat.following_messages(shown, ended=self._ended, tools=self._tools)
            if len(ids) <= room:
                return ids
            longest = max(shown, key=lambda message: len(message.get("content") or ""), default={})
            text = longest.get("content") or ""
            if room <= 0 or not text:
                return None
            longest["content"] = shorten(text, min(len(text) // 2, len(text) * room // len(ids)))
        return None
