"""Turns what an author's code raised into the failure of an episode that names the cause and the line."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from realhf.api.environment import EnvironmentFailure
from realhf.env.doors.author import place_of, raised
from realhf.env.doors.checks import BrokenContract
from realhf.env.doors.values import shown


def of_task(task: Mapping[str, Any], seed: int) -> str:
    """Which episode it was, for a message."""
    return f"(task {shown(dict(task))}, seed {seed})"


def failure_of(
    error: BaseException, where: str, author: Any, method: Any, *, on_loop: bool = True
) -> EnvironmentFailure | None:
    """Return the failure for an error from the code of ``author``, a class or function; None for an error that must be
    passed on: a failure already, or, on an event loop, what the loop and not the author raised. ``method`` is what
    broke the contract, if it did."""
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
