"""Sessions of black-box agents, with the exact token ids of their conversations.

An agent sends whole conversations as messages. Messages that extend a conversation of the session
(with the same tools, and the policy's turns equal to those returned) continue it with its ids;
nothing is tokenised twice. Messages that deviate from a conversation after some policy turn
*branch* off there: they begin another trajectory, whose prompt consists of the ids up to that
point. All other messages start a new conversation. Turns that differ only in what the agent does
not see are told apart by the id of the completion, if the request contains it. This module does no
I/O.

The id of a session is a capability: it cannot be guessed, and a client that knows it may use the
session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from realhf.api.chat_template import ChatTemplateError, TemplateChat
from realhf.api.environment import AssistantMessage, Task, TaskLimits, finite_number
from realhf.api.generation import GenerationFailed, TokenSource
from realhf.api.model import GenOutput, GenRequest
from realhf.api.rollout import (
    AGENT_FAILED,
    MAX_BRANCHES,
    VALID_STATUSES,
    PlayedTurn,
    RolloutOutcome,
)
from realhf.api.tool_parser import call_id, read_json
from realhf.rollout.answer_grammar import AnswerGrammars
from realhf.rollout.answer_rules import NO_RULES, AnswerRules, StopMatch, find_stop
from realhf.rollout.api_errors import ApiError
from realhf.rollout.episode import EpisodeLimits, TokenBuffer, make_outcome, state_number
from realhf.rollout.openai_requests import OpenAiCall, OpenAiMessage, ToolSchemas, build_message

_SLOT_STRIDE = 1 << 40
"""Difference between the cache slots of consecutive conversations of a session; it exceeds the
number of slots of sessions."""
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Difference between the seeds of consecutive conversations: 2**64 divided by the golden ratio."""
STOP_PART = 32
"""Maximum number of tokens that are sampled at once if a request has stop strings. Engines do not
look for them, so they sample at most so many tokens too many."""


@dataclass(frozen=True)
class TurnMark:
    """Position in a conversation at which a policy turn ends."""

    messages: int
    """Number of messages up to and including the turn."""
    tokens: int
    """Number of completion ids up to and including the turn."""
    ended: bool
    """Whether a sampled stop id ended the turn. The template's end of a turn follows it otherwise,
    which was not sampled."""
    cut: bool
    """Whether a limit of tokens ended the turn. Neither it nor a stop id did if a stop string of
    the request did."""
    turn: AssistantMessage
    """The policy's turn."""
    reply: str
    """Id of the completion."""


@dataclass(eq=False)
class Branch:
    """One conversation, which is one trajectory."""

    slot: int
    """Slot of the engine's cache."""
    seed: int | None
    """Seed of the random numbers of its tokens."""
    tokens: TokenBuffer
    """Tokens of the conversation."""
    tools: str
    """JSON text of the tools in the conversation's requests."""
    messages: list[OpenAiMessage] = field(default_factory=list)
    """The messages that ``tokens`` encodes."""
    marks: list[TurnMark] = field(default_factory=list)
    """Ends of the policy's turns, in order."""
    busy: bool = False
    """Whether a turn is being sampled."""

    @property
    def n_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.tokens.loss_mask)

    def states(self) -> list[int]:
        """Return, for each of the policy's turns, the ``state_number`` of the messages that it
        answers."""
        begins = [0, *(mark.messages for mark in self.marks)]
        answered = [
            self.messages[begin : mark.messages - 1]
            for begin, mark in zip(begins, self.marks, strict=False)
        ]
        return [state_number(_to_dicts(messages)) for messages in answered]

    def turns(self) -> tuple[PlayedTurn, ...]:
        """Return the policy's turns, each with the messages that followed it."""
        ends = [mark.messages - 1 for mark in self.marks[1:]] + [len(self.messages)]
        following = [
            self.messages[mark.messages : end] for mark, end in zip(self.marks, ends, strict=True)
        ]
        return tuple(
            PlayedTurn(
                mark.turn.text,
                "\n".join(message.content for message in messages),
                0.0,
                mark.turn,
                _to_dicts(messages),
            )
            for mark, messages in zip(self.marks, following, strict=True)
        )

    def opening(self) -> list[dict[str, Any]]:
        """Return the messages before the policy's first turn."""
        return _to_dicts(
            self.messages[: self.marks[0].messages - 1] if self.marks else self.messages
        )


@dataclass
class OpenTurn:
    """A policy turn in progress. Its branch changes only when the turn is kept. ``prompt`` contains
    all ids before the turn."""

    branch: Branch
    """The conversation that the turn continues."""
    messages: list[OpenAiMessage]
    """Messages that have not been added to the branch yet."""
    between: list[int]
    """Ids that follow those of the branch and precede the turn."""
    tools: ToolSchemas = ()
    """Tools of the request."""
    rules: AnswerRules = NO_RULES
    """What the request asks of the answer."""
    max_new_tokens: int = 0
    """Maximum number of tokens of the turn; 0 for that of the engine."""
    turn_tokens: int = 0
    """Maximum number of tokens of the turn, which is the engine's unless ``max_new_tokens`` is
    lower."""
    grammar: str = ""
    """Grammar that the engine enforces; "" if the turn is sampled freely."""
    parts: list[GenOutput] = field(default_factory=list)
    """Outputs of the engine so far."""
    parsed: AssistantMessage = field(default_factory=lambda: AssistantMessage(""))
    """The parsed turn, once it is complete."""
    answer: OpenAiMessage = field(default_factory=lambda: OpenAiMessage("assistant", ""))
    """The message that the agent gets, once the turn is complete."""
    stop: StopMatch | None = None
    """The stop string that ended the turn; None if none did."""
    broken: tuple[str, ...] = ()
    """Names of the rules that the answer breaks, once the turn is complete."""
    reply: str = field(default_factory=lambda: secrets.token_hex(12))
    """Id of the completion. An API may change it to its own form before the turn is kept."""

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
        """``stop`` or ``length``: whether a stop id or a stop string ended the turn, or a limit of
        tokens."""
        return "stop" if self.stop is not None else self.parts[-1].finish_reason

    @property
    def ended(self) -> bool:
        """Whether a sampled stop id ended the turn."""
        return self.stop is None and self.parts[-1].finish_reason == "stop"

    @property
    def is_cut(self) -> bool:
        """Whether a limit of tokens ended the turn, so that its answer cannot be judged."""
        return self.finish_reason == "length" and not self.parts[-1].mask_failed

    @property
    def text(self) -> str:
        """Whole text of the turn."""
        return self.parsed.text

    def request(self) -> GenRequest:
        """Return the engine's request to generate the rest of the turn."""
        ids = self.ids
        return GenRequest(
            self.branch.slot,
            self.prompt + ids,
            len(ids),
            self.branch.seed,
            max_new_tokens=self._part_end() or self.max_new_tokens,
            grammar=self.grammar,
        )

    def ends_part(self, output: GenOutput) -> bool:
        """Return whether an output reached the limit of ``request`` and not that of the turn, so
        that the turn goes on."""
        count = len(self.ids) + len(output.token_ids)
        is_cut = output.finish_reason == "length" and not output.mask_failed
        return is_cut and count == self._part_end()

    def _part_end(self) -> int:
        """Return the number of tokens of the turn after the next request; 0 if nothing but the
        limit of the turn ends it."""
        end = len(self.ids) + STOP_PART
        return end if self.rules.stop and end < self.turn_tokens else 0

    def stop_at(self, stop: StopMatch) -> None:
        """End the turn at a stop string: drop the tokens after the one that completes it."""
        self.stop = stop
        left = stop.tokens
        for number, part in enumerate(self.parts):
            self.parts[number] = replace(
                part,
                token_ids=part.token_ids[:left],
                logprobs=part.logprobs[:left],
                unmasked_logprobs=part.unmasked_logprobs and part.unmasked_logprobs[:left],
                versions=part.versions[:left],
            )
            left -= len(self.parts[number].token_ids)
        self.parts = [part for part in self.parts if part.token_ids]


class TokenLedger:
    """All conversations of one session.

    ``slot`` and ``seed`` are the cache slot and the seed of the first conversation; those of the
    other conversations are derived from them. ``limits`` apply to each trajectory, and to the
    number of policy turns of the session. ``grammars`` build the grammars of answers; None if
    their rules are checked only.
    """

    def __init__(
        self,
        chat: TemplateChat,
        limits: EpisodeLimits,
        *,
        slot: int,
        seed: int | None,
        grammars: AnswerGrammars | None = None,
    ) -> None:
        self.branches: list[Branch] = []
        self.slots: list[int] = []
        """Cache slots of all conversations, including conversations without a kept turn."""
        self.turns = 0
        """Number of kept turns."""
        self.checked = 0
        """Number of kept, complete turns whose request had rules to check."""
        self.broken = 0
        """Number of kept turns that broke a rule of their request."""
        self.limit_hit = ""
        """Status for the limit at which the last turn was refused; "" once another turn is kept."""
        self.last_cut = False
        """Whether a limit of tokens ended the last kept turn."""
        self.refusals: dict[str, str] = {}
        """Episode status for each limit that was hit, keyed by the refusal's code and also by its
        message."""
        self._n_running = 0
        self._chat = chat
        self._limits = limits
        self._first_slot = slot
        self._seed = seed
        self._grammars = grammars

    def begin(
        self,
        messages: Sequence[OpenAiMessage],
        tools: ToolSchemas = (),
        rules: AnswerRules = NO_RULES,
        *,
        after: str = "",
    ) -> OpenTurn:
        """Start the turn that follows ``messages``.

        after: id of the completion that is the last assistant message; "" if the request has none.
        It decides between policy turns that look the same to the agent, for example because they
        differ in reasoning only.

        Raises ApiError if a limit is exceeded, if the model's chat template cannot render the
        messages, or if the rules have no grammar.
        """
        limits = self._limits
        # Running turns count as well; otherwise concurrent requests could exceed the limit
        # together.
        if self.turns + self._n_running >= limits.max_turns:
            raise self._refuse(
                "max_turns", "turn_limit", f"this session has had its {limits.max_turns} turns"
            )
        try:
            turn = self._open_turn(messages, tools, after)
            turn.rules = rules
        except ChatTemplateError as error:
            raise ApiError(400, "unsupported", str(error)) from error
        if turn.branch.tokens.room - len(turn.between) < limits.turn_tokens:
            text = (
                f"the conversation has {len(turn.prompt)} tokens; with a turn of "
                f"{limits.turn_tokens} that is more "
                f"than {limits.max_total_tokens}"
            )
            raise self._refuse("token_budget", "context_length_exceeded", text)
        if self._grammars is not None:
            turn.grammar = self._grammars.build(rules, tools, turn.prompt)
        turn.max_new_tokens = limits.max_new_tokens
        turn.turn_tokens = limits.turn_tokens
        turn.branch.busy = True
        self._n_running += 1
        return turn

    async def check_grammar(self, turn: OpenTurn) -> None:
        """Raise ApiError if the engine would refuse the grammar of a turn."""
        if self._grammars is not None and turn.grammar:
            await self._grammars.check(turn.grammar)

    def is_out_of_turns(self, task: Task) -> bool:
        """Return whether the turn limit is reached although the task itself allows more turns."""
        return self.turns >= self._limits.max_turns and task.allows_more_than(
            self._limits.max_turns
        )

    def add(self, turn: OpenTurn, output: GenOutput) -> bool:
        """Add an output of the engine to a turn; return whether the turn is complete, which it also
        is if it contains a stop string of its request.

        Raises ValueError for an invalid output, and ApiError if the engine's context leaves no room
        for the turn.
        """
        if turn.ends_part(output):
            output = replace(output, finish_reason="interrupted")
        count = len(output.token_ids)
        interrupted = output.finish_reason == "interrupted"
        full = not count and output.finish_reason == "length"
        if full and not turn.parts:
            raise self._refuse(
                "token_budget",
                "context_length_exceeded",
                f"the conversation of {len(turn.prompt)} tokens fills the engine's context",
            )
        if (not count and not interrupted and not full) or not count == len(output.logprobs) == len(
            output.versions
        ):
            raise ValueError(
                f"the engine returned {count} tokens, {len(output.logprobs)} logprobs, "
                f"{len(output.versions)} versions"
            )
        if count or full:
            turn.parts.append(output)
        if stop := find_stop(turn.ids, turn.rules.stop, self._chat.decode):
            turn.stop_at(stop)
        elif interrupted:
            return False
        self._build_answer(turn)
        return True

    def _build_answer(self, turn: OpenTurn) -> None:
        """Parse a complete turn and check the rules of its request."""
        ids = turn.ids
        rules = turn.rules
        text = None if turn.stop is None else turn.stop.text
        turn.parsed = self._chat.parse(ids, turn.tools, text=text)
        turn.answer = build_message(
            turn.parsed,
            turn.prompt,
            ids,
            reads_calls=bool(turn.tools) and rules.reads_calls,
            frames_words=self._chat.frames_words,
        )
        if turn.stop is not None:
            turn.answer = replace(turn.answer, stop=turn.stop.string)
        calls = [(call.name, read_json(call.arguments, 0)[0]) for call in turn.answer.calls]
        if not turn.is_cut:
            turn.broken = rules.find_broken(turn.answer.content, calls)

    def keep(self, turn: OpenTurn) -> None:
        """Add a complete turn to its trajectory, because it is returned to the agent."""
        branch = turn.branch
        self.limit_hit = ""
        if turn.between:
            branch.tokens.append_environment(turn.between)
        for number, part in enumerate(turn.parts):
            branch.tokens.append_policy(part, continues=number > 0)
        branch.messages += [*turn.messages, turn.answer]
        branch.marks.append(
            TurnMark(
                len(branch.messages),
                len(branch.tokens.completion_ids),
                turn.ended,
                turn.finish_reason == "length",
                turn.parsed,
                turn.reply,
            )
        )
        if branch not in self.branches:
            self.branches.append(branch)
        branch.busy = False
        self._n_running -= 1
        self.turns += 1
        self.last_cut = turn.finish_reason == "length"
        reads_calls = bool(turn.tools) and turn.rules.reads_calls
        self.checked += not turn.is_cut and turn.rules.has_checks(reads_calls=reads_calls)
        self.broken += bool(turn.broken)

    def discard(self, turn: OpenTurn) -> None:
        """Drop a turn that failed or whose client has disconnected."""
        turn.branch.busy = False
        self._n_running -= 1

    def count_tokens(
        self, messages: Sequence[OpenAiMessage], tools: ToolSchemas = (), *, after: str = ""
    ) -> int:
        """Return how many tokens the prompt of a turn after ``messages`` would have. ``after`` is
        as in ``begin``. Raises ApiError if the chat template cannot render them."""
        branch, mark = self._find_continuation(messages, json.dumps(tools), after)
        try:
            if branch is None or mark is None:
                return len(self._chat.opening(_to_dicts(messages), tools))
            between = self._encode_between(branch, mark, messages, tools)
        except ChatTemplateError as error:
            raise ApiError(400, "unsupported", str(error)) from error
        return len(branch.tokens.prompt_ids) + mark.tokens + len(between)

    def find_turn(self, message: OpenAiMessage, reply: str = "") -> AssistantMessage | None:
        """Return the policy's turn that was returned to the agent as ``message``; None if there is
        none. Of several, the one with the id ``reply`` is returned, otherwise the latest, if it can
        be with the same reasoning."""
        marks = [
            mark
            for branch in reversed(self.branches)
            for mark in reversed(branch.marks)
            if branch.messages[mark.messages - 1].is_sent_as(message)
        ]
        named = [mark for mark in marks if mark.reply == reply]
        thought = [mark for mark in marks if mark.turn.reasoning == message.reasoning]
        mark = next(iter([*named, *thought, *marks]), None)
        return None if mark is None else mark.turn

    def share_turn(self, calls: Sequence[OpenAiCall], others: Sequence[OpenAiCall]) -> bool:
        """Return whether one policy turn made both ``calls`` and ``others``."""
        ids = {call.id for call in (*calls, *others)}
        return any(ids <= {call.id for call in answer.calls} for answer in self._answers())

    def are_two_turns(self, message: OpenAiMessage, calls: Sequence[OpenAiCall]) -> bool:
        """Return whether ``message`` is a whole policy turn and another one made ``calls``."""
        ids = {call.id for call in calls}
        owners = [answer for answer in self._answers() if ids <= {call.id for call in answer.calls}]
        earlier = {call.id for call in message.calls}
        has_both = any(
            owner.content == message.content and earlier <= {call.id for call in owner.calls}
            for owner in owners
        )
        is_whole = any(answer.is_sent_as(message) for answer in self._answers())
        return bool(owners) and not has_both and is_whole

    def _answers(self) -> Iterator[OpenAiMessage]:
        """Yield the policy's turns in the form that the agent got."""
        for branch in self.branches:
            for mark in branch.marks:
                yield branch.messages[mark.messages - 1]

    def sort_branches(self) -> list[Branch]:
        """Return the trajectories, the main one first: ordered by the number of sampled tokens, the
        most first, and among equals the latest first."""
        return sorted(reversed(self.branches), key=lambda branch: -branch.n_sampled)

    def _open_turn(
        self, messages: Sequence[OpenAiMessage], tools: ToolSchemas, after: str
    ) -> OpenTurn:
        """Return a turn that follows ``messages``: in a conversation that they continue, in a
        branch of one, or in a new conversation."""
        key = json.dumps(tools)
        branch, mark = self._find_continuation(messages, key, after)
        if branch is None or mark is None:
            prompt = self._chat.opening(_to_dicts(messages), tools)
            return OpenTurn(self._new_branch(prompt, key), list(messages), [], tools)
        tail = list(messages[mark.messages :])
        between = self._encode_between(branch, mark, messages, tools)
        if mark is branch.marks[-1] and not branch.busy:
            return OpenTurn(branch, tail, between, tools)
        ids = branch.tokens.prompt_ids + branch.tokens.completion_ids[: mark.tokens]
        return OpenTurn(
            self._new_branch(ids + between, key), branch.messages[: mark.messages] + tail, [], tools
        )

    def _encode_between(
        self, branch: Branch, mark: TurnMark, messages: Sequence[OpenAiMessage], tools: ToolSchemas
    ) -> list[int]:
        """Return the ids between the policy turn at ``mark`` and the turn after ``messages``."""
        following = _restore_call_ids(messages[mark.messages :], branch, mark)
        return self._chat.following_messages(
            _to_dicts(following),
            ended=mark.ended,
            end=branch.tokens.completion_ids[mark.tokens - 1],
            tools=tools,
        )

    def _find_continuation(
        self, messages: Sequence[OpenAiMessage], tools: str, after: str
    ) -> tuple[Branch | None, TurnMark | None]:
        """Return the conversation that ``messages`` continue and the policy turn after which they
        do, or (None, None).

        ``messages`` must equal the conversation up to that turn and add no further assistant
        message. Of several such turns, that with the id ``after`` counts; without one, that whose
        reasoning the client sent back. Otherwise a turn that is the last one of an idle
        conversation is preferred, because it can be continued without a branch.
        """
        best: tuple[Branch | None, TurnMark | None] = (None, None)
        best_rank = (-1, False)
        n_shared = max(
            (n for n, message in enumerate(messages, 1) if message.role == "assistant"), default=0
        )
        for branch in reversed(self.branches):
            mark = next((mark for mark in branch.marks if mark.messages == n_shared), None)
            if mark is None or n_shared == len(messages) or branch.tools != tools:
                continue
            pairs = list(zip(branch.messages[:n_shared], messages[:n_shared], strict=True))
            if not all(known.is_sent_as(message) for known, message in pairs):
                continue
            if mark.reply == after:
                return branch, mark
            n_thoughts = sum(
                bool(message.reasoning) and known.reasoning == message.reasoning
                for known, message in pairs
            )
            rank = (n_thoughts, mark is branch.marks[-1] and not branch.busy)
            if rank > best_rank:
                best = (branch, mark)
                best_rank = rank
        return best

    def _new_branch(self, prompt: list[int], tools: str) -> Branch:
        number = len(self.slots)
        if number >= MAX_BRANCHES:
            raise self._refuse(
                "max_turns",
                "branch_limit",
                f"this session has had its {MAX_BRANCHES} conversations",
            )
        seed = None if self._seed is None else (self._seed + number * _SEED_STRIDE) % (1 << 63)
        self.slots.append(self._first_slot + number * _SLOT_STRIDE)
        return Branch(
            self.slots[-1], seed, TokenBuffer(prompt, self._limits.max_total_tokens), tools
        )

    def _refuse(self, status: str, code: str, message: str) -> ApiError:
        """Record that a limit was hit, with the status that it gives the episode; return the error
        to raise."""
        self.limit_hit = status
        self.refusals |= {code: status, message: status}
        return ApiError(400, code, message)


def _restore_call_ids(
    messages: Sequence[OpenAiMessage], branch: Branch, mark: TurnMark
) -> list[OpenAiMessage]:
    """Return the messages after a policy turn, in which the results of its calls have the ids that
    the policy wrote into its calls, if it did: the agent got others, which differ in all turns."""
    parsed = [
        (call, call_id(number))
        for number, call in enumerate(mark.turn.tool_calls)
        if not call.problem
    ]
    sampled = {
        sent.id: call.id
        for sent, (call, made) in zip(
            branch.messages[mark.messages - 1].calls, parsed, strict=False
        )
        if call.id != made
    }
    return [
        replace(message, call_id=sampled.get(message.call_id, message.call_id))
        if message.role == "tool"
        else message
        for message in messages
    ]


def _to_dicts(messages: Sequence[OpenAiMessage]) -> list[dict[str, Any]]:
    return [message.for_template() for message in messages]


MAX_SESSIONS = 4096
"""Maximum number of open sessions of an endpoint."""
MAX_AT_ONCE = 16
"""Maximum number of concurrent requests of a session."""
_CUT_WORDS = ("max_output_tokens", "length limit was reached", "token limit")
"""Words by which clients' errors say that an answer was cut off: of the Agents SDK, the ``openai``
package and pydantic-ai."""
Reward = float | Mapping[str, float]
"""Reward of all trajectories of a session, or a map from the ids of completions to the rewards of
their trajectories. If several completions of one trajectory are named, the latest counts. A
trajectory without a named completion is left out."""


@dataclass(frozen=True)
class Ending:
    """How an episode ended; the outcomes of its trajectories are built from it."""

    status: str
    """Status of the episode, as in ``realhf.api.rollout``."""
    reward: Reward | None = None
    """The reward; None: use the one reported to the session."""
    achieved: bool = False
    """Whether the task is solved."""
    progress: float = 0.0
    """Solved fraction of the task."""
    message: str = ""
    """Error message of a failed episode."""
    task: Task = field(default_factory=lambda: Task(""))
    """The task."""
    task_text: str = ""
    """Text of the task."""


class OpenAiSession:
    """Session of one agent, which samples turns and takes the reported reward. Use it on one event
    loop."""

    def __init__(self, key: str, ledger: TokenLedger, llm: TokenSource) -> None:
        self.key = key
        """Id of the session, which must stay secret."""
        self.ledger = ledger
        self.reward: Reward | None = None
        """The reported reward."""
        self.engine_error: GenerationFailed | None = None
        """The last failure of the engine; None again once a later request succeeds."""
        self.ended = asyncio.Event()
        self.stored: dict[str, list[OpenAiMessage]] = {}
        """Conversations that requests may continue by the id of their last response, without the
        instructions of that request."""
        self.stored_items: dict[str, dict[str, Any]] = {}
        """Output items of stored responses, to which requests may refer by id."""
        self._llm = llm
        self._running: set[asyncio.Task[None]] = set()

    async def sample(
        self,
        messages: Sequence[OpenAiMessage],
        tools: ToolSchemas = (),
        rules: AnswerRules = NO_RULES,
        *,
        after: str = "",
    ) -> OpenTurn:
        """Sample the policy's next turn, which the caller must ``keep`` or ``discard``. ``after``
        is as in ``TokenLedger.begin``. Raises ApiError.

        An answer that breaks ``rules`` is returned like any other; ``OpenTurn.broken`` names them.
        """
        if self.ended.is_set():
            raise _session_over_error("this session has ended")
        if len(self._running) >= MAX_AT_ONCE:
            raise ApiError(
                429, "too_many_requests", f"this session has {MAX_AT_ONCE} requests under way"
            )
        turn = self.ledger.begin(messages, tools, rules, after=after)
        earlier_error = self.engine_error
        work = asyncio.ensure_future(self._sample(turn))
        self._running.add(work)
        try:
            await asyncio.wait((work,))
            if work.cancelled() or self.ended.is_set():
                raise _session_over_error("this session has ended")
            work.result()
        except (GenerationFailed, ValueError) as error:
            self.engine_error = (
                error if isinstance(error, GenerationFailed) else GenerationFailed(str(error))
            )
            self.ledger.discard(turn)
            raise ApiError(503, "engine_failed", str(error)) from error
        except BaseException:
            self.ledger.discard(turn)
            raise
        finally:
            self._running.discard(work)
            work.cancel()
        # the failure came before this request, which has succeeded
        if self.engine_error is earlier_error:
            self.engine_error = None
        return turn

    def keep(self, turn: OpenTurn) -> None:
        """Add a sampled turn to its trajectory, because it is returned to the agent.

        Raises ApiError and drops the turn if the session has ended: its outcome may already exist
        and share the lists to which the turn would be added.
        """
        if self.ended.is_set():
            self.discard(turn)
            raise _session_over_error("this session has ended")
        self.ledger.keep(turn)

    def discard(self, turn: OpenTurn) -> None:
        """Drop a sampled turn whose client has disconnected."""
        self.ledger.discard(turn)

    def store(
        self, turn: OpenTurn, messages: Sequence[OpenAiMessage], *, items: Sequence[dict[str, Any]]
    ) -> None:
        """Store a kept turn, which follows ``messages`` and was returned as ``items``, so that
        requests may name it."""
        self.stored[turn.reply] = [*messages, turn.answer]
        self.stored_items |= {item["id"]: item for item in items}

    def report(self, reward: Reward) -> None:
        """Record the agent's reward and end the session. Raises ApiError for a second report or an
        invalid reward."""
        if self.ended.is_set():
            raise _session_over_error("this session has ended")
        try:
            self.reward = _check_replies(read_reward(reward), self.ledger.branches)
        except ValueError as error:
            raise ApiError(400, "invalid_reward", str(error)) from None
        self.end()

    def end(self) -> None:
        """Refuse further requests, cancel running ones, and free the session's cache slots."""
        self.ended.set()
        for work in self._running:
            work.cancel()
        self._llm.free(self.ledger.slots)

    def find_limit(self, error: BaseException) -> str:
        """Return the outcome of the limit that made the agent fail; "" if no limit did.

        A refusal is recognised by its code or message, or by status 400 with the address of this
        session, in the text of the exception or of its cause (``__cause__``). An exception that was
        merely raised while the agent handled a refusal does not count. If the last turn was cut
        off, an error that says so and a failure of pydantic to read JSON count as well.
        """
        if isinstance(error, BaseExceptionGroup):
            statuses = [self.find_limit(inner) for inner in error.exceptions]
            return statuses[-1] if all(statuses) else ""
        text = f"{error} {getattr(error, 'url', '')} "
        # of any HTTP client; the body may not have been read, or may not be text
        with contextlib.suppress(Exception):
            text += str(error.response.text)  # type: ignore[attr-defined]
        for refusal, status in self.ledger.refusals.items():
            if refusal in text or (self.key in text and "400" in text):
                return status
        if self.ledger.last_cut and (
            any(words in text for words in _CUT_WORDS) or _is_invalid_json(error)
        ):
            return "token_budget"
        return self.find_limit(error.__cause__) if error.__cause__ is not None else ""

    def outcomes(self, ending: Ending) -> list[RolloutOutcome]:
        """Return the outcomes of the session's trajectories, the main one first.

        If the agent made no request, there is one outcome without tokens. All outcomes have the
        same reward unless rewards were given by completion (``Reward``).
        """
        branches = self.ledger.sort_branches()
        reward = self.reward if ending.reward is None else ending.reward
        if ending.status in VALID_STATUSES and reward is not None:
            try:
                reward = _check_replies(read_reward(reward), branches)
            except ValueError as error:
                ending = replace(ending, status=AGENT_FAILED, message=str(error))
        if isinstance(reward, Mapping) and ending.status in VALID_STATUSES:
            rewards = [(branch, _find_reward(reward, branch)) for branch in branches]
            rewarded = [(branch, value) for branch, value in rewards if value is not None]
        else:
            rewarded = [
                (branch, None if isinstance(reward, Mapping) else reward) for branch in branches
            ]
        return [self._build_outcome(*pair, ending) for pair in rewarded] or [
            self._build_outcome(None, None, ending)
        ]

    def _build_outcome(
        self, branch: Branch | None, reward: float | None, ending: Ending
    ) -> RolloutOutcome:
        status = ending.status
        message = ending.message
        if status in VALID_STATUSES and (branch is None or reward is None):
            status = AGENT_FAILED
            message = "the agent requested no turn" if branch is None else "no reward was reported"
        # The whole reward belongs to the last turn.
        turns = branch.turns() if branch else ()
        rewards = [0.0 for _ in turns]
        if rewards and status in VALID_STATUSES:
            rewards[-1] = reward or 0.0
        return make_outcome(
            ending.task,
            branch.tokens if branch else None,
            status,
            reward,
            achieved=ending.achieved,
            progress=ending.progress,
            turns=turns,
            task_text=ending.task_text,
            message=message,
            timings={"branches": float(len(self.ledger.branches))},
            last_turn_cut=bool(branch and branch.marks and branch.marks[-1].cut),
            out_of_turns=status == "max_turns" and self.ledger.is_out_of_turns(ending.task),
            broken_rules=self.ledger.broken / self.ledger.checked if self.ledger.checked else None,
            turn_rewards=rewards,
            turn_states=branch.states() if branch else (),
            opening=branch.opening() if branch else (),
        )

    async def _sample(self, turn: OpenTurn) -> None:
        await self.ledger.check_grammar(turn)
        while not self.ledger.add(turn, await self._llm.generate(turn.request())):
            pass


def _is_invalid_json(error: BaseException) -> bool:
    """Return whether pydantic raised the error for a text that is no JSON."""
    return isinstance(error, ValidationError) and any(
        each["type"] == "json_invalid" for each in error.errors()
    )


_NO_LIMITS = TaskLimits()


class OpenAiSessions:
    """The open sessions of one endpoint. ``constrain``: whether answers are sampled under the
    grammars of their requests, instead of being checked only."""

    def __init__(
        self, chat: TemplateChat, limits: EpisodeLimits, *, constrain: bool = False
    ) -> None:
        self.chat = chat
        self._grammars = AnswerGrammars(chat) if constrain else None
        self._limits = limits
        self._open: dict[str, OpenAiSession] = {}

    def open(
        self,
        llm: TokenSource,
        *,
        slot: int,
        seed: int | None = None,
        max_turns: int = 0,
        task_limits: TaskLimits = _NO_LIMITS,
    ) -> OpenAiSession:
        """Open a session that samples from ``llm``, with at most ``max_turns`` turns (0: the number
        in the limits, which ``task_limits`` narrow).

        Raises RuntimeError if there are too many open sessions.
        """
        if len(self._open) >= MAX_SESSIONS:
            raise RuntimeError(f"the endpoint has {MAX_SESSIONS} sessions; close some")
        limits = self._limits.narrow(task_limits)
        limits = replace(limits, max_turns=min(limits.max_turns, max_turns or limits.max_turns))
        ledger = TokenLedger(self.chat, limits, slot=slot, seed=seed, grammars=self._grammars)
        session = OpenAiSession(secrets.token_urlsafe(24), ledger, llm)
        self._open[session.key] = session
        return session

    def find(self, key: str) -> OpenAiSession:
        """Return the open session with this id. Raises ApiError if there is none."""
        session = self._open.get(key)
        if session is None:
            raise ApiError(404, "no_such_session", "there is no such session")
        return session

    def close(self, session: OpenAiSession) -> None:
        """Close a session. Idempotent."""
        if self._open.pop(session.key, None) is not None and not session.ended.is_set():
            session.end()


def read_reward(value: object) -> Reward:
    """Return a reward as plain floats. Raises ValueError, with the reason, if ``value`` is not a
    reward."""
    if isinstance(value, Mapping):
        if not value:
            raise ValueError("the map of rewards is empty")
        return {reply: _read_number(reward) for reply, reward in value.items()}
    return _read_number(value)


def _read_number(value: object) -> float:
    number = finite_number(value)
    if number is None and isinstance(value, int):
        raise ValueError("an integer that is not a reward: it is too large")
    if number is None:
        raise ValueError(f"{str(value)[:100]!r} is not a reward, which is a finite number")
    return number


def _check_replies(reward: Reward, branches: Sequence[Branch]) -> Reward:
    """Return the reward. Raises ValueError if it contains an id that does not belong to a
    completion of these conversations."""
    replies = {mark.reply for branch in branches for mark in branch.marks}
    for reply in reward if isinstance(reward, Mapping) else ():
        if reply not in replies:
            raise ValueError(f"{str(reply)[:100]!r} is the id of no completion of this session")
    return reward


def _find_reward(rewards: Mapping[str, float], branch: Branch) -> float | None:
    """Return the reward of the latest completion of a conversation that has one; None if none
    has."""
    return next(
        (rewards[mark.reply] for mark in reversed(branch.marks) if mark.reply in rewards), None
    )


def _session_over_error(message: str) -> ApiError:
    return ApiError(409, "session_over", message)
