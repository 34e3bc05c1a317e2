"""Threads with event loops that run coroutines for blocking callers, and detection of blocked event
loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import functools
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from realhf.base import event_loops, process_clock

T = TypeVar("T")
P = ParamSpec("P")
_ROLLBACK_S = 5.0
"""Seconds that an interrupted call waits for its cancelled coroutine to finish its clean-up."""
_CLOSE_S = 5.0
"""Default timeout in seconds for closing a facade's inner object."""
_DRAIN_ROUNDS = 5
"""Maximum number of times that the remaining tasks are cancelled when a loop ends."""
_LOG = logging.getLogger(__name__)


class LoopThread:
    """A thread that runs coroutines on its own event loop.

    name: name of the thread. instead: what coroutines should use instead, for error messages.
    later: whether to start the thread only at the first ``call``.
    """

    def __init__(self, name: str, *, instead: str, later: bool = False) -> None:
        self._instead = instead
        self._name = name
        self.pid = os.getpid()
        self.loop = event_loops.ClockedLoop()
        self._thread = threading.Thread(target=_run_loop, args=(self.loop,), name=name, daemon=True)
        self._lock = threading.Lock()
        if not later:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread.ident is None and not self.loop.is_closed():
                self._thread.start()

    def check_caller(self) -> None:
        """Raise RuntimeError if called in a forked child or in a coroutine."""
        check_blocking_caller(self.pid, self._instead)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine in the thread and wait for its result.

        ``timeout_s`` limits the whole call, in addition to any timeouts in the coroutine. If the
        wait is interrupted, the coroutine is cancelled and has some seconds to clean up.
        """
        ended = threading.Event()

        async def run() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        self._start()
        future = asyncio.run_coroutine_threadsafe(run(), self.loop)
        try:
            return (
                future.result()
                if timeout_s is None
                else event_loops.wait_for_future(future, timeout_s)
            )
        except BaseException:
            future.cancel()
            ended.wait(_ROLLBACK_S)
            raise

    def stop(self, timeout_s: float) -> None:
        """Cancel all running coroutines and join the thread. A thread that has not ended after
        ``timeout_s`` seconds is abandoned with a warning."""
        if os.getpid() != self.pid:
            return
        with self._lock:
            if self._thread.ident is None:
                self.loop.close()
                return
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _LOG.warning(
                "the thread %s did not end within %g s and is abandoned", self._name, timeout_s
            )

    def interrupt(self) -> None:
        """Raise SystemExit in the thread at its next line of Python code, to end code that blocks
        the loop.

        Has no effect on code that waits in a system call or catches the exception.
        """
        if self._thread.is_alive() and self._thread.ident is not None:
            ident = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))

    def is_current(self) -> bool:
        """Return whether the caller runs in this thread, as finalizers may."""
        return threading.current_thread() is self._thread

    def watch(self) -> LoopWatch:
        """Return a detector for a blocked loop."""
        return LoopWatch(self.loop, self._thread.ident or 0)

    @property
    def alive(self) -> bool:
        """Whether coroutines can run in this thread. False after ``stop`` and in a forked child."""
        return self._thread.is_alive() and os.getpid() == self.pid


class Closable(Protocol):
    """Interface of objects with an asynchronous ``close``."""

    async def close(self) -> None:
        """Release all resources. May be called repeatedly."""
        ...


A = TypeVar("A", bound=Closable)


class BlockingFacade(Generic[A]):
    """Base class of blocking facades, through which any thread can call the coroutine methods of
    ``inner``.

    The methods run on ``thread``, which belongs to the facade and starts at the first call.
    Subclasses declare each method, for example ``push = blocking(Inner.push)``.
    """

    def __init__(self, inner: A, name: str) -> None:
        self.inner = inner
        self.thread = LoopThread(name, instead=type(inner).__name__, later=True)
        self._finalizer = weakref.finalize(self, shut_down, self.thread, inner)

    def close(self) -> None:
        """Close ``inner`` and end the thread. May be called repeatedly."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a coroutine method of ``inner`` and return its result.

        Raises RuntimeError after ``close``, if another thread closes the facade during the call,
        and in a forked child.
        """
        check_process(self.thread.pid)
        if not self._finalizer.alive:
            raise RuntimeError(f"this {type(self).__name__} has been closed")
        try:
            return self.thread.call(method(self.inner, *args, **kwargs))
        except concurrent.futures.CancelledError:
            if self._finalizer.alive:
                raise
            raise RuntimeError(f"this {type(self).__name__} was closed by another thread") from None


def creates_inner(
    make: Callable[P, A],
) -> Callable[[Callable[[Any, A], None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator for a facade's constructor that creates the inner object with ``make``.

    The decorated constructor accepts the arguments of ``make``. It passes the created object to the
    original constructor.
    """

    def decorate(init: Callable[[Any, A], None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(make.__init__)
        def opened(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, make(*args, **kwargs))

        return opened

    return decorate


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingFacade[A], P], T]:
    """Return a blocking method for a facade that calls the coroutine method ``method`` of the inner
    object."""

    @functools.wraps(method)
    def call(self: BlockingFacade[A], *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(method, *args, **kwargs)

    return call


def shut_down(thread: LoopThread, inner: Closable, timeout_s: float = _CLOSE_S) -> None:
    """Close ``inner`` and stop the thread within a bounded time. Does nothing in a forked child.

    Called by ``close``, by the garbage collector, or when the interpreter exits.
    """
    if thread.alive and not thread.is_current():
        with suppress(TimeoutError, RuntimeError):
            event_loops.wait_for_future(
                asyncio.run_coroutine_threadsafe(inner.close(), thread.loop), timeout_s
            )
    thread.stop(timeout_s)


def check_blocking_caller(pid: int, instead: str) -> None:
    """Raise RuntimeError if the current process is not ``pid`` or the caller is a coroutine."""
    check_process(pid)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"this call blocks and must not be made in a coroutine; use {instead} there")


def check_process(pid: int) -> None:
    """Raise RuntimeError if the current process is not ``pid``, but a forked child: sockets and
    loops belong to the process that has opened them."""
    if os.getpid() != pid:
        raise RuntimeError(
            "what holds sessions or connections cannot be used in a forked child; open a new one "
            "there"
        )


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then cancel its remaining tasks and close it."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        # Coroutines that were submitted while the loop was stopping become tasks in the first
        # round. Their callers wait for them.
        for _ in range(_DRAIN_ROUNDS):
            loop.run_until_complete(asyncio.sleep(0))
            pending = asyncio.all_tasks(loop)
            for task in pending:
                task.cancel()
            if pending:
                loop.run_until_complete(asyncio.wait(pending, timeout=1.0))
    finally:
        loop.close()


class LoopWatch:
    """Detector for a blocked event loop on another thread, whose identifier is ``ident``.

    Call ``blocked_s`` periodically, always from the same thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        self._loop = loop
        self._ident = ident
        self._response = threading.Event()
        self._response.set()
        self._request_time = process_clock.now()

    def blocked_s(self) -> float:
        """Return how many seconds the loop has not responded; 0.0 if it has responded.

        After each response, a new request is sent to the loop. Raises RuntimeError if the loop is
        closed.
        """
        if not self._response.is_set():
            return process_clock.now() - self._request_time
        self._response.clear()
        self._request_time = process_clock.now()
        self._loop.call_soon_threadsafe(self._response.set)
        return 0.0

    def current_line(self) -> str:
        """Return the source line that the loop's thread is executing. If possible, this is the
        innermost line outside of libraries."""
        frame = sys._current_frames().get(self._ident)
        if frame is None:
            return "nowhere: its thread has ended"
        stack = traceback.extract_stack(frame)
        own = [
            line
            for line in stack
            if "/lib/python" not in line.filename and "/site-packages/" not in line.filename
        ]
        line = (own or stack)[-1]
        return f"{line.filename}, line {line.lineno}, in {line.name}"
