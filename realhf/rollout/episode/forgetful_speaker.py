"""Speaks for a policy whose chat template leaves old reasoning out of later turns (``rollout.keep_reasoning=false``).

What the policy reads is then no extension of what it read and said before, so that one conversation becomes several
*rows*: sequences of their own, each with the turns that were sampled in it. Their prompts share exact prefixes: a new
row begins with the ids of the row before it up to the first turn whose reasoning went, and the words of that turn are
the ids that were sampled for them, unless one token holds both. Every row is what the engine saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from realhf.api.env import ChatFormat, RolloutOutcome
from realhf.api.environment import AssistantMessage, ChatMessage, Opening
from realhf.api.generation import TokenSource
from realhf.rollout.episode.request import Limits
from realhf.rollout.episode.speaker import PolicySpeaker
from realhf.rollout.episode.token_buffer import TokenBuffer

_SEED_STRIDE = 0x9E3779B97F4A7C15
_SEEDS = 1 << 63


@dataclass(frozen=True)
class _Turn:
    """``before`` are the ids between the turn before and this one, ``ids`` what was sampled, ``words`` the part of it
    after the reasoning (None: there is no reasoning)."""

    before: list[int]
    ids: list[int]
    words: list[int] | None


class ForgetfulSpeaker(PolicySpeaker):
    """``PolicySpeaker`` that begins a new row whenever the template leaves out reasoning that the row holds. Each row
    has a stream of random numbers of its own. ``max_total_tokens`` bounds each row."""

    def __init__(
        self,
        chat: ChatFormat,
        limits: Limits,
        tokens: TokenSource,
        slot: int,
        seed: int | None,
        system_prompt: str = "",
    ) -> None:
        super().__init__(chat, limits, tokens, slot, seed, system_prompt)
        self._rows: list[tuple[TokenBuffer, int]] = []
        self._first_turn = 0
        self._turns: list[_Turn] = []
        self._before: list[int] = []
        self._shape: list[tuple[str, ...]] = []
        self._gone: set[int] = set()

    def open(self, opening: Opening) -> None:
        """See ``Speaker``."""
        super().open(opening)
        assert self.tokens is not None
        self._before = list(self.tokens.prompt_ids)
        self._shape = [_roles([*self._system, *opening.messages])]

    async def speak(self) -> AssistantMessage:
        """See ``Speaker``."""
        assert self.tokens is not None
        start = len(self.tokens.completion_ids)
        said = await super().speak()
        ids = self.tokens.completion_ids[start:]
        self._turns.append(_Turn(self._before, ids, self._chat.without_reasoning(ids)))
        return said

    def hear(self, messages: Sequence[ChatMessage]) -> bool:
        """See ``Speaker``; where reasoning goes, a new row begins, if its first prompt leaves room for a turn."""
        assert self.tokens is not None
        shape = [*self._shape, _roles(messages)]
        forgotten = self._chat.forgotten(shape, self._tools)
        gone = self._gone | {n for n, turn in enumerate(self._turns) if turn.words is not None and forgotten[n]}
        head = self._without(gone) if gone > self._gone else self.tokens.prefix()
        ids = self._fitting(messages, self._limits.max_total_tokens - len(head) - self._limits.turn_tokens)
        if ids is None:
            return False
        if gone > self._gone:
            self._rows.append((self.tokens, self._first_turn))
            self.tokens = TokenBuffer(head + ids, self._limits.max_total_tokens)
            self._first_turn = len(self._turns)
            self._seed = None if self._seed is None else (self._seed + _SEED_STRIDE) % _SEEDS
        else:
            self.tokens.append_environment(ids)
        self._before, self._shape, self._gone = ids, shape, gone
        return True

    def in_rows(self, outcome: RolloutOutcome) -> RolloutOutcome:
        """Return the outcome with a row for each part of the conversation: the last is the main one, the earlier ones
        are its branches. A failed episode stays one row, which trains nothing."""
        rows = [(tokens, first) for tokens, first in [*self._rows, (self.tokens, self._first_turn)] if _spoken(tokens)]
        if not outcome.valid or not rows:
            return outcome
        found = [_row(outcome, tokens, first) for tokens, first in rows if tokens is not None]
        return replace(found[-1], branches=tuple(found[:-1]))

    def _without(self, gone: set[int]) -> list[int]:
        """The conversation so far, without the reasoning of the turns ``gone``."""
        ids: list[int] = []
        for number, turn in enumerate(self._turns):
            words = turn.words if number in gone else None
            # A cue that opened the reasoning goes with it.
            ids += turn.before if words is None else self._chat.without_open_reasoning(turn.before)
            ids += turn.ids if words is None else words
        return ids


def _row(outcome: RolloutOutcome, tokens: TokenBuffer, first_turn: int) -> RolloutOutcome:
    tokens.check()
    return replace(
        outcome,
        prompt_ids=tokens.prompt_ids,
        completion_ids=tokens.completion_ids,
        logprobs=tokens.logprobs,
        versions=tokens.versions,
        loss_mask=tokens.loss_mask,
        turn_starts=tokens.turn_starts,
        first_turn=first_turn,
    )


def _spoken(tokens: TokenBuffer | None) -> bool:
    return tokens is not None and bool(tokens.completion_ids)


def _roles(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    return tuple(str(message.get("role")) for message in messages)
