"""Slots for sessions: each session's environment runs on its own event loop and thread.

An environment that hangs or blocks its loop thus disturbs only its own session. Python threads
cannot be killed. A thread that is still in the environment's code after its deadline is interrupted
by an exception; if that does not help, it is abandoned and counted as stuck.
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
"""Seconds within which a call that was cancelled at its deadline must return."""
CLOSE_S = 5.0
"""Timeout in seconds of closing an environment."""
_END_S = 2.0
"""Seconds to wait for the thread of a closed slot to end."""
_LOG = logging.getLogger(__name__)


class EnvironmentThread:
    """Event loop and thread on which one environment runs, with a blocking interface. Only one call
    may run at a time; ``kill`` may be called from any thread.

    name: name of the environment, for messages. make: returns a new instance, and is called on the
    loop. timeout_s: time limit of one call, in seconds. on_stuck: called with every thread that is
    abandoned.
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
        self._is_stopped = False

    def run(self, call_name: str, call: Callable[[Environment], Awaitable[T]]) -> T:
        """Run ``call`` on the instance, which is created if there is none, and return the result.

        Raises EnvironmentFailure. Unless the failure is of the kind ``unavailable``, the instance
        is closed, and the next call creates a new one.
        """
        if self._thread is None:
            self._thread = self._start_thread()
        try:
            work = self._call_environment(call_name, call)
            return self._run_coroutine(self._thread, call_name, work, self._timeout_s)
        except EnvironmentFailure as failure:
            if failure.kind != "unavailable":
                self._drop()
            raise

    def kill(self, *, for_good: bool = False) -> None:
        """Cancel the running call; its caller gets EnvironmentFailure (lost).

        for_good: the process is about to exit, so do not close the environment and do not wait for
        its thread.
        """
        self._is_stopped = self._is_stopped or for_good
        if (call := self._call) is not None:
            call.cancel()

    def close(self) -> None:
        """Close the instance and end its thread, within seconds. Idempotent."""
        self._drop()
        thread = self._thread
        self._thread = None
        if thread is not None:
            thread.stop(0.0 if self._is_stopped else _END_S)
            if thread.alive:
                self._on_stuck(thread)

    def _drop(self) -> None:
        """Close the instance, if there is one; failures are logged."""
        env = self._env
        self._env = None
        if env is None or self._thread is None or self._is_stopped:
            return
        try:
            self._run_coroutine(self._thread, "close", _close(env), CLOSE_S)
        except EnvironmentFailure as failure:
            _LOG.warning("%s", failure)
        except Exception as error:
            _LOG.warning("environment %s: close: %s", self._name, describe_error(error))

    def _run_coroutine(
        self, thread: LoopThread, call_name: str, work: Any, timeout_s: float
    ) -> Any:
        """Run a coroutine on the loop and wait for its result. If it does not end even after it is
        cancelled, abandon its thread. Raises EnvironmentFailure."""
        self._call = asyncio.run_coroutine_threadsafe(
            _await_with_timeout(self._name, call_name, work, timeout_s), thread.loop
        )
        try:
            return event_loops.wait_for_future(self._call, timeout_s + GRACE_S)
        except CancelledError:
            raise EnvironmentFailure(
                "lost", f"environment {self._name}: {call_name}: the call was cancelled"
            ) from None
        except TimeoutError:
            location = thread.watch().current_line()
            self._abandon(thread)
            text = (
                f"{call_name}: did not end within {timeout_s:g} s, nor when it was cancelled; its "
                f"thread is "
                f"at {location}"
            )
            text = f"environment {self._name}: {text}"
            raise EnvironmentFailure("timeout", text) from None
        finally:
            self._call = None

    def _start_thread(self) -> LoopThread:
        """Return a new thread with an event loop. Raises EnvironmentFailure (capacity)."""
        try:
            return LoopThread(f"{self._name} session", instead="the environment itself")
        except (OSError, RuntimeError) as error:
            text = f"environment {self._name}: no event loop and thread for the session: {error}"
            raise EnvironmentFailure("capacity", text) from error

    def _abandon(self, thread: LoopThread) -> None:
        """Abandon a thread: interrupt it and report it as stuck."""
        self._thread = self._env = None
        thread.interrupt()
        thread.stop(0.1)
        self._on_stuck(thread)

    async def _call_environment(
        self, call_name: str, call: Callable[[Environment], Awaitable[T]]
    ) -> T:
        """Call the environment; convert every exception that it raises to EnvironmentFailure."""
        server = os.getpid()
        try:
            if self._env is None:
                self._env = self._make()
            return await call(self._env)
        except (EnvironmentFailure, asyncio.CancelledError):
            raise
        except BrokenContract as error:
            raise EnvironmentFailure(
                "internal", f"environment {self._name}: {call_name}: {error}"
            ) from None
        except BaseException as error:
            text = f"environment {self._name}: {call_name}: {describe_error(error)}"
            raise EnvironmentFailure("internal", text) from error
        finally:
            # This is a child process that the environment forked; it must not continue as a server.
            if os.getpid() != server:
                os._exit(1)


async def _await_with_timeout(name: str, call_name: str, work: Awaitable[T], timeout_s: float) -> T:
    """Await ``work`` with a timeout. A timeout becomes an EnvironmentFailure; a TimeoutError that
    the work itself raises is passed on."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        text = f"environment {name}: {call_name}: no answer within {timeout_s:g} s"
        raise EnvironmentFailure("timeout", text) from error


def describe_error(error: BaseException) -> str:
    """Return an error as one line, with the innermost line of code outside libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [
        each
        for each in frames
        if "/lib/python" not in each.filename and "/site-packages/" not in each.filename
    ]
    where = f" ({own_frames[-1].filename}, line {own_frames[-1].lineno})" if own_frames else ""
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


async def _close(env: Environment) -> None:
    """Close an environment, as a coroutine."""
    await env.close()


MAX_STUCK = 64
"""Number of stuck threads from which on no new session is opened."""


class SessionSlots:
    """Implementation of ``realhf.env.server.interfaces.SlotPool`` with at most ``size`` slots at a
    time; each is created for one session and closed after it. Thread-safe.

    Subclasses define what a slot is and which threads are stuck.
    """

    name: str
    """Name of the environment."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.RLock()
        self._leased: set[Any] = set()
        self._failures: Counter[str] = Counter()
        self._acquired = 0

    def start(self) -> None:
        """Do nothing, because slots are created only when a session needs one."""

    def stop(self) -> None:
        """Cancel all calls, so that no thread waits for an environment."""
        raise NotImplementedError

    def acquire(self) -> Any:
        """Return a new slot. Raises RuntimeError if none is free."""
        with self._lock:
            if self.free_count <= 0:
                raise RuntimeError(f"environment {self.name}: no session slot is free")
            slot = self._new_slot()
            self._leased.add(slot)
            self._acquired += 1
            return slot

    def release(self, slot: Any) -> None:
        """Close a slot. It counts as free afterwards, even if closing fails."""
        try:
            slot.close()
        finally:
            with self._lock:
                self._leased.discard(slot)

    def count(self, kind: str) -> None:
        """Count a failure of the environment of this kind."""
        with self._lock:
            self._failures[kind] += 1

    @property
    def stuck(self) -> int:
        """Number of threads that are stuck in the environment's code."""
        raise NotImplementedError

    @property
    def free_count(self) -> int:
        """Number of sessions that could be opened now."""
        with self._lock:
            return 0 if self.stuck >= MAX_STUCK else self.size - len(self._leased)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics for ``/metrics``: slots, stuck threads, failures by kind."""
        with self._lock:
            return {
                "size": self.size,
                "free": self.free_count,
                "acquired": self._acquired,
                "stuck_threads": self.stuck,
                "failures": dict(self._failures),
            }

    def _new_slot(self) -> Any:
        """Return a new slot."""
        raise NotImplementedError


class EnvironmentThreads(SessionSlots):
    """Pool of environment threads in this process.

    make: returns an instance of the environment ``name``. timeout_s: time limit of each of its
    calls, in seconds.
    """

    def __init__(
        self, name: str, make: Callable[[], Environment], size: int, timeout_s: float
    ) -> None:
        super().__init__(size)
        self.name = name
        self._make = make
        self._timeout_s = timeout_s
        self._abandoned: list[LoopThread] = []

    def stop(self) -> None:
        """Cancel all calls before the process exits, so that no thread waits for an environment."""
        with self._lock:
            leased = list(self._leased)
        for env_thread in leased:
            env_thread.kill(for_good=True)

    @property
    def stuck(self) -> int:
        """Number of abandoned threads that are still in the environment's code."""
        with self._lock:
            self._abandoned = [thread for thread in self._abandoned if thread.alive]
            return len(self._abandoned)

    def _new_slot(self) -> EnvironmentThread:
        return EnvironmentThread(self.name, self._make, self._timeout_s, self._on_stuck)

    def _on_stuck(self, thread: LoopThread) -> None:
        with self._lock:
            self._abandoned.append(thread)
