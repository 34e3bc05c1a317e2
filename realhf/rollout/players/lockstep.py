"""Plays in lockstep: one batched generation per round, then all environment steps at once.

Every session has an index, which is also the key-value cache slot of its episode. In a round all commands are sent
before any reply is read, and replies are read in the order of the sessions, so the sequence of batches depends on the
policy's outputs only, never on the timing of the network. When an episode ends, the next waiting one takes its session
at once: its reset runs while later sessions still step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from realhf.api.env import ChatFormat, RolloutOutcome
from realhf.api.model import GenOutput, GenRequest
from realhf.rollout.client.env_client import EnvError, OpenEnvClient
from realhf.rollout.client.failures import FAILURES, failure_status
from realhf.rollout.episode.rollout_state import Limits, RolloutRequest, RolloutState


@dataclass
class SessionState:
    """Holds a session and the episode it plays; ``client`` is None when it could not be reopened."""

    index: int
    client: OpenEnvClient | None
    rollout: RolloutState | None = None
    resetting: bool = False


class LockstepPlay:
    """Plays rollout requests over the sessions. ``reopen`` gives a client a new session (raises ConnectionError).

    The coroutines run on the loop that owns the sockets; ``requests`` and ``take_outputs`` are plain calls for the
    thread that generates. ``outcomes[i]`` belongs to the rollout request with ``index`` i.
    """

    def __init__(
        self,
        sessions: Sequence[SessionState],
        wanted: Sequence[RolloutRequest],
        chat: ChatFormat,
        limits: Limits,
        *,
        retry: bool,
        reopen: Callable[[OpenEnvClient], Awaitable[None]],
    ) -> None:
        self.outcomes: list[RolloutOutcome | None] = [None] * len(wanted)
        self.env_steps = 0
        self._sessions = sessions
        self._waiting = deque(wanted)
        self._chat = chat
        self._limits = limits
        self._retry = retry
        self._reopen = reopen
        self._freed: list[int] = []

    def requests(self) -> list[GenRequest]:
        """Return the next batch, in the order of the sessions; empty when every rollout has an outcome."""
        return [session.rollout.request(session.index) for session in self._sessions if session.rollout]

    def take_outputs(self, outputs: Sequence[GenOutput]) -> None:
        """Take sampled turns, in the order of ``requests``."""
        live = [session.rollout for session in self._sessions if session.rollout]
        if len(outputs) != len(live):
            raise ValueError(f"the policy returned {len(outputs)} outputs for {len(live)} requests")
        for rollout, output in zip(live, outputs, strict=True):
            rollout.take_turn(output)

    def take_freed(self) -> list[int]:
        """Return the cache slots whose episode ended since the last call."""
        freed, self._freed = self._freed, []
        return freed

    async def fill(self) -> None:
        """Reset the first episodes onto the sessions."""
        for session in self._sessions:
            await self._next_rollout(session)
        await self._finish_resets()

    async def advance(self) -> None:
        """Run the commands of this round, and the resets of the episodes that come next."""
        stepping = []
        for session in self._sessions:
            rollout = session.rollout
            if rollout is None:
                continue
            if rollout.command is not None and session.client is not None:
                try:
                    await session.client.send_step(rollout.command)
                except FAILURES as error:
                    await self._failed(session, error)
                else:
                    stepping.append(session)
            elif rollout.status:
                await self._ended(session)
        for session in stepping:
            await self._finish_step(session)
        await self._finish_resets()

    async def _finish_step(self, session: SessionState) -> None:
        assert session.client is not None and session.rollout is not None
        try:
            result = await session.client.receive()
        except FAILURES as error:
            if not (isinstance(error, EnvError) and error.code == "VALIDATION_ERROR"):
                await self._failed(session, error)
                return
            session.rollout.take_rejection(str(error))
        else:
            self.env_steps += 1
            session.rollout.take_reply(result)
        if session.rollout.status:
            await self._ended(session)

    async def _finish_resets(self) -> None:
        while resetting := [session for session in self._sessions if session.resetting]:
            for session in resetting:
                session.resetting = False
                assert session.client is not None and session.rollout is not None
                try:
                    result = await session.client.receive()
                except FAILURES as error:
                    await self._failed(session, error)
                else:
                    session.rollout.start(result)
        if self._waiting and not any(session.rollout for session in self._sessions):
            while self._waiting:
                rollout = RolloutState(self._waiting.popleft(), self._chat, self._limits)
                rollout.fail("connection_lost", "no session could be reopened")
                self.outcomes[rollout.wanted.index] = rollout.outcome()

    async def _ended(self, session: SessionState) -> None:
        assert session.rollout is not None
        self.outcomes[session.rollout.wanted.index] = session.rollout.outcome()
        self._vacate(session)
        await self._next_rollout(session)

    async def _next_rollout(self, session: SessionState) -> None:
        """Send the reset of the next waiting rollout; a dead session stays empty."""
        while self._waiting and session.rollout is None and session.client is not None:
            wanted = self._waiting.popleft()
            session.rollout = RolloutState(wanted, self._chat, self._limits)
            try:
                await session.client.send_reset({**wanted.reset, "seed": wanted.seed})
                session.resetting = True
            except FAILURES as error:
                await self._failed(session, error)

    async def _failed(self, session: SessionState, error: Exception) -> None:
        """Handle a failed environment: record it, or play the same instance once more on a new connection."""
        assert session.client is not None and session.rollout is not None
        wanted, rollout = session.rollout.wanted, session.rollout
        self._vacate(session)
        if self._retry and wanted.attempt == 0:
            self._waiting.appendleft(replace(wanted, attempt=1))
        else:
            rollout.fail(failure_status(error), str(error))
            self.outcomes[wanted.index] = rollout.outcome()
        try:
            await self._reopen(session.client)
        except ConnectionError:
            session.client = None
        await self._next_rollout(session)

    def _vacate(self, session: SessionState) -> None:
        session.rollout = None
        session.resetting = False
        self._freed.append(session.index)
