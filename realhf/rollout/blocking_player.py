"""Player of episodes for a thread that generates tokens in batches.

The episodes run on an event loop in a separate thread. Their requests are collected there and
passed to the generating thread, which calls ``serve``; that returns when all episodes have
finished.

In *lockstep* mode a batch is released when every running episode waits for tokens, in the order of
the slots. The sequence of batches then depends only on the sampled tokens, not on the timing of
environments. Otherwise a batch contains whatever requests are waiting when the engine becomes free.

``serve``
  produces: sampled turns;
  waits for: requests of the episodes;
  unblocked by: the episodes, their end, or an error that ``check`` raises every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from realhf.api.model import GenOutput, GenRequest
from realhf.base.loop_thread import LoopThread, shut_down
from realhf.rollout.episode import EpisodeRequest
from realhf.rollout.player import EpisodePlayer, PlayedEpisodes

_CHECK_S = 5.0
"""Interval in seconds at which the generating thread checks the event loop."""


class BatchEngine(Protocol):
    """Engine that samples the turns of a batch."""

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """Return the continuation of every request, in order. ``round_index`` is the number of the
        batch within the player's current run, from 0."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Free the cache entries of these slots, whose episodes have finished."""
        ...


@dataclass(frozen=True)
class _PendingRequest:
    """A request for tokens that an episode is waiting for."""

    request: GenRequest
    """The request."""
    answer: asyncio.Future[GenOutput]
    """Future of the episodes' event loop for the engine's output."""


class BatchedTokens:
    """``TokenSource`` and ``SlotOrder`` on one event loop, for one run of a player over ``slots``.

    All methods but ``serve`` must be called in the event loop of the episodes.
    """

    def __init__(self, slots: Iterable[int], *, lockstep: bool) -> None:
        self._lockstep = lockstep
        self._live = set(slots)
        """Slots that may still play episodes."""
        self._may_ask = set(self._live)
        """Live slots that have not requested tokens in this round; the batch waits for them."""
        self._undecided = set(self._live) if lockstep else set[int]()
        """Slots that have neither continued their episode nor started another one in this round."""
        self._gates: dict[int, asyncio.Future[None]] = {}
        """Futures for which slots wait in ``may_take``, by slot."""
        self._pending: dict[int, _PendingRequest] = {}
        """Requests of this round, by slot."""
        self._inbox: queue.SimpleQueue[list[_PendingRequest] | list[int] | None] = (
            queue.SimpleQueue()
        )
        """Messages to the generating thread: lists of requests, lists of slots to free, and None at
        the end."""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def generate(self, request: GenRequest) -> GenOutput:
        """Request the continuation of a turn and wait for it."""
        self._loop = asyncio.get_running_loop()
        pending = _PendingRequest(request, self._loop.create_future())
        if not self._lockstep:
            self._inbox.put([pending])
            return await pending.answer
        self._pending[request.slot] = pending
        self._may_ask.discard(request.slot)
        self._decide(request.slot)
        self._release()
        return await pending.answer

    def free(self, slots: Sequence[int]) -> None:
        """Have the generating thread free the cache entries of these slots."""
        self._inbox.put([*slots])

    async def may_take(self, slot: int) -> None:
        """Wait until all lower slots have continued their episode or started another one in this
        round."""
        while slot in self._undecided and min(self._undecided) != slot:
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._gates[slot] = gate
            await gate
        self._decide(slot)

    def leave(self, slot: int) -> None:
        """Remove a slot that will not play any more episodes."""
        self._live.discard(slot)
        self._may_ask.discard(slot)
        self._decide(slot)
        self._release()

    def end(self) -> None:
        """Make ``serve`` return once all requests are answered."""
        self._inbox.put(None)

    def serve(self, engine: BatchEngine, check: Callable[[], None]) -> int:
        """Sample tokens for the episodes until ``end`` is called; return the number of batches.
        Called on the engine's thread.

        While waiting for requests it calls ``check`` every few seconds. Raises the errors of the
        engine and of ``check``.
        """
        rounds = 0
        while True:
            batch, freed, ended = self._take_inbox(check)
            if freed:
                engine.free(freed)
            if batch:
                outputs = engine.generate([pending.request for pending in batch], rounds)
                if len(outputs) != len(batch):
                    raise ValueError(
                        f"the policy returned {len(outputs)} outputs for {len(batch)} requests"
                    )
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._answer, batch, outputs)
                rounds += 1
            if ended:
                return rounds

    def _take_inbox(
        self, check: Callable[[], None]
    ) -> tuple[list[_PendingRequest], list[int], bool]:
        """Wait for at least one entry; return all requests, all slots to free, and whether ``end``
        was called."""
        entries = [self._take_first(check)]
        while True:
            try:
                entries.append(self._inbox.get_nowait())
            except queue.Empty:
                break
        items = [item for entry in entries if entry for item in entry]
        requests = [item for item in items if isinstance(item, _PendingRequest)]
        return requests, [item for item in items if isinstance(item, int)], None in entries

    def _take_first(self, check: Callable[[], None]) -> list[_PendingRequest] | list[int] | None:
        while True:
            try:
                return self._inbox.get(timeout=_CHECK_S)
            except queue.Empty:
                check()

    def _answer(self, batch: Sequence[_PendingRequest], outputs: Sequence[GenOutput]) -> None:
        if self._lockstep:  # a new round begins
            self._may_ask = set(self._live)
            self._undecided = set(self._live)
        for pending, output in zip(batch, outputs, strict=True):
            if not pending.answer.done():
                pending.answer.set_result(output)

    def _decide(self, slot: int) -> None:
        """Record that a slot has continued its episode or started another one, and let the next
        slot proceed."""
        self._undecided.discard(slot)
        if (
            self._undecided
            and (gate := self._gates.pop(min(self._undecided), None))
            and not gate.done()
        ):
            gate.set_result(None)

    def _release(self) -> None:
        """Pass the batch to the generating thread once no other slot may request tokens in this
        round."""
        if self._pending and not self._may_ask:
            batch = [self._pending[slot] for slot in sorted(self._pending)]
            self._pending.clear()
            self._inbox.put(batch)


_STOP_S = 10.0
"""Seconds that the episodes get to end when the player is closed."""
_log = logging.getLogger(__name__)


class BlockingPlayer:
    """Blocking interface to ``EpisodePlayer``: the calling thread samples the tokens. Close it
    after use.

    ``thread`` runs the event loop of the episodes; by default the player starts its own thread.
    """

    def __init__(self, player: EpisodePlayer, thread: LoopThread | None = None) -> None:
        self.player = player
        self._thread = thread or LoopThread("episodes", instead="EpisodePlayer")
        self._watch = self._thread.watch()
        self._playing = threading.Lock()
        self._finalizer = (
            weakref.finalize(self, shut_down, self._thread, player, 2.0) if thread is None else None
        )

    def play(
        self,
        requests: Sequence[EpisodeRequest],
        engine: BatchEngine,
        *,
        lockstep: bool = True,
        on_finished: Callable[[], None] = lambda: None,
    ) -> PlayedEpisodes:
        """Play all requests, and call ``on_finished`` in the event loop after each of them.

        An error of the engine cancels all episodes and is raised.
        """
        self._thread.check_caller()
        with self._lock_run():
            tokens = BatchedTokens(self.player.slots, lockstep=lockstep)
            running = asyncio.run_coroutine_threadsafe(
                self._run(requests, tokens, on_finished), self._thread.loop
            )
            try:
                tokens.serve(engine, self._check_loop)
                return running.result(_STOP_S)
            except BaseException:
                running.cancel()
                with suppress(BaseException):
                    self._thread.call(_await_cancelled_tasks(), _STOP_S)
                raise
            finally:
                engine.free([*self.player.slots])

    def _check_loop(self) -> None:
        """Raise RuntimeError if the event loop has ended, or an environment has blocked it for too
        long."""
        if not self._thread.alive:
            raise RuntimeError("the event loop of the episodes has ended")
        seconds = self._watch.blocked_s()
        if seconds > self.player.message_timeout_s:
            raise RuntimeError(
                f"environment {self.player.name}: its code has blocked the event loop of all "
                f"episodes for "
                f"{seconds:.0f} s ({self._watch.current_line()}); what may block belongs into a plain "
                f"method or a thread"
            )
        if seconds:
            _log.warning(
                "the event loop of the episodes is blocked: %s", self._watch.current_line()
            )

    async def _run(
        self,
        requests: Sequence[EpisodeRequest],
        tokens: BatchedTokens,
        on_finished: Callable[[], None],
    ) -> PlayedEpisodes:
        try:
            return await self.player.play(requests, tokens, tokens, on_finished)
        finally:
            tokens.end()

    @contextmanager
    def _lock_run(self) -> Iterator[None]:
        if not self._playing.acquire(blocking=False):
            raise RuntimeError("this player is playing already; one run at a time")
        try:
            yield
        finally:
            self._playing.release()

    def close(self, timeout_s: float = _STOP_S) -> None:
        """Close all environments and stop the thread. Idempotent."""
        if self._finalizer is not None:
            self._finalizer.detach()
        shut_down(self._thread, self.player, timeout_s)


async def _await_cancelled_tasks() -> None:
    """Wait for cancelled tasks of the loop to end."""
    await asyncio.sleep(0.05)
