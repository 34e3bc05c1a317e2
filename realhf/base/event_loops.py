"""Event loops whose timers use this process's clock (``process_clock``).

Timeouts of ``asyncio.timeout``, of HTTP and WebSocket clients and of servers are thus extended by
the time for which this process was suspended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from realhf.base import process_clock

T = TypeVar("T")
NEW_EVENT_LOOP = f"{__name__}:new_event_loop"
"""Import path of ``new_event_loop``, for ``uvicorn.Config(loop=...)``."""
_RESOLUTION_S = 0.001
"""Resolution of uvloop's timers, in seconds."""


def wait_for_future(future: concurrent.futures.Future[T], seconds: float) -> T:
    """Wait for a future and return its result. Raises TimeoutError if that takes longer than
    ``seconds``."""
    process_clock.wait(lambda left: concurrent.futures.wait((future,), left).done, seconds)
    return future.result(0)


class ClockedLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop that uses this process's clock."""

    def time(self) -> float:
        """Return the current time of the loop's timers, in seconds."""
        return process_clock.now()


class _Timer:
    """A uvloop timer that checks this process's clock before it fires, and waits again if it is too
    early.

    Has the interface of ``asyncio.TimerHandle``.
    """

    def __init__(
        self,
        later: Callable[..., Any],
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self._later = later
        self._when = when
        self._call = (callback, args)
        self._context = context
        self._cancelled = False
        self._start()

    def _start(self) -> None:
        self._handle = self._later(
            max(0.0, self._when - process_clock.now()), self._fire, context=self._context
        )

    def _fire(self) -> None:
        if self._when - process_clock.now() > _RESOLUTION_S:
            self._start()
            return
        callback, args = self._call
        callback(*args)

    def cancel(self) -> None:
        """Cancel the timer."""
        self._cancelled = True
        self._handle.cancel()

    def cancelled(self) -> bool:
        """Return whether the timer was cancelled."""
        return self._cancelled

    def when(self) -> float:
        """Return the time at which the timer fires (``process_clock.now``)."""
        return self._when


@functools.cache
def _uvloop() -> type[asyncio.AbstractEventLoop]:
    """Return a uvloop class that uses this process's clock. The first call imports uvloop."""
    import uvloop

    class Loop(uvloop.Loop):
        """A uvloop event loop that uses this process's clock."""

        def time(self) -> float:
            """Return the current time of the loop's timers, in seconds."""
            return process_clock.now()

        def call_later(
            self,
            delay: float,
            callback: Callable[..., object],
            *args: Any,
            context: contextvars.Context | None = None,
        ) -> Any:
            """Schedule a callback after ``delay`` seconds."""
            return self.call_at(process_clock.now() + delay, callback, *args, context=context)

        def call_at(
            self,
            when: float,
            callback: Callable[..., object],
            *args: Any,
            context: contextvars.Context | None = None,
        ) -> Any:
            """Schedule a callback at the time ``when``."""
            if context is None:
                context = contextvars.copy_context()
            return _Timer(super().call_later, when, callback, args, context)

    return Loop


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create an event loop for a server, which uses this process's clock.

    It is a uvloop, or an asyncio loop on Windows, which uvloop does not support.
    """
    return ClockedLoop() if sys.platform == "win32" else _uvloop()()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like ``asyncio.run``, but on a loop that uses this process's clock."""
    with asyncio.Runner(loop_factory=ClockedLoop) as runner:
        return runner.run(coroutine)
