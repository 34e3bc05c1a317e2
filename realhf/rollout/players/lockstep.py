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
from realhf.rollout.episode.rollout_state import Job, Limits, RolloutState


@dataclass
class Seat:
    """Holds a session and the episode it plays; ``client`` is None when it could not be reopened."""

    index: int
    client: OpenEnvClient | None
    rollout: RolloutState | None = None
    resetting: bool = False


class LockstepPlay:
    """Plays requests over the sessions. ``reopen`` gives a client a new session (raises ConnectionError).

    The coroutines run on the loop that owns the sockets; ``requests`` and ``take_outputs`` are plain calls for the
    thread that generates. ``outcomes[i]`` belongs to the i-th request.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        jobs: Sequence[Job],
        chat: ChatFormat,
        limits: Limits,
        *,
        retry: bool,
        reopen: Callable[[OpenEnvClient], Awaitable[None]],
    ) -> None:
        self.outcomes: list[RolloutOutcome | None] = [None] * len(jobs)
        self.env_steps = 0
        self._seats = seats
        self._waiting = deque(jobs)
        self._chat = chat
        self._limits = limits
        self._retry = retry
        self._reopen = reopen
        self._freed: list[int] = []

    def requests(self) -> list[GenRequest]:
        """Return the next batch, in the order of the sessions; empty when all requests have an outcome."""
        return [seat.rollout.request(seat.index) for seat in self._seats if seat.rollout]

    def take_outputs(self, outputs: Sequence[GenOutput]) -> None:
        """Take sampled turns, in the order of ``requests``."""
        live = [seat.rollout for seat in self._seats if seat.rollout]
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
        for seat in self._seats:
            await self._next_job(seat)
        await self._finish_resets()

    async def advance(self) -> None:
        """Run the commands of this round, and the resets of the episodes that come next."""
        stepping = []
        for seat in self._seats:
            rollout = seat.rollout
            if rollout is None:
                continue
            if rollout.command is not None and seat.client is not None:
                try:
                    await seat.client.send_step(rollout.command)
                except FAILURES as error:
                    await self._failed(seat, error)
                else:
                    stepping.append(seat)
            elif rollout.status:
                await self._ended(seat)
        for seat in stepping:
            await self._finish_step(seat)
        await self._finish_resets()

    async def _finish_step(self, seat: Seat) -> None:
        assert seat.client is not None and seat.rollout is not None
        try:
            result = await seat.client.receive()
        except FAILURES as error:
            if not (isinstance(error, EnvError) and error.code == "VALIDATION_ERROR"):
                await self._failed(seat, error)
                return
            seat.rollout.take_rejection(str(error))
        else:
            self.env_steps += 1
            seat.rollout.take_reply(result)
        if seat.rollout.status:
            await self._ended(seat)

    async def _finish_resets(self) -> None:
        while resetting := [seat for seat in self._seats if seat.resetting]:
            for seat in resetting:
                seat.resetting = False
                assert seat.client is not None and seat.rollout is not None
                try:
                    result = await seat.client.receive()
                except FAILURES as error:
                    await self._failed(seat, error)
                else:
                    seat.rollout.start(result)
        if self._waiting and not any(seat.rollout for seat in self._seats):
            while self._waiting:
                rollout = RolloutState(self._waiting.popleft(), self._chat, self._limits)
                rollout.fail("connection_lost", "no session could be reopened")
                self.outcomes[rollout.job.index] = rollout.outcome()

    async def _ended(self, seat: Seat) -> None:
        assert seat.rollout is not None
        self.outcomes[seat.rollout.job.index] = seat.rollout.outcome()
        self._vacate(seat)
        await self._next_job(seat)

    async def _next_job(self, seat: Seat) -> None:
        """Send the reset of the next waiting request; a dead session stays empty."""
        while self._waiting and seat.rollout is None and seat.client is not None:
            job = self._waiting.popleft()
            seat.rollout = RolloutState(job, self._chat, self._limits)
            try:
                await seat.client.send_reset({**job.reset, "seed": job.seed})
                seat.resetting = True
            except FAILURES as error:
                await self._failed(seat, error)

    async def _failed(self, seat: Seat, error: Exception) -> None:
        """Handle a failed environment: record it, or play the same instance once more on a new connection."""
        assert seat.client is not None and seat.rollout is not None
        job, rollout = seat.rollout.job, seat.rollout
        self._vacate(seat)
        if self._retry and job.attempt == 0:
            self._waiting.appendleft(replace(job, attempt=1))
        else:
            rollout.fail(failure_status(error), str(error))
            self.outcomes[job.index] = rollout.outcome()
        try:
            await self._reopen(seat.client)
        except ConnectionError:
            seat.client = None
        await self._next_job(seat)

    def _vacate(self, seat: Seat) -> None:
        seat.rollout = None
        seat.resetting = False
        self._freed.append(seat.index)
