"""Makes event loops whose timers go by the clock of this process (``process_clock``): those of
``asyncio.timeout``, of HTTP and WebSocket clients and of servers. What they wait for gets the
seconds in which this process stood still."""

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
"""For ``uvicorn.Config(loop=...)``."""
_RESOLUTION_S = 0.001
"""The timers of uvloop count milliseconds."""


def result(future: concurrent.futures.Future[T], seconds: float) -> T:
    """Return ``future.result()``. Raises TimeoutError when it takes longer than ``seconds``."""
    process_clock.wait(lambda left: concurrent.futures.wait((future,), left).done, seconds)
    return future.result(0)


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop of asyncio by the clock of this process."""

    def time(self) -> float:
        """Return the time that timers go by."""
        return process_clock.now()


class _Timer:
    """A timer of uvloop that looks at the clock of this process before it rings. Like
    ``asyncio.TimerHandle``."""

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
            max(0.0, self._when - process_clock.now()), self._ring, context=self._context
        )

    def _ring(self) -> None:
        if self._when - process_clock.now() > _RESOLUTION_S:
            self._start()
            return
        callback, args = self._call
        callback(*args)

    def cancel(self) -> None:
        """Let it never ring."""
        self._cancelled = True
        self._handle.cancel()

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self._cancelled

    def when(self) -> float:
        """Return when it rings."""
        return self._when


@functools.cache
def _uvloop() -> type[asyncio.AbstractEventLoop]:
    import uvloop

    class Loop(uvloop.Loop):
        """A uvloop by the clock of this process."""

        def time(self) -> float:
            """Return the time that timers go by."""
            return process_clock.now()

        def call_later(
            self,
            delay: float,
            callback: Callable[..., object],
            *args: Any,
            context: contextvars.Context | None = None,
        ) -> Any:
            """Call back after ``delay`` seconds."""
            return self.call_at(process_clock.now() + delay, callback, *args, context=context)

        def call_at(
            self,
            when: float,
            callback: Callable[..., object],
            *args: Any,
            context: contextvars.Context | None = None,
        ) -> Any:
            """Call back at the time ``when``."""
            if context is None:
                context = contextvars.copy_context()
            return _Timer(super().call_later, when, callback, args, context)

    return Loop


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make the loop that the servers use: a uvloop by the clock of this process; on Windows, which
    uvloop does not support, one of asyncio."""
    return ClockedLoop() if sys.platform == "win32" else _uvloop()()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Do what ``asyncio.run`` does, by the clock of this process."""
    with asyncio.Runner(loop_factory=ClockedLoop) as runner:
        return runner.run(coroutine)
