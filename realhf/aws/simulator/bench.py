"""Keeps one more slot beside those that are leased, for what no agent is to see: the environment's own plays."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from realhf.aws.cli.executor import SimulatorLost
from realhf.aws.simulator.slot import START_TIMEOUT_S, Slot

KEPT = 256
"""Results that are kept, the latest asked for."""


class Bench:
    """Plays on ``slot``, which is started when first needed, on a thread of its own, one play after the other. A play
    over which its simulator is lost is played once more. Thread-safe."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._started = False
        self._lock = threading.Lock()
        self._results: OrderedDict[str, Future[Any]] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None
        self._ended = 0

    def begin(self, key: str, play: Callable[[Slot], Any]) -> Future[Any]:
        """Return what ``play`` will have found for ``key``. It is played once for all who ask, unless it failed."""
        with self._lock:
            known = self._results.get(key)
            if known is not None and not (known.done() and (known.cancelled() or known.exception() is not None)):
                self._results.move_to_end(key)
                return known
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "bench")
            found = self._results[key] = self._thread.submit(self._played, play)
            while len(self._results) > KEPT:
                self._results.popitem(last=False)
            return found

    def result(self, found: Future[Any], patience_s: float) -> Any:
        """Return what was found once it is there. Raises what the play raised, and TimeoutError when no play has come
        to its end for ``patience_s`` seconds: however many are ahead of it, the queue must move."""
        while True:
            ended = self._ended
            try:
                return found.result(patience_s)
            except TimeoutError:
                if found.done() or ended == self._ended:
                    raise

    def _played(self, play: Callable[[Slot], Any]) -> Any:
        try:
            return self._play(play)
        finally:
            self._ended += 1  # by one thread only

    def _play(self, play: Callable[[Slot], Any]) -> Any:
        self._start()
        try:
            return play(self._slot)
        except Exception:
            if self._thread is None or self._slot.ministack.alive():
                raise
        self._slot.respawn()  # it was lost over the play, and many sessions may wait for it
        return play(self._slot)

    def _start(self) -> None:
        if self._started:
            return
        try:
            self._slot.ministack.start()
            self._slot.ministack.wait_healthy(START_TIMEOUT_S)
        except (OSError, RuntimeError) as error:
            self._slot.ministack.stop()
            raise SimulatorLost(f"the slot for the environment's own plays: {error}") from error
        self._started = True

    def stop(self) -> None:
        """End the play under way and the slot. Idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._results.clear()
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)
        self._slot.stop()
        if thread is not None:
            thread.shutdown()
            self._slot.stop()  # the play may have begun a new simulator meanwhile
