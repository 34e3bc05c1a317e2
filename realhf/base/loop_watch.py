"""Notices that an event loop is blocked, and says by which line of code."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback


class LoopWatch:
    """Watches a loop that runs on another thread, ``ident``. Call ``look`` from time to time, on one thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        self._loop, self._ident = loop, ident
        self._answered = threading.Event()
        self._answered.set()
        self._asked = time.monotonic()

    def look(self) -> float:
        """Return for how many seconds the loop has answered nothing since it was asked; 0.0 when it has answered.
        Raises RuntimeError when the loop is closed."""
        if not self._answered.is_set():
            return time.monotonic() - self._asked
        self._answered.clear()
        self._asked = time.monotonic()
        self._loop.call_soon_threadsafe(self._answered.set)
        return 0.0

    def place(self) -> str:
        """Return where the thread of the loop is now: the innermost line that is not of a library, if there is one."""
        frame = sys._current_frames().get(self._ident)
        if frame is None:
            return "nowhere: its thread has ended"
        stack = traceback.extract_stack(frame)
        own = [line for line in stack if "/lib/python" not in line.filename and "/site-packages/" not in line.filename]
        line = (own or stack)[-1]
        return f"{line.filename}, line {line.lineno}, in {line.name}"
