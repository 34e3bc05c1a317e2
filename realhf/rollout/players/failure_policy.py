"""Decides what a failed rollout means for its group: fail fast, retry, or be content with a minimum group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from realhf.api.config import FailureConfig


class FailurePolicy(Protocol):
    """Decides about failed rollouts. ``retries``: how often a rollout that failed is played again, and its lost session
    resumed."""

    @property
    def retries(self) -> int:
        """How often a failed rollout is played again."""
        ...

    def suffices(self, valid: int, size: int) -> bool:
        """Return whether a group of ``size`` rollouts, of which ``valid`` are valid, may be trained."""
        ...


@dataclass(frozen=True)
class FailFast:
    """Tries nothing again: a group is whole or it has failed, and then the master ends the run."""

    retries: int = 0

    def suffices(self, valid: int, size: int) -> bool:
        """See ``FailurePolicy``."""
        return valid == size


@dataclass(frozen=True)
class Retry:
    """Plays failed rollouts again: a group is whole, or it is played again."""

    retries: int

    def suffices(self, valid: int, size: int) -> bool:
        """See ``FailurePolicy``."""
        return valid == size


@dataclass(frozen=True)
class MinimumGroup:
    """Leaves out rollouts that keep failing where ``least`` others are valid."""

    retries: int
    least: int

    def suffices(self, valid: int, size: int) -> bool:
        """See ``FailurePolicy``."""
        return valid >= min(self.least, size)


def failure_policy(config: FailureConfig, min_group_size: int) -> FailurePolicy:
    """Return the policy that the configuration names. Raises ValueError for an unknown one."""
    if config.policy == "fail_fast":
        return FailFast()
    if config.policy == "retry":
        return Retry(config.retries)
    if config.policy == "minimum_group":
        return MinimumGroup(config.retries, min_group_size)
    raise ValueError(f"async_rl.on_failure.policy={config.policy!r}: fail_fast, retry or minimum_group")
