"""Plays episodes for a thread that generates batches.

The episodes live on an event loop of their own thread. What they ask for is collected there and handed to the
generating thread, which calls ``serve`` and gets back when all episodes are over. In *lockstep* a batch is released
when every running episode waits for tokens, in the order of the slots: then the sequence of batches depends only on
what was sampled before, and never on the timing of environments. *Freely*, a batch is whatever waits when the engine is
free.
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
from realhf.rollout.player import Played, Player

_LOOK_S = 5.0
"""Every so many seconds the generating thread looks after the event loop."""


class BatchEngine(Protocol):
    """Samples the turns of a batch."""

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """Continue every request, batched, in order; ``round_index`` counts the batches of a run."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Forget what is cached for these slots: their episodes are over."""
        ...


@dataclass(frozen=True)
class _Waiting:
    request: GenRequest
    answer: asyncio.Future[GenOutput]


class BatchedTokens:
    """Is a ``TokenSource`` and a ``SlotOrder`` on one event loop, for the run of a player over ``slots``."""

    def __init__(self, slots: Iterable[int], *, lockstep: bool) -> None:
        self._lockstep = lockstep
        self._live = set(slots)
        self._asking = set(self._live)
        self._undecided = set(self._live) if lockstep else set[int]()
        self._gates: dict[int, asyncio.Future[None]] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._inbox: queue.SimpleQueue[list[_Waiting] | list[int] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def generate(self, request: GenRequest) -> GenOutput:
        """See ``TokenSource``."""
        self._loop = asyncio.get_running_loop()
        waiting = _Waiting(request, self._loop.create_future())
        if not self._lockstep:
            self._inbox.put([waiting])
            return await waiting.answer
        self._waiting[request.slot] = waiting
        self._asking.discard(request.slot)
        self._decide(request.slot)
        self._release()
        return await waiting.answer

    def free(self, slots: Sequence[int]) -> None:
        """See ``TokenSource``."""
        self._inbox.put([*slots])

    async def may_take(self, slot: int) -> None:
        """See ``SlotOrder``: wait until all lower slots of this round have gone on or taken an episode."""
        while slot in self._undecided and min(self._undecided) != slot:
            gate = self._gates[slot] = asyncio.get_running_loop().create_future()
            await gate
        self._decide(slot)

    def leave(self, slot: int) -> None:
        """See ``SlotOrder``."""
        self._live.discard(slot)
        self._asking.discard(slot)
        self._decide(slot)
        self._release()

    def end(self) -> None:
        """Let ``serve`` return once all that was asked for is answered."""
        self._inbox.put(None)

    def serve(self, engine: BatchEngine, look: Callable[[], None]) -> int:
        """Sample for the episodes until ``end``; returns how many batches there were. Call it on the engine's thread.
        While it waits it calls ``look`` every few seconds. Raises what the engine and ``look`` raise."""
        rounds = 0
        while True:
            batch, freed, over = self._next(look)
            if freed:
                engine.free(freed)
            if batch:
                outputs = engine.generate([waiting.request for waiting in batch], rounds)
                if len(outputs) != len(batch):
                    raise ValueError(f"the policy returned {len(outputs)} outputs for {len(batch)} requests")
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._answer, batch, outputs)
                rounds += 1
            if over:
                return rounds

    def _next(self, look: Callable[[], None]) -> tuple[list[_Waiting], list[int], bool]:
        """Take what has arrived, at least one entry: requests, freed slots, and whether all is over."""
        entries = [self._first(look)]
        while True:
            try:
                entries.append(self._inbox.get_nowait())
            except queue.Empty:
                break
        items = [item for entry in entries if entry for item in entry]
        waiting = [item for item in items if isinstance(item, _Waiting)]
        return waiting, [item for item in items if isinstance(item, int)], None in entries

    def _first(self, look: Callable[[], None]) -> list[_Waiting] | list[int] | None:
        while True:
            try:
                return self._inbox.get(timeout=_LOOK_S)
            except queue.Empty:
                look()

    def _answer(self, batch: Sequence[_Waiting], outputs: Sequence[GenOutput]) -> None:
        if self._lockstep:
            self._asking, self._undecided = set(self._live), set(self._live)
        for waiting, output in zip(batch, outputs, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(output)

    def _decide(self, slot: int) -> None:
        """Note that a slot goes on with its episode, or has taken one, and open the gate of the next."""
        self._undecided.discard(slot)
        if self._undecided and (gate := self._gates.pop(min(self._undecided), None)) and not gate.done():
            gate.set_result(None)

    def _release(self) -> None:
        """Hand the batch over once nobody is left who may still ask in this round."""
        if self._waiting and not self._asking:
            batch = [self._waiting[slot] for slot in sorted(self._waiting)]
            self._waiting.clear()
            self._inbox.put(batch)


_STOP_S = 10.0
_log = logging.getLogger(__name__)


class BlockingPlayer:
    """Runs ``player`` in lockstep or freely, with tokens that the calling thread samples. Close it at the end.
    ``thread`` is the one with the event loop; without it there is one of its own."""

    def __init__(self, player: Player, thread: LoopThread | None = None) -> None:
        self.player = player
        self._thread = thread or LoopThread("episodes", instead="Player")
        self._watch = self._thread.watch()
        self._playing = threading.Lock()
        self._finalizer = weakref.finalize(self, shut_down, self._thread, player, 2.0) if thread is None else None

    def play(
        self,
        wanted: Sequence[EpisodeRequest],
        engine: BatchEngine,
        *,
        lockstep: bool = True,
        over: Callable[[], None] = lambda: None,
    ) -> Played:
        """Play all requests; ``over`` is called on the event loop after each. An error of the engine ends all episodes
        and is raised."""
        self._thread.check_caller()
        with self._alone():
            tokens = BatchedTokens(self.player.slots, lockstep=lockstep)
            running = asyncio.run_coroutine_threadsafe(self._run(wanted, tokens, over), self._thread.loop)
            try:
                tokens.serve(engine, self._look)
                return running.result(_STOP_S)
            except BaseException:
                running.cancel()
                with suppress(BaseException):
                    self._thread.call(_settled(), _STOP_S)
                raise
            finally:
                engine.free([*self.player.slots])

    def _look(self) -> None:
        """Raise RuntimeError when the event loop has ended, or an environment has blocked it for too long."""
        if not self._thread.alive:
            raise RuntimeError("the event loop of the episodes has ended")
        seconds = self._watch.look()
        if seconds > self.player.message_timeout_s:
            raise RuntimeError(
                f"environment {self.player.name}: its code has blocked the event loop of all episodes for "
                f"{seconds:.0f} s ({self._watch.place()}); what may block belongs into a plain method or a thread"
            )
        if seconds:
            _log.warning("the event loop of the episodes is blocked: %s", self._watch.place())

    async def _run(self, wanted: Sequence[EpisodeRequest], tokens: BatchedTokens, over: Callable[[], None]) -> Played:
        try:
            return await self.player.play(wanted, tokens, tokens, over)
        finally:
            tokens.end()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._playing.acquire(blocking=False):
            raise RuntimeError("this player is playing already; one run at a time")
        try:
            yield
        finally:
            self._playing.release()

    def close(self, timeout_s: float = _STOP_S) -> None:
        """Close all environments and stop the thread; harmless when repeated."""
        if self._finalizer is not None:
            self._finalizer.detach()
        shut_down(self._thread, self.player, timeout_s)


async def _settled() -> None:
    """Let cancelled tasks of the loop end."""
    await asyncio.sleep(0.05)
