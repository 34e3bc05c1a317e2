"""Holds the environment of each session on an event loop and a thread of its own, and hands these
slots out.

So an environment that hangs or blocks its loop costs its own session alone. A thread cannot be
killed: one that is still in the environment's code after its deadline is asked to end by an
exception, and is left behind and counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from realhf.api.environment import Environment, EnvironmentFailure
from realhf.base import event_loops
from realhf.base.loop_thread import LoopThread
from realhf.env.loader.validation import BrokenContract

T = TypeVar("T")
GRACE_S = 1.0
"""A call that was cancelled at its deadline has this long to return."""
CLOSE_S = 5.0
_END_S = 2.0
_LOG = logging.getLogger(__name__)


class Place:
    """Runs an environment's calls for threads that block. One call at a time; ``kill`` from
    anywhere.

    Args:
        name: of the environment, for messages. make: returns a new instance, on the loop. timeout_s: of one call.
        on_stuck: is given every thread that is left behind.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Environment],
        timeout_s: float,
        on_stuck: Callable[[LoopThread], None],
    ) -> None:
        self._name = name
        self._make = make
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._thread: LoopThread | None = None
        self._env: Environment | None = None
        self._call: Future[Any] | None = None
        self._over = False

    def run(self, what: str, call: Callable[[Environment], Awaitable[T]]) -> T:
        """Return what ``call`` returns for the instance, which is made when there is none. Raises
        EnvironmentFailure; unless that is of the kind ``unavailable`` the instance is gone, and the
        next call makes another one."""
        if self._thread is None:
            self._thread = self._started()
        try:
            return self._wait(self._thread, what, self._guarded(what, call), self._timeout_s)
        except EnvironmentFailure as failure:
            if failure.kind != "unavailable":
                self._drop()
            raise

    def kill(self, *, for_good: bool = False) -> None:
        """Break off the call in flight; its caller gets EnvironmentFailure (lost). ``for_good``:
        the process ends, and the environment is not even waited for when it is closed."""
        self._over = self._over or for_good
        if (call := self._call) is not None:
            call.cancel()

    def close(self) -> None:
        """Close the instance and end the thread, within seconds. Harmless when repeated."""
        self._drop()
        thread = self._thread
        self._thread = None
        if thread is not None:
            thread.stop(0.0 if self._over else _END_S)
            if thread.alive:
                self._on_stuck(thread)

    def _drop(self) -> None:
        env = self._env
        self._env = None
        if env is None or self._thread is None or self._over:
            return
        try:
            self._wait(self._thread, "close", _closed(env), CLOSE_S)
        except EnvironmentFailure as failure:
            _LOG.warning("%s", failure)
        except Exception as error:
            _LOG.warning("environment %s: close: %s", self._name, told(error))

    def _wait(self, thread: LoopThread, what: str, work: Any, timeout_s: float) -> Any:
        """Wait for a coroutine on the loop. One that does not even end when it is cancelled loses
        its thread."""
        self._call = asyncio.run_coroutine_threadsafe(
            _within(self._name, what, work, timeout_s), thread.loop
        )
        try:
            return event_loops.result(self._call, timeout_s + GRACE_S)
        except CancelledError:
            raise EnvironmentFailure(
                "lost", f"environment {self._name}: {what}: broken off"
            ) from None
        except TimeoutError:
            where = thread.watch().place()
            self._leave(thread)
            text = (
                f"{what}: no end within {timeout_s:g} s, nor when it was cancelled; its thread is "
                f"at {where}"
            )
            text = f"environment {self._name}: {text}"
            raise EnvironmentFailure("timeout", text) from None
        finally:
            self._call = None

    def _started(self) -> LoopThread:
        try:
            return LoopThread(f"{self._name} session", instead="the environment itself")
        except (OSError, RuntimeError) as error:
            text = f"environment {self._name}: no event loop and thread for the session: {error}"
            raise EnvironmentFailure("capacity", text) from error

    def _leave(self, thread: LoopThread) -> None:
        self._thread = self._env = None
        thread.interrupt()
        thread.stop(0.1)
        self._on_stuck(thread)

    async def _guarded(self, what: str, call: Callable[[Environment], Awaitable[T]]) -> T:
        """Call the environment; whatever it raises becomes an EnvironmentFailure."""
        server = os.getpid()
        try:
            if self._env is None:
                self._env = self._make()
            return await call(self._env)
        except (EnvironmentFailure, asyncio.CancelledError):
            raise
        except BrokenContract as error:
            raise EnvironmentFailure(
                "internal", f"environment {self._name}: {what}: {error}"
            ) from None
        except BaseException as error:
            text = f"environment {self._name}: {what}: {told(error)}"
            raise EnvironmentFailure("internal", text) from error
        finally:
            if (
                os.getpid() != server
            ):  # the environment forked, and its child must not serve in the server's place
                os._exit(1)


async def _within(name: str, what: str, work: Awaitable[T], timeout_s: float) -> T:
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        text = f"environment {name}: {what}: no answer within {timeout_s:g} s"
        raise EnvironmentFailure("timeout", text) from error


def told(error: BaseException) -> str:
    """Return an error in one line, with the innermost line that is not of a library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        each
        for each in frames
        if "/lib/python" not in each.filename and "/site-packages/" not in each.filename
    ]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


async def _closed(env: Environment) -> None:
    await env.close()


MOST_STUCK = 64
"""Threads that were left behind in the environment's code; beyond, no session is opened until some
of them end."""


class SessionSlots:
    """Implements ``realhf.env.server.interfaces.SlotPool``: at most ``size`` slots at once, each
    made for its session and closed after it. ``name`` is the environment's; subclasses say what a
    slot is and which threads are stuck."""

    name: str

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.RLock()
        self._taken: set[Any] = set()
        self._failures: Counter[str] = Counter()
        self._acquired = 0

    def start(self) -> None:
        """Nothing is needed before the first session."""

    def stop(self) -> None:
        """End every call, so that no thread waits for the environment."""
        raise NotImplementedError

    def acquire(self) -> Any:
        """Take a slot. Raises RuntimeError when there is none."""
        with self._lock:
            if self.free_count <= 0:
                raise RuntimeError(f"environment {self.name}: no place is free")
            slot = self._new_slot()
            self._taken.add(slot)
            self._acquired += 1
            return slot

    def release(self, slot: Any) -> None:
        """Close what is in a slot; the slot is free then, whatever came of it."""
        try:
            slot.close()
        finally:
            with self._lock:
                self._taken.discard(slot)

    def count(self, kind: str) -> None:
        """Count a failure of the environment."""
        with self._lock:
            self._failures[kind] += 1

    @property
    def stuck(self) -> int:
        """How many threads were left behind in the environment's code."""
        raise NotImplementedError

    @property
    def free_count(self) -> int:
        """How many sessions could begin now."""
        with self._lock:
            return 0 if self.stuck >= MOST_STUCK else self.size - len(self._taken)

    def metrics(self) -> dict[str, Any]:
        """Return numbers for ``/metrics``: slots, threads left behind, failures by kind."""
        with self._lock:
            return {
                "size": self.size,
                "free": self.free_count,
                "acquired": self._acquired,
                "stuck_threads": self.stuck,
                "failures": dict(self._failures),
            }

    def _new_slot(self) -> Any:
        raise NotImplementedError


class Places(SessionSlots):
    """Hands out places in this process. ``make`` returns an instance of the environment ``name``;
    ``timeout_s`` bounds each of its calls."""

    def __init__(
        self, name: str, make: Callable[[], Environment], size: int, timeout_s: float
    ) -> None:
        super().__init__(size)
        self.name = name
        self._make = make
        self._timeout_s = timeout_s
        self._left: list[LoopThread] = []

    def stop(self) -> None:
        """Break off every call, so that no thread waits for the environment."""
        with self._lock:
            taken = list(self._taken)
        for place in taken:
            place.kill(for_good=True)

    @property
    def stuck(self) -> int:
        """How many threads were left behind in the environment's code and are there still."""
        with self._lock:
            self._left = [thread for thread in self._left if thread.alive]
            return len(self._left)

    def _new_slot(self) -> Place:
        return Place(self.name, self._make, self._timeout_s, self._on_stuck)

    def _on_stuck(self, thread: LoopThread) -> None:
        with self._lock:
            self._left.append(thread)
