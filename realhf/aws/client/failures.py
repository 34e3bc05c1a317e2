"""Describes failures of environments as data: the status of an error, a rollout without reward, a group with its
outcomes.

Source: docs/reference/environment.md 9. A failed environment is never a reward of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from realhf.api.env import POLICY_FAILED
from realhf.env.openenv_client import CapacityError, EnvError

ON_FAILURE = ("drop", "retry", "raise")
"""What a pool makes of a rollout whose environment failed: left out, played once more, an error."""
FAILURES = (ConnectionError, TimeoutError, EnvError)
"""Errors of an environment or of the way to it; anything else is a fault of the caller's code."""


@dataclass(frozen=True)
class RolloutFailure:
    """Stands where a result would: ``status`` is one of ``realhf.api.env.FAILURE_STATUSES``."""

    status: str
    message: str
    valid: bool = False
    reward: None = None
    achieved: bool = False


class PoolClosed(RuntimeError):
    """The pool was closed, or never connected."""


class GroupError(RuntimeError):
    """Rollouts of a group failed. ``outcomes``: one entry per rollout in order, a RolloutFailure where one failed."""

    def __init__(self, message: str, outcomes: Sequence[Any]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


class GroupResetError(GroupError):
    """Not every session could be reset onto the task."""


def failure_status(error: BaseException) -> str:
    """Return the status of a rollout whose environment raised ``error``; that of a failed policy for an error that is
    none of FAILURES."""
    if isinstance(error, CapacityError):
        return "capacity"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, EnvError):
        return "unavailable" if error.retryable else "internal"
    return "lost" if isinstance(error, ConnectionError) else POLICY_FAILED


def as_failure(error: BaseException) -> RolloutFailure:
    """Turn ``error`` into an outcome."""
    return RolloutFailure(failure_status(error), str(error) or type(error).__name__)


def failed_ones(outcomes: Sequence[Any]) -> str:
    """Say, for an error message, which entries failed and how."""
    named = [f"{i}: {o.status} ({o.message})" for i, o in enumerate(outcomes) if getattr(o, "valid", True) is False]
    return "; ".join(named)


def check_on_failure(value: str) -> None:
    """Raise ValueError for a policy that does not exist."""
    if value not in ON_FAILURE:
        raise ValueError(f"on_failure is {value!r}; allowed: {', '.join(ON_FAILURE)}")
