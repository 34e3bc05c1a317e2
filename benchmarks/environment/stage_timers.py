"""Timers that attribute the CPU time of a thread to stages, each call to the innermost one."""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

COSTS_PATH = "/_realhf/costs"
"""Path under which a timed simulator tells its owner what its stages cost."""


class StageTimers:
    """CPU time and number of calls by stage. A call within a call of another stage counts for the
    inner stage alone."""

    def __init__(self) -> None:
        self.ns: Counter[str] = Counter()
        """CPU time in nanoseconds, by stage."""
        self.calls = 0
        """Number of timed calls. Each reads the clock of its thread twice."""
        self._threads = threading.local()

    def time(self, owner: Any, name: str, stage: str) -> None:
        """Time the calls of a function or method of ``owner`` from now on. Does nothing if this
        version has none of that name."""
        function = getattr(owner, name, None)
        if function is not None:
            setattr(owner, name, self._timed(function, stage))

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def timed_coroutine(*arguments: Any, **options: Any) -> Any:
                self._enter(stage)
                try:
                    return await function(*arguments, **options)
                finally:
                    self._leave()

            return timed_coroutine

        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            self._enter(stage)
            try:
                return function(*arguments, **options)
            finally:
                self._leave()

        return timed

    def _enter(self, stage: str) -> None:
        thread = self._threads
        stack = thread.__dict__.setdefault("stack", [])
        now = time.thread_time_ns()
        if stack:
            self.ns[stack[-1]] += now - thread.last
        stack.append(stage)
        thread.last = now

    def _leave(self) -> None:
        thread = self._threads
        now = time.thread_time_ns()
        self.ns[thread.stack.pop()] += now - thread.last
        thread.last = now
        self.calls += 1
