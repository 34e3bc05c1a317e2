"""Plays independently: every session plays its episodes at its own pace and waits for nobody but the policy.

A slow environment then holds up only its own episode. The caller's thread generates, one batch at a time, for whoever
waits when it gets to it: which episodes share a batch depends on timing, unlike in lockstep play. Source:
docs/reference/environment.md 9.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from realhf.api.env import ChatFormat, RolloutOutcome
from realhf.api.model import GenOutput, GenRequest
from realhf.rollout.client.env_client import EnvError, OpenEnvClient
from realhf.rollout.client.failures import FAILURES, failure_status
from realhf.rollout.episode.rollout_state import Limits, RolloutRequest, RolloutState


@dataclass(frozen=True)
class Waiting:
    """An episode that waits for a turn; the answer goes into ``turn`` on its loop."""

    request: GenRequest
    turn: asyncio.Future[GenOutput]

    def answer(self, output: GenOutput) -> None:
        """Take the sampled turn; call it on the loop. For a cancelled episode nobody waits any more."""
        if not self.turn.done():
            self.turn.set_result(output)


class IndependentPlay:
    """Plays rollout requests over sessions. ``run`` is the coroutine for the loop that owns the sockets; ``inbox`` is
    what the generating thread serves: ``Waiting``, an ``int`` (a cache slot whose episode is over), None (all is over).
    """

    def __init__(
        self,
        clients: Sequence[OpenEnvClient],
        wanted: Sequence[RolloutRequest],
        chat: ChatFormat,
        limits: Limits,
        *,
        retry: bool,
        reopen: Callable[[OpenEnvClient], Awaitable[None]],
    ) -> None:
        self.inbox: queue.SimpleQueue[Waiting | int | None] = queue.SimpleQueue()
        self.outcomes: list[RolloutOutcome | None] = [None] * len(wanted)
        self.env_steps = 0
        self._clients = clients
        self._waiting = deque(wanted)
        self._chat = chat
        self._limits = limits
        self._retry = retry
        self._reopen = reopen

    async def run(self) -> None:
        """Play everything. An error that is not an environment's failure ends all episodes and is raised."""
        players = [asyncio.ensure_future(self._play_all(slot, client)) for slot, client in enumerate(self._clients)]
        try:
            await asyncio.gather(*players)
        finally:
            for player in players:
                player.cancel()
            await asyncio.gather(*players, return_exceptions=True)
            self._settle_rest()
            self.inbox.put(None)

    def wait_until_over(self, timeout_s: float) -> None:
        """Wait, after a cancellation, until nobody uses the sessions or the time is up."""
        deadline = time.monotonic() + timeout_s
        with suppress(queue.Empty):
            while self.inbox.get(timeout=max(0.01, deadline - time.monotonic())) is not None:
                pass

    async def _play_all(self, slot: int, client: OpenEnvClient) -> None:
        while self._waiting and client.usable:
            wanted = self._waiting.popleft()
            rollout = RolloutState(wanted, self._chat, self._limits)
            try:
                await self._play(rollout, slot, client)
                self.outcomes[wanted.index] = rollout.outcome()
            except FAILURES as error:
                await self._failed(rollout, client, error)
            finally:
                self.inbox.put(slot)

    async def _play(self, rollout: RolloutState, slot: int, client: OpenEnvClient) -> None:
        rollout.start(await client.reset(**{**rollout.wanted.reset, "seed": rollout.wanted.seed}))
        while not rollout.status:
            turn: asyncio.Future[GenOutput] = asyncio.get_running_loop().create_future()
            self.inbox.put(Waiting(rollout.request(slot), turn))
            rollout.take_turn(await turn)
            if rollout.command is None:
                continue
            try:
                result = await client.step(rollout.command)
            except EnvError as error:
                if error.code != "VALIDATION_ERROR":
                    raise
                rollout.take_rejection(str(error))
            else:
                self.env_steps += 1
                rollout.take_reply(result)

    async def _failed(self, rollout: RolloutState, client: OpenEnvClient, error: Exception) -> None:
        if self._retry and rollout.wanted.attempt == 0:
            self._waiting.appendleft(replace(rollout.wanted, attempt=1))
        else:
            rollout.fail(failure_status(error), str(error))
            self.outcomes[rollout.wanted.index] = rollout.outcome()
        try:
            await self._reopen(client)
        except ConnectionError:
            return

    def _settle_rest(self) -> None:
        while self._waiting:
            rollout = RolloutState(self._waiting.popleft(), self._chat, self._limits)
            rollout.fail("connection_lost", "no session could be reopened")
            self.outcomes[rollout.wanted.index] = rollout.outcome()


def next_batch(inbox: queue.SimpleQueue[Waiting | int | None]) -> tuple[list[Waiting], list[int], bool]:
    """Take what has arrived, at least one entry: (episodes that wait for a turn, freed cache slots, whether all is
    over). Blocks; every episode carries the deadlines of its environment, so something arrives."""
    entries = [inbox.get()]
    while True:
        try:
            entries.append(inbox.get_nowait())
        except queue.Empty:
            break
    waiting = [entry for entry in entries if isinstance(entry, Waiting)]
    return waiting, [entry for entry in entries if isinstance(entry, int)], None in entries
