"""Watches an event loop and names the line of the environment's code that blocks it.

Every callback of the loop is timed: its processor time exactly, and the time that it sleeps by a thread that samples
the stack. What one sample adds is bounded, so a process that the kernel did not run for a while is not blamed.
Collecting garbage is not counted. The line is where most samples were. A call that held the interpreter leaves no
sample; it is placed where its coroutine stands afterwards, or by the name of its task, where ``Caller`` puts the place
of the method.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

from realhf.env.check.user_code import UserCode

BLOCKED_S = 0.05
CALL = "environment: "
"""Tasks that call the environment have this before the place in their name."""
_SAMPLE_S = 0.01
_MOST_PER_SAMPLE_S = 0.025
_LEAST_SAMPLES = 3
"""A callback that slept was seen so often at least; where samples are fewer, the machine had no time for it."""


class Block(NamedTuple):
    """Says that one callback kept the loop for ``seconds``, seen at ``where``."""

    where: str
    seconds: float


class LoopWatchdog:
    """Watches the event loop of the thread that makes it, between ``start`` and ``stop``."""

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="check-watchdog", daemon=True)
        self._ended = threading.Event()
        self._found: list[Block] = []
        self._callback = 0
        """Counts callbacks; negative while none runs."""
        self._slept_s = 0.0
        self._places: Counter[str] = Counter()
        self._collecting_s = 0.0
        self._collection_began = 0.0
        self._run = asyncio.Handle._run

    def start(self) -> None:
        """Begin to watch."""
        gc.callbacks.append(self._on_collection)
        asyncio.Handle._run = lambda handle: self._timed(handle)  # type: ignore[method-assign]
        self._thread.start()

    def stop(self) -> None:
        """End watching."""
        asyncio.Handle._run = self._run  # type: ignore[method-assign]
        gc.callbacks.remove(self._on_collection)
        self._ended.set()
        self._thread.join(1.0)

    def take(self) -> list[Block]:
        """Return the blocks since the last call. Call it on the loop."""
        found, self._found = self._found, []
        return found

    def _timed(self, handle: Any) -> None:
        callback = getattr(handle, "_callback", None)
        self._slept_s, self._collecting_s = 0.0, 0.0
        if self._places:
            self._places = Counter()
        number = self._callback = abs(self._callback) + 1
        began = time.thread_time()
        try:
            self._run(handle)
        finally:
            busy_s = time.thread_time() - began
            self._callback = -number
            seconds = max(busy_s, self._slept_s) - self._collecting_s
            if seconds >= BLOCKED_S and (where := self._place(callback, busy_s)):
                self._found.append(Block(where, seconds))

    def _place(self, callback: Any, busy_s: float) -> str:
        """Where the callback was; "" if it was not in the environment's code, or only waited for a processor."""
        busy = busy_s - self._collecting_s >= BLOCKED_S
        if self._places:
            return self._places.most_common(1)[0][0] if busy or self._places.total() >= _LEAST_SAMPLES else ""
        if not busy:
            return ""
        task = getattr(callback, "__self__", None)
        if not isinstance(task, asyncio.Task) or not task.get_name().startswith(CALL):
            return ""
        stands = "" if task.done() else self._code.of_suspended(task)
        return stands or task.get_name().removeprefix(CALL)

    def _watch(self) -> None:
        last, before = time.monotonic(), 0
        while not self._ended.wait(_SAMPLE_S):
            now, number = time.monotonic(), self._callback
            frame = sys._current_frames().get(self._loop_thread)
            place = self._code.of_frame(frame, LoopWatchdog._timed.__code__) if number > 0 else ""
            del frame
            if number > 0 and number == self._callback:
                if number == before:
                    self._slept_s += min(now - last, _MOST_PER_SAMPLE_S)
                if place:
                    self._places[place] += 1
            last, before = now, number

    def _on_collection(self, phase: str, _: dict[str, Any]) -> None:
        if threading.get_ident() == self._loop_thread:
            if phase == "start":
                self._collection_began = time.thread_time()
            else:
                self._collecting_s += time.thread_time() - self._collection_began
