"""Decides what a failed rollout means for its group: fail fast, retry, or be content with a minimum group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realhf.api.config import ON_FAILURE
from realhf.api.env import RolloutOutcome


class GroupFailed(RuntimeError):
    """Too few rollouts of a sample are valid, or it was not over in time. ``outcome`` is a word of
    ``realhf.api.streaming``."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True)
class FailurePolicy:
    """``retries``: how often a rollout that failed is played again, and its lost session resumed. ``least``: how many
    valid rollouts suffice for a group; None is all."""

    retries: int
    least: int | None = None

    def suffices(self, valid: int, size: int) -> bool:
        """Return whether a group of ``size`` rollouts, of which ``valid`` are valid, may be trained."""
        return valid >= (size if self.least is None else min(self.least, size))

    def check(self, group: Sequence[RolloutOutcome]) -> None:
        """Raise RuntimeError for a group that may not be trained, unless it may be left out."""
        valid = sum(outcome.valid for outcome in group)
        if self.least is None and valid < len(group):
            raise RuntimeError(f"{shortfall(group)} (rollout.on_failure=minimum_group would leave such groups out)")


def shortfall(group: Sequence[RolloutOutcome]) -> str:
    """Say how many rollouts of a group are valid, and what became of the first that is not."""
    worst = next(outcome for outcome in group if not outcome.valid)
    valid = sum(outcome.valid for outcome in group)
    return f"{valid} of {len(group)} rollouts are valid; {worst.status}: {worst.message}"


def failure_policy(name: str, retries: int, min_group_size: int) -> FailurePolicy:
    """Return the policy that the configuration names. Raises ValueError for an unknown one."""
    if name == "fail_fast":
        return FailurePolicy(0)
    if name == "retry":
        return FailurePolicy(retries)
    if name == "minimum_group":
        return FailurePolicy(retries, least=min_group_size)
    raise ValueError(f"rollout.on_failure={name!r}: {', '.join(ON_FAILURE)}")
