"""Keeps the token ids of a black-box agent's conversations, exactly as the engine saw and sampled them.

An agent sends whole conversations as messages. One that extends a conversation of this session (with the same tools,
and the policy's turns equal to what was returned) goes on with that conversation's ids; nothing is tokenised twice. One
that leaves a known conversation after some policy turn *branches* off there: it is a trajectory of its own, whose
prompt is the ids up to that point. Anything else starts a new conversation. This module does no I/O.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from realhf.api.chat import ChatTemplateError, TemplateChat
from realhf.api.env import MAX_BRANCHES, PlayedTurn
from realhf.api.environment import AssistantMessage
from realhf.api.model import GenOutput, GenRequest
from realhf.rollout.episode.token_buffer import TokenBuffer
from realhf.rollout.openai_endpoint.chat_request import ApiError
from realhf.rollout.openai_endpoint.messages import NO_TOOLS, Message, Tools, answer

_SLOT_STRIDE = 1 << 40
_SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Mark:
    """Marks a place after a policy turn by the number of messages and of completion ids before it; ``ended``: a sampled
    stop id ended the turn. ``said`` is what the policy said in it, ``reply`` the id of the answer."""

    messages: int
    tokens: int
    ended: bool
    said: AssistantMessage
    reply: str


@dataclass(eq=False)
class Branch:
    """Holds one trajectory. ``messages`` and ``marks`` cover what ``tokens`` holds; ``slot`` is its cache row;
    ``tools`` is the key of its tools."""

    slot: int
    seed: int | None
    tokens: TokenBuffer
    tools: str
    messages: list[Message] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    busy: bool = False

    @property
    def sampled(self) -> int:
        """Return how many tokens the policy sampled."""
        return sum(self.tokens.loss_mask)

    def turns(self) -> tuple[PlayedTurn, ...]:
        """Return the policy's turns as a person reads them, each with the messages that followed."""
        ends = [mark.messages - 1 for mark in self.marks[1:]] + [len(self.messages)]
        followed = [self.messages[mark.messages : end] for mark, end in zip(self.marks, ends, strict=True)]
        return tuple(
            PlayedTurn(
                mark.said.text, "\n".join(message.content for message in messages), 0.0, mark.said, _maps(messages)
            )
            for mark, messages in zip(self.marks, followed, strict=True)
        )

    def opening(self) -> list[dict[str, Any]]:
        """Return the messages before the policy's first turn."""
        return _maps(self.messages[: self.marks[0].messages - 1] if self.marks else self.messages)


@dataclass
class OpenTurn:
    """Holds a policy turn in progress; its branch changes only when it is kept. ``prompt`` are the ids it follows: the
    branch's and ``between``, which the branch does not have yet. ``said``, and ``answer``, what the agent gets of it,
    are there when the turn is complete; ``reply`` is the id of the answer."""

    branch: Branch
    messages: list[Message]
    between: list[int]
    tools: Tools = NO_TOOLS
    parts: list[GenOutput] = field(default_factory=list)
    said: AssistantMessage = field(default_factory=lambda: AssistantMessage(""))
    answer: Message = field(default_factory=lambda: Message("assistant", ""))
    reply: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")

    def __post_init__(self) -> None:
        self.prompt = self.branch.tokens.prefix() + self.between

    @property
    def ids(self) -> list[int]:
        """Token ids sampled so far."""
        return [token for part in self.parts for token in part.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities of ``ids``."""
        return [value for part in self.parts for value in part.logprobs]

    @property
    def finish_reason(self) -> str:
        """Why the last part ended (see ``GenOutput``)."""
        return self.parts[-1].finish_reason

    @property
    def text(self) -> str:
        """All that the policy said."""
        return self.said.text

    def request(self) -> GenRequest:
        """Return what the engine continues."""
        ids = self.ids
        return GenRequest(self.branch.slot, self.prompt + ids, len(ids), self.branch.seed)


class TokenLedger:
    """Holds all conversations of one session.

    Args:
        slot: cache row of the first conversation; those of others are derived from it. seed: of its random numbers.
        max_total_tokens: prompt and completion of one trajectory. turn_tokens: what a turn may have.
        max_turns: policy turns of the session.
    """

    def __init__(
        self,
        chat: TemplateChat,
        *,
        slot: int,
        seed: int | None,
        max_total_tokens: int,
        turn_tokens: int,
        max_turns: int,
    ) -> None:
        self.branches: list[Branch] = []
        self.slots: list[int] = []
        self.turns = 0
        self.limit_hit = ""
        """The limit beyond which the last turn was refused, until another turn is kept."""
        self.refusals: dict[str, str] = {}
        """Every limit of which a refusal has spoken, by the words of the refusal: its code and its message."""
        self._chat = chat
        self._first_slot = slot
        self._seed = seed
        self._max_total = max_total_tokens
        self._turn_tokens = turn_tokens
        self._max_turns = max_turns

    def begin(self, messages: Sequence[Message], tools: Tools = NO_TOOLS) -> OpenTurn:
        """Open the turn that follows ``messages``. Raises ApiError when there is no room for it, or when the model's
        chat template does not render them."""
        if self.turns >= self._max_turns:
            raise self._over("max_turns", "turn_limit", f"this session has had its {self._max_turns} turns")
        try:
            turn = self._opened(messages, tools)
        except ChatTemplateError as error:
            raise ApiError(400, "unsupported", str(error)) from error
        if turn.branch.tokens.room - len(turn.between) < self._turn_tokens:
            text = (
                f"the conversation has {len(turn.prompt)} tokens; with a turn of {self._turn_tokens} that is more "
                f"than {self._max_total}"
            )
            raise self._over("token_budget", "context_length_exceeded", text)
        turn.branch.busy = True
        return turn

    def add(self, turn: OpenTurn, output: GenOutput) -> bool:
        """Take what was sampled; returns whether the turn is complete. Raises ValueError for an output that is no turn,
        and ApiError when the engine's context has no room for one."""
        count = len(output.token_ids)
        interrupted = output.finish_reason == "interrupted"
        full = not count and output.finish_reason == "length"
        if full and not turn.parts:
            raise self._over(
                "token_budget",
                "context_length_exceeded",
                f"the conversation of {len(turn.prompt)} tokens fills the engine's context",
            )
        if (not count and not interrupted and not full) or not count == len(output.logprobs) == len(output.versions):
            raise ValueError(
                f"the engine returned {count} tokens, {len(output.logprobs)} logprobs, {len(output.versions)} versions"
            )
        if count or full:
            turn.parts.append(output)
        if interrupted:
            return False
        ids = turn.ids
        turn.said = self._chat.parse(ids, turn.tools.schemas)
        turn.answer = Message("assistant", turn.text)
        if turn.tools.read_calls:
            turn.answer = answer(turn.said, turn.prompt, ids)
        return True

    def keep(self, turn: OpenTurn) -> None:
        """Make the turn part of the trajectory: the agent gets it."""
        branch, self.limit_hit = turn.branch, ""
        if turn.between:
            branch.tokens.append_environment(turn.between)
        for number, part in enumerate(turn.parts):
            branch.tokens.append_policy(part, continues=number > 0)
        branch.messages += [*turn.messages, turn.answer]
        ended, tokens = turn.finish_reason == "stop", len(branch.tokens.completion_ids)
        branch.marks.append(Mark(len(branch.messages), tokens, ended, turn.said, turn.reply))
        if branch not in self.branches:
            self.branches.append(branch)
        branch.busy = False
        self.turns += 1

    def discard(self, turn: OpenTurn) -> None:
        """Drop a turn that failed or that nobody got."""
        turn.branch.busy = False

    def said(self, message: Message) -> AssistantMessage | None:
        """Return what the policy said in the latest turn that was answered with ``message``; None if there is none."""
        for branch in reversed(self.branches):
            for mark in reversed(branch.marks):
                if branch.messages[mark.messages - 1] == message:
                    return mark.said
        return None

    def ordered(self) -> list[Branch]:
        """Return the trajectories, the main one first: that with the most sampled tokens, of equal ones the latest."""
        return sorted(reversed(self.branches), key=lambda branch: -branch.sampled)

    def _opened(self, messages: Sequence[Message], tools: Tools) -> OpenTurn:
        key = tools.key
        branch, mark = self._known(messages, key)
        if branch is None or mark is None:
            prompt = self._chat.opening(_maps(messages), tools.schemas)
            return OpenTurn(self._new_branch(prompt, key), list(messages), [], tools)
        tail = list(messages[mark.messages :])
        between = self._chat.following_messages(_maps(tail), ended=mark.ended, tools=tools.schemas)
        if mark is branch.marks[-1] and not branch.busy:
            return OpenTurn(branch, tail, between, tools)
        ids = branch.tokens.prompt_ids + branch.tokens.completion_ids[: mark.tokens]
        return OpenTurn(self._new_branch(ids + between, key), branch.messages[: mark.messages] + tail, [], tools)

    def _known(self, messages: Sequence[Message], tools: str) -> tuple[Branch | None, Mark | None]:
        """Return the latest place in a known conversation after which ``messages`` add no words of the policy."""
        best: tuple[Branch | None, Mark | None] = (None, None)
        spoken = max((n for n, message in enumerate(messages, 1) if message.role == "assistant"), default=0)
        for branch in reversed(self.branches):
            mark = next((mark for mark in branch.marks if mark.messages == spoken), None)
            if mark is None or spoken == len(messages) or branch.tools != tools:
                continue
            if branch.messages[:spoken] != list(messages[:spoken]):
                continue
            if mark is branch.marks[-1] and not branch.busy:
                return branch, mark
            if best[0] is None:
                best = branch, mark
        return best

    def _new_branch(self, prompt: list[int], tools: str) -> Branch:
        number = len(self.slots)
        if number >= MAX_BRANCHES:
            raise self._over("max_turns", "branch_limit", f"this session has had its {MAX_BRANCHES} conversations")
        seed = None if self._seed is None else (self._seed + number * _SEED_STRIDE) % (1 << 63)
        self.slots.append(self._first_slot + number * _SLOT_STRIDE)
        return Branch(self.slots[-1], seed, TokenBuffer(prompt, self._max_total), tools)

    def _over(self, status: str, code: str, message: str) -> ApiError:
        self.limit_hit = status
        self.refusals |= {code: status, message: status}
        return ApiError(400, code, message)


def _maps(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.for_template() for message in messages]
