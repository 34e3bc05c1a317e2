"""Keeps the sessions of black-box agents: who may ask for tokens, what was said, and how it ended.

The id of a session is a capability: whoever knows it speaks for that session, and nobody can guess it.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realhf.api.chat import TemplateChat
from realhf.api.env import VALID_STATUSES, RolloutOutcome
from realhf.api.generation import GenerationFailed, TokenSource
from realhf.rollout.openai_endpoint.chat_request import ApiError, Message
from realhf.rollout.openai_endpoint.token_ledger import Branch, OpenTurn, TokenLedger

MAX_SESSIONS = 4096
MAX_AT_ONCE = 16


@dataclass(frozen=True)
class SessionLimits:
    """Bounds a session. ``max_total_tokens``: prompt and completion of a trajectory. ``turn_tokens``: the engine's
    max_new_tokens. ``max_turns``: policy turns of a session."""

    max_total_tokens: int
    turn_tokens: int
    max_turns: int = 64


@dataclass(frozen=True)
class Ending:
    """Says how an episode ended, for its trajectories. ``status``: see ``realhf.api.env``; ``reward`` None: the one
    that was reported to the session."""

    status: str
    reward: float | None = None
    achieved: bool = False
    progress: float = 0.0
    message: str = ""
    task: Mapping[str, Any] | None = None
    seed: int = 0


class Session:
    """Holds one agent's conversations. Use it on one event loop. ``reward`` is the reported one, once there is one;
    ``engine_error`` the last failure of the engine."""

    def __init__(self, key: str, ledger: TokenLedger, llm: TokenSource) -> None:
        self.key = key
        self.ledger = ledger
        self.reward: float | None = None
        self.engine_error: GenerationFailed | None = None
        self.ended = asyncio.Event()
        self._llm = llm
        self._running: set[asyncio.Task[None]] = set()

    async def sample(self, messages: Sequence[Message]) -> OpenTurn:
        """Sample the policy's next turn; the caller must keep or discard it (``ledger``). Raises ApiError."""
        if self.ended.is_set():
            raise _gone("this session is over")
        if len(self._running) >= MAX_AT_ONCE:
            raise ApiError(429, "too_many_requests", f"this session has {MAX_AT_ONCE} requests under way")
        turn = self.ledger.begin(messages)
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

    def report(self, reward: float) -> None:
        """Take the agent's report of how it went, which ends the session. Raises ApiError for a second report or no
        number."""
        if self.ended.is_set():
            raise _gone("this session is over")
        if not math.isfinite(reward):
            raise ApiError(400, "invalid_reward", "the reward is not a finite number")
        self.reward = reward
        self.end()

    def end(self) -> None:
        """Refuse further requests; those under way are cancelled, and the engine forgets the session."""
        self.ended.set()
        for work in self._running:
            work.cancel()
        self._llm.free(self.ledger.slots)

    def outcomes(self, ending: Ending) -> list[RolloutOutcome]:
        """Return the trajectories of the session, the main one first; there is one without tokens if the agent never
        spoke. All have the same reward."""
        branches = self.ledger.ordered()
        return [self._outcome(branch, ending) for branch in branches] or [self._outcome(None, ending)]

    def _outcome(self, branch: Branch | None, ending: Ending) -> RolloutOutcome:
        status, message = ending.status, ending.message
        reward = self.reward if ending.reward is None else ending.reward
        if status in VALID_STATUSES and (branch is None or reward is None):
            status = "policy_error"
            message = "the agent asked for nothing" if branch is None else "nobody reported a reward"
        valid, tokens, task = status in VALID_STATUSES, branch.tokens if branch else None, ending.task or {}
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
            task_id=int(task.get("task_id", -1)),
            tier=str(task.get("difficulty", "")),
            seed=ending.seed,
            task_text=str(task.get("description", "")),
            message=message,
            timings={"branches": float(len(self.ledger.branches))},
            last_turn_cut=bool(branch and branch.marks and not branch.marks[-1].ended),
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


def _gone(message: str) -> ApiError:
    return ApiError(409, "session_over", message)
