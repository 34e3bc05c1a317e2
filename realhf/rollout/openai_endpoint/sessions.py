"""Keeps the sessions of black-box agents: who may ask for tokens, what was said, and how it ended.

The id of a session is a capability: whoever knows it speaks for that session, and nobody can guess it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from realhf.api.chat import TemplateChat
from realhf.api.env import AGENT_FAILED, VALID_STATUSES, RolloutOutcome
from realhf.api.environment import Task, finite_number
from realhf.api.generation import GenerationFailed, TokenSource
from realhf.rollout.episode.token_buffer import TokenBuffer
from realhf.rollout.openai_endpoint.chat_request import ApiError
from realhf.rollout.openai_endpoint.messages import NO_TOOLS, Message, Tools
from realhf.rollout.openai_endpoint.token_ledger import Branch, OpenTurn, TokenLedger

MAX_SESSIONS = 4096
MAX_AT_ONCE = 16

Reward = float | Mapping[str, float]
"""The reward of all trajectories of a session; or of each, named by the id of a completion in it. Of several
completions of one trajectory the latest counts; a trajectory that no id names is left out."""


@dataclass(frozen=True)
class SessionLimits:
    """Bounds a session. ``max_total_tokens``: prompt and completion of a trajectory. ``turn_tokens``: the engine's
    max_new_tokens. ``max_turns``: policy turns of a session."""

    max_total_tokens: int
    turn_tokens: int
    max_turns: int = 64


@dataclass(frozen=True)
class Ending:
    """Says how an episode ended, for its trajectories. ``status``: see ``realhf.api.env``; ``reward`` None: what was
    reported to the session."""

    status: str
    reward: Reward | None = None
    achieved: bool = False
    progress: float = 0.0
    message: str = ""
    task: Task = field(default_factory=lambda: Task(""))
    task_text: str = ""


class Session:
    """Holds one agent's conversations. Use it on one event loop. ``reward`` is the reported one, once there is one;
    ``engine_error`` the last failure of the engine."""

    def __init__(self, key: str, ledger: TokenLedger, llm: TokenSource) -> None:
        self.key = key
        self.ledger = ledger
        self.reward: Reward | None = None
        self.engine_error: GenerationFailed | None = None
        self.ended = asyncio.Event()
        self._llm = llm
        self._running: set[asyncio.Task[None]] = set()

    async def sample(self, messages: Sequence[Message], tools: Tools = NO_TOOLS) -> OpenTurn:
        """Sample the policy's next turn; the caller must keep or discard it (``ledger``). Raises ApiError."""
        if self.ended.is_set():
            raise _gone("this session is over")
        if len(self._running) >= MAX_AT_ONCE:
            raise ApiError(429, "too_many_requests", f"this session has {MAX_AT_ONCE} requests under way")
        turn = self.ledger.begin(messages, tools)
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
        return turn

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
        valid, tokens, task = status in VALID_STATUSES, branch.tokens if branch else None, ending.task
        if tokens is not None:
            tokens.check()
        return RolloutOutcome(
            status=status,
            prompt_ids=tokens.prompt_ids if tokens else [],
            completion_ids=tokens.completion_ids if tokens else [],
            logprobs=tokens.logprobs if tokens else [],
            versions=tokens.versions if tokens else [],
            loss_mask=tokens.loss_mask if tokens else [],
            reward=reward if valid else None,
            achieved=ending.achieved and valid,
            progress=ending.progress,
            turns=branch.turns() if branch else (),
            task_id=task.id,
            group=task.group,
            seed=task.seed,
            template=task.template,
            task_text=ending.task_text,
            message=message,
            timings={"branches": float(len(self.ledger.branches))},
            last_turn_cut=bool(branch and branch.marks and not branch.marks[-1].ended),
            turn_starts=tokens.turn_starts if tokens else (),
            turn_rewards=_at_last(reward if valid else None, tokens),
            opening=branch.opening() if branch else (),
        )

    async def _sample(self, turn: OpenTurn) -> None:
        while not self.ledger.add(turn, await self._llm.generate(turn.request())):
            pass


class Sessions:
    """Keeps the sessions of one endpoint."""

    def __init__(self, chat: TemplateChat, limits: SessionLimits) -> None:
        self.chat = chat
        self._limits = limits
        self._open: dict[str, Session] = {}

    def open(self, llm: TokenSource, *, slot: int, seed: int | None = None) -> Session:
        """Open a session whose tokens come from ``llm``. Raises RuntimeError when there are too many."""
        if len(self._open) >= MAX_SESSIONS:
            raise RuntimeError(f"the endpoint has {MAX_SESSIONS} sessions; close some")
        limits = self._limits
        ledger = TokenLedger(
            self.chat,
            slot=slot,
            seed=seed,
            max_total_tokens=limits.max_total_tokens,
            turn_tokens=limits.turn_tokens,
            max_turns=limits.max_turns,
        )
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


def _at_last(reward: float | None, tokens: TokenBuffer | None) -> list[float]:
    """The rewards of a trajectory's turns: an agent's is known at the end."""
    turns = len(tokens.turn_starts) if tokens else 0
    return [0.0] * (turns - 1) + [reward or 0.0] if turns else []


def _gone(message: str) -> ApiError:
    return ApiError(409, "session_over", message)
