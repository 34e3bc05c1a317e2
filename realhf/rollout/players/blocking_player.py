"""Plays episodes for a thread that generates: the episodes live on an event loop of their own thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from realhf.base.loop_thread import LoopThread
from realhf.rollout.episode.request import EpisodeRequest
from realhf.rollout.players.batched_tokens import BatchedTokens, BatchEngine
from realhf.rollout.players.player import Played, Player

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
        self._finalizer = weakref.finalize(self, _shut_down, self._thread, player, 2.0) if thread is None else None

    def play(self, wanted: Sequence[EpisodeRequest], engine: BatchEngine, *, lockstep: bool = True) -> Played:
        """Play all requests. An error of the engine ends all episodes and is raised."""
        self._thread.check_caller()
        with self._alone():
            tokens = BatchedTokens(self.player.slots, lockstep=lockstep)
            running = asyncio.run_coroutine_threadsafe(self._run(wanted, tokens), self._thread.loop)
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

    async def _run(self, wanted: Sequence[EpisodeRequest], tokens: BatchedTokens) -> Played:
        try:
            return await self.player.play(wanted, tokens, tokens)
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
        _shut_down(self._thread, self.player, timeout_s)


async def _settled() -> None:
    """Let cancelled tasks of the loop end."""
    await asyncio.sleep(0.05)


def _shut_down(thread: LoopThread, player: Player, timeout_s: float) -> None:
    """Close environments and thread within the time; does nothing in a forked child. The caller may be close(), the
    garbage collector or the interpreter's end."""
    if thread.alive and not thread.is_current():
        with suppress(TimeoutError, RuntimeError):
            asyncio.run_coroutine_threadsafe(player.close(), thread.loop).result(timeout_s)
    thread.stop(timeout_s)
