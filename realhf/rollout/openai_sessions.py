"""Keeps the sessions of black-box agents, and the exact token ids of their conversations.

An agent sends whole conversations as messages. One that extends a conversation of this session (with the same tools,
and the policy's turns equal to what was returned) goes on with that conversation's ids; nothing is tokenised twice. One
that leaves a known conversation after some policy turn *branches* off there: it is a trajectory of its own, whose
prompt is the ids up to that point. Anything else starts a new conversation. This module does no I/O.

The id of a session is a capability: whoever knows it speaks for that session, and nobody can guess it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from realhf.api.chat_template import ChatTemplateError, TemplateChat
from realhf.api.environment import AssistantMessage, Task, finite_number
from realhf.api.generation import GenerationFailed, TokenSource
from realhf.api.model import GenOutput, GenRequest
from realhf.api.rollout import AGENT_FAILED, MAX_BRANCHES, VALID_STATUSES, PlayedTurn, RolloutOutcome
from realhf.rollout.episode import Limits, TokenBuffer, outcome_of, state_number
from realhf.rollout.openai_requests import NO_TOOLS, ApiError, Message, Tools, answer

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

    def states(self) -> list[int]:
        """Return the number of the state that each of the policy's turns began in: of the messages before it."""
        begins = [0, *(mark.messages for mark in self.marks)]
        told = [self.messages[begin : mark.messages - 1] for begin, mark in zip(begins, self.marks, strict=False)]
        return [state_number(_maps(messages)) for messages in told]

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
    """Holds all conversations of one session. ``slot`` is the cache row of the first conversation; those of others are
    derived from it. ``seed`` is that of its random numbers. ``limits`` bound each trajectory, and the policy turns of
    the session."""

    def __init__(self, chat: TemplateChat, limits: Limits, *, slot: int, seed: int | None) -> None:
        self.branches: list[Branch] = []
        self.slots: list[int] = []
        self.turns = 0
        self.limit_hit = ""
        """The limit beyond which the last turn was refused, until another turn is kept."""
        self.refusals: dict[str, str] = {}
        """Every limit of which a refusal has spoken, by the words of the refusal: its code and its message."""
        self._under_way = 0
        self._chat, self._limits = chat, limits
        self._first_slot, self._seed = slot, seed

    def begin(self, messages: Sequence[Message], tools: Tools = NO_TOOLS) -> OpenTurn:
        """Open the turn that follows ``messages``. Raises ApiError when there is no room for it, or when the model's
        chat template does not render them."""
        limits = self._limits
        # Turns under way count: of many that are asked for at once, each would find none of the others kept.
        if self.turns + self._under_way >= limits.max_turns:
            raise self._over("max_turns", "turn_limit", f"this session has had its {limits.max_turns} turns")
        try:
            turn = self._opened(messages, tools)
        except ChatTemplateError as error:
            raise ApiError(400, "unsupported", str(error)) from error
        if turn.branch.tokens.room - len(turn.between) < limits.turn_tokens:
            text = (
                f"the conversation has {len(turn.prompt)} tokens; with a turn of {limits.turn_tokens} that is more "
                f"than {limits.max_total_tokens}"
            )
            raise self._over("token_budget", "context_length_exceeded", text)
        turn.branch.busy = True
        self._under_way += 1
        return turn

    def is_out_of_turns(self, task: Task) -> bool:
        """Return whether the limit of turns is reached, where the task itself would allow more."""
        return self.turns >= self._limits.max_turns and task.allows_more_than(self._limits.max_turns)

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
        self._under_way -= 1
        self.turns += 1

    def discard(self, turn: OpenTurn) -> None:
        """Drop a turn that failed or that nobody got."""
        turn.branch.busy = False
        self._under_way -= 1

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
        end = branch.tokens.completion_ids[mark.tokens - 1]
        between = self._chat.following_messages(_maps(tail), ended=mark.ended, end=end, tools=tools.schemas)
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
        return Branch(self.slots[-1], seed, TokenBuffer(prompt, self._limits.max_total_tokens), tools)

    def _over(self, status: str, code: str, message: str) -> ApiError:
        self.limit_hit = status
        self.refusals |= {code: status, message: status}
        return ApiError(400, code, message)


def _maps(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.for_template() for message in messages]


MAX_SESSIONS = 4096
MAX_AT_ONCE = 16
Reward = float | Mapping[str, float]
"""The reward of all trajectories of a session; or of each, named by the id of a completion in it. Of several
completions of one trajectory the latest counts; a trajectory that no id names is left out."""


@dataclass(frozen=True)
class Ending:
    """Says how an episode ended, for its trajectories. ``status``: see ``realhf.api.rollout``; ``reward`` None:
    what was reported to the session."""

    status: str
    reward: Reward | None = None
    achieved: bool = False
    progress: float = 0.0
    message: str = ""
    task: Task = field(default_factory=lambda: Task(""))
    task_text: str = ""


class Session:
    """Holds one agent's conversations. Use it on one event loop. ``reward`` is the reported one, once there is one;
    ``engine_error`` the last failure of the engine, until a turn that was asked for after it succeeds."""

    def __init__(self, key: str, ledger: TokenLedger, llm: TokenSource) -> None:
        self.key = key
        self.ledger = ledger
        self.reward: Reward | None = None
        self.engine_error: GenerationFailed | None = None
        self.ended = asyncio.Event()
        self._llm = llm
        self._running: set[asyncio.Task[None]] = set()

    async def sample(self, messages: Sequence[Message], tools: Tools = NO_TOOLS) -> OpenTurn:
        """Sample the policy's next turn; the caller must ``keep`` or ``discard`` it. Raises ApiError."""
        if self.ended.is_set():
            raise _gone("this session is over")
        if len(self._running) >= MAX_AT_ONCE:
            raise ApiError(429, "too_many_requests", f"this session has {MAX_AT_ONCE} requests under way")
        turn, known_error = self.ledger.begin(messages, tools), self.engine_error
        work = asyncio.ensure_future(self._sample(turn))
        self._running.add(work)
        try:
            await asyncio.wait((work,))
            if work.cancelled() or self.ended.is_set():
                raise _gone("this session ended meanwhile")
            work.result()
        except (GenerationFailed, ValueError) as error:
            self.engine_error = error if isinstance(error, GenerationFailed) else GenerationFailed(str(error))
            self.ledger.discard(turn)
            raise ApiError(503, "engine_failed", str(error)) from error
        except BaseException:
            self.ledger.discard(turn)
            raise
        finally:
            self._running.discard(work)
            work.cancel()
        if self.engine_error is known_error:
            self.engine_error = None
        return turn

    def keep(self, turn: OpenTurn) -> None:
        """Make a sampled turn part of its trajectory: the agent gets it. Raises ApiError, and drops the turn, when the
        session ended since: its outcome may be made already, and holds the lists that this would add to."""
        if self.ended.is_set():
            self.discard(turn)
            raise _gone("this session ended meanwhile")
        self.ledger.keep(turn)

    def discard(self, turn: OpenTurn) -> None:
        """Drop a sampled turn that nobody gets."""
        self.ledger.discard(turn)

    def report(self, reward: Reward) -> None:
        """Take the agent's report of how it went, which ends the session. Raises ApiError for a second report or one
        that is no reward."""
        if self.ended.is_set():
            raise _gone("this session is over")
        try:
            self.reward = _known(read_reward(reward), self.ledger.branches)
        except ValueError as error:
            raise ApiError(400, "invalid_reward", str(error)) from None
        self.end()

    def end(self) -> None:
        """Refuse further requests; those under way are cancelled, and the engine forgets the session."""
        self.ended.set()
        for work in self._running:
            work.cancel()
        self._llm.free(self.ledger.slots)

    def limit_told_by(self, error: BaseException) -> str:
        """Return the limit of whose refusal an exception of the agent tells: by the words of the refusal, or by status
        400 and the address of this session, in its own text or in that of what it was raised from. "" for any other,
        such as one that was raised while the agent dealt with a refusal."""
        if isinstance(error, BaseExceptionGroup):
            limits = [self.limit_told_by(each) for each in error.exceptions]
            return limits[-1] if all(limits) else ""
        told = f"{error} {getattr(error, 'url', '')} "
        with contextlib.suppress(Exception):  # Of any client: a body that was not read, or that is no text.
            told += str(error.response.text)  # type: ignore[attr-defined]
        for words, status in self.ledger.refusals.items():
            if words in told or (self.key in told and "400" in told):
                return status
        return self.limit_told_by(error.__cause__) if error.__cause__ is not None else ""

    def outcomes(self, ending: Ending) -> list[RolloutOutcome]:
        """Return the trajectories of the session, the main one first; there is one without tokens if the agent never
        spoke. All have the same reward, unless there is one for each (see ``Reward``)."""
        branches = self.ledger.ordered()
        reward = self.reward if ending.reward is None else ending.reward
        if ending.status in VALID_STATUSES and reward is not None:
            try:
                reward = _known(read_reward(reward), branches)
            except ValueError as error:
                ending = replace(ending, status=AGENT_FAILED, message=str(error))
        if isinstance(reward, Mapping) and ending.status in VALID_STATUSES:
            named = [(branch, _named_reward(reward, branch)) for branch in branches]
            chosen = [(branch, value) for branch, value in named if value is not None]
        else:
            chosen = [(branch, None if isinstance(reward, Mapping) else reward) for branch in branches]
        return [self._outcome(*pair, ending) for pair in chosen] or [self._outcome(None, None, ending)]

    def _outcome(self, branch: Branch | None, reward: float | None, ending: Ending) -> RolloutOutcome:
        status, message = ending.status, ending.message
        if status in VALID_STATUSES and (branch is None or reward is None):
            status = AGENT_FAILED
            message = "the agent asked for nothing" if branch is None else "nobody reported a reward"
        # What an agent is rewarded with is known at its last turn.
        turns = branch.turns() if branch else ()
        rewards = [0.0 for _ in turns]
        if rewards and status in VALID_STATUSES:
            rewards[-1] = reward or 0.0
        return outcome_of(
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
            last_turn_cut=bool(branch and branch.marks and not branch.marks[-1].ended),
            out_of_turns=status == "max_turns" and self.ledger.is_out_of_turns(ending.task),
            turn_rewards=rewards,
            turn_states=branch.states() if branch else (),
            opening=branch.opening() if branch else (),
        )

    async def _sample(self, turn: OpenTurn) -> None:
        while not self.ledger.add(turn, await self._llm.generate(turn.request())):
            pass


class Sessions:
    """Keeps the sessions of one endpoint."""

    def __init__(self, chat: TemplateChat, limits: Limits) -> None:
        self.chat = chat
        self._limits = limits
        self._open: dict[str, Session] = {}

    def open(self, llm: TokenSource, *, slot: int, seed: int | None = None, max_turns: int = 0) -> Session:
        """Open a session whose tokens come from ``llm``, for at most ``max_turns`` turns where that is not 0. Raises
        RuntimeError when there are too many."""
        if len(self._open) >= MAX_SESSIONS:
            raise RuntimeError(f"the endpoint has {MAX_SESSIONS} sessions; close some")
        limits = replace(self._limits, max_turns=min(self._limits.max_turns, max_turns or self._limits.max_turns))
        ledger = TokenLedger(self.chat, limits, slot=slot, seed=seed)
        session = Session(secrets.token_urlsafe(24), ledger, llm)
        self._open[session.key] = session
        return session

    def find(self, key: str) -> Session:
        """Return the session with this id. Raises ApiError for an id that was never given out or whose session is
        closed."""
        session = self._open.get(key)
        if session is None:
            raise ApiError(404, "no_such_session", "there is no such session")
        return session

    def close(self, session: Session) -> None:
        """Forget a session; harmless when repeated."""
        if self._open.pop(session.key, None) is not None and not session.ended.is_set():
            session.end()


def read_reward(found: object) -> Reward:
    """Return a reward with plain numbers. Raises ValueError that says why ``found`` is none."""
    if isinstance(found, Mapping):
        if not found:
            raise ValueError("the map of rewards is empty")
        return {reply: _number(value) for reply, value in found.items()}
    return _number(found)


def _number(value: object) -> float:
    number = finite_number(value)
    if number is None and isinstance(value, int):
        raise ValueError("an integer that is not a reward: it is too large")
    if number is None:
        raise ValueError(f"{str(value)[:100]!r} is not a reward, which is a finite number")
    return number


def _known(reward: Reward, branches: Sequence[Branch]) -> Reward:
    """The reward. Raises ValueError where it names a completion that there was none."""
    known = {mark.reply for branch in branches for mark in branch.marks}
    for reply in reward if isinstance(reward, Mapping) else ():
        if reply not in known:
            raise ValueError(f"{str(reply)[:100]!r} is the id of no completion of this session")
    return reward


def _named_reward(rewards: Mapping[str, float], branch: Branch) -> float | None:
    return next((rewards[mark.reply] for mark in reversed(branch.marks) if mark.reply in rewards), None)


def _gone(message: str) -> ApiError:
    return ApiError(409, "session_over", message)
