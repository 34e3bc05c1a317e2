"""Runs coroutines for blocking callers in a thread with an event loop, and notices when such a loop
is blocked."""

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
_CLOSE_S = 5.0
_DRAIN_ROUNDS = 5
_LOG = logging.getLogger(__name__)


class LoopThread:
    """Runs coroutines on a loop of its own. ``name`` is the thread's; ``instead`` names what to use
    in a coroutine. With ``later`` the thread begins with the first ``call``."""

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
        """Raise RuntimeError in a forked child and in a coroutine."""
        check_blocking_caller(self.pid, self._instead)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine and wait for it; its own waits have deadlines, ``timeout_s`` bounds it
        from outside. When the wait is interrupted the coroutine is cancelled and may roll back
        first."""
        ended = threading.Event()

        async def run() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        self._start()
        future = asyncio.run_coroutine_threadsafe(run(), self.loop)
        try:
            return future.result() if timeout_s is None else event_loops.result(future, timeout_s)
        except BaseException:
            future.cancel()
            ended.wait(_ROLLBACK_S)
            raise

    def stop(self, timeout_s: float) -> None:
        """Cancel what still runs and join the thread; one that hangs is left behind with a
        warning."""
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
        """Raise SystemExit in the thread, where it next runs a line of Python: for code that blocks
        the loop. Code that waits in a call of the system, or catches it, goes on."""
        if self._thread.is_alive() and self._thread.ident is not None:
            ident = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))

    def is_current(self) -> bool:
        """Return whether the caller is this thread (a finalizer may run anywhere)."""
        return threading.current_thread() is self._thread

    def watch(self) -> LoopWatch:
        """Return a watch that tells when the loop is blocked."""
        return LoopWatch(self.loop, self._thread.ident or 0)

    @property
    def alive(self) -> bool:
        """Whether coroutines can run here: not after ``stop``, never in a forked child."""
        return self._thread.is_alive() and os.getpid() == self.pid


class Closable(Protocol):
    """Is closed by a coroutine."""

    async def close(self) -> None:
        """Release what is held; harmless when repeated."""
        ...


A = TypeVar("A", bound=Closable)


class BlockingFace(Generic[A]):
    """Offers the coroutine methods of ``inner`` to blocking callers of any thread; they run on
    ``thread``, which is its own and begins with the first of them. Subclasses name them: ``push =
    blocking(Inner.push)``."""

    def __init__(self, inner: A, name: str) -> None:
        self.inner = inner
        self.thread = LoopThread(name, instead=type(inner).__name__, later=True)
        self._finalizer = weakref.finalize(self, shut_down, self.thread, inner)

    def close(self) -> None:
        """Close what is behind it and end the thread; harmless when repeated."""
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
        """Run a method of ``inner`` to its end. Raises RuntimeError after ``close``, also by
        another thread meanwhile, and in a forked child."""
        check_process(self.thread.pid)
        if not self._finalizer.alive:
            raise RuntimeError(f"this {type(self).__name__} has been closed")
        try:
            return self.thread.call(method(self.inner, *args, **kwargs))
        except concurrent.futures.CancelledError:
            if self._finalizer.alive:
                raise
            raise RuntimeError(f"this {type(self).__name__} was closed by another thread") from None


def opening(
    make: Callable[P, A],
) -> Callable[[Callable[[Any, A], None]], Callable[Concatenate[Any, P], None]]:
    """Let the constructor of a face, which takes what ``make`` makes, take the arguments of
    ``make``."""

    def decorate(init: Callable[[Any, A], None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(make.__init__)
        def opened(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, make(*args, **kwargs))

        return opened

    return decorate


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingFace[A], P], T]:
    """Make the blocking method of a face from a coroutine method."""

    @functools.wraps(method)
    def call(self: BlockingFace[A], *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(method, *args, **kwargs)

    return call


def shut_down(thread: LoopThread, inner: Closable, timeout_s: float = _CLOSE_S) -> None:
    """Close within a bounded time; only forget it in a forked child. The caller may be close(), the
    garbage collector or the interpreter's end."""
    if thread.alive and not thread.is_current():
        with suppress(TimeoutError, RuntimeError):
            event_loops.result(
                asyncio.run_coroutine_threadsafe(inner.close(), thread.loop), timeout_s
            )
    thread.stop(timeout_s)


def check_blocking_caller(pid: int, instead: str) -> None:
    """Raise RuntimeError when this is not the process ``pid``, or when a coroutine calls."""
    check_process(pid)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"this call blocks and must not be made in a coroutine; use {instead} there")


def check_process(pid: int) -> None:
    """Raise RuntimeError in a forked child: sockets and loops belong to the process that opened
    them."""
    if os.getpid() != pid:
        raise RuntimeError(
            "what holds sessions or connections cannot be used in a forked child; open a new one "
            "there"
        )


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        # What was posted while the loop stopped becomes a task in the first round, and its caller
        # waits for it.
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
    """Watches a loop that runs on another thread, ``ident``. Call ``look`` from time to time, on
    one thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        self._loop = loop
        self._ident = ident
        self._answered = threading.Event()
        self._answered.set()
        self._asked = process_clock.now()

    def look(self) -> float:
        """Return for how many seconds the loop has answered nothing since it was asked; 0.0 when it
        has answered. Raises RuntimeError when the loop is closed."""
        if not self._answered.is_set():
            return process_clock.now() - self._asked
        self._answered.clear()
        self._asked = process_clock.now()
        self._loop.call_soon_threadsafe(self._answered.set)
        return 0.0

    def place(self) -> str:
        """Return where the thread of the loop is now: the innermost line that is not of a library,
        if there is one."""
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
