"""Turns what an author's code raised into the failure of an episode that names the cause and the line."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from realhf.api.environment import EnvironmentFailure
from realhf.env.doors.author import place_of, raised
from realhf.env.doors.checks import BrokenContract


def failure_of(
    error: BaseException, where: str, author: Any, method: Any, *, on_loop: bool = True
) -> EnvironmentFailure | None:
    """Return the failure for an error from the code of ``author``, a class or function; None for an error that must be
    passed on: a failure already, or, on an event loop, what the loop and not the author raised. ``where`` names the
    episode without its payload, which may hold the answer: failures travel to clients. ``method`` is what broke the
    contract, if it did."""
    if isinstance(error, EnvironmentFailure):
        return None
    if isinstance(error, BrokenContract):
        return EnvironmentFailure(
            "internal", f"{where}: {error} ({place_of(method if inspect.isroutine(method) else author)})"
        )
    if on_loop and (isinstance(error, (KeyboardInterrupt, GeneratorExit)) or _is_cancellation(error)):
        return None
    return EnvironmentFailure("internal", f"{where}: {raised(error, author)}")


def _is_cancellation(error: BaseException) -> bool:
    """Whether this task was cancelled; an author's code may raise CancelledError, too."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
