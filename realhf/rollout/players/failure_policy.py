"""What a failed rollout means for its group, as a value: fail fast, retry, or be content with a minimum group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from realhf.api.config import FailureConfig


class FailurePolicy(Protocol):
    """``retries``: how often a rollout that failed is played again, and its lost session resumed."""

    @property
    def retries(self) -> int: ...

    def suffices(self, valid: int, size: int) -> bool:
        """Whether a group of ``size`` rollouts, of which ``valid`` are, may be trained."""
        ...


@dataclass(frozen=True)
class FailFast:
    """Nothing is tried again, and a group is whole or it has failed; the master ends the run then."""

    retries: int = 0

    def suffices(self, valid: int, size: int) -> bool:
        return valid == size


@dataclass(frozen=True)
class Retry:
    """A group is whole or it is played again."""

    retries: int

    def suffices(self, valid: int, size: int) -> bool:
        return valid == size


@dataclass(frozen=True)
class MinimumGroup:
    """Rollouts that keep failing are left out where ``least`` others are valid."""

    retries: int
    least: int

    def suffices(self, valid: int, size: int) -> bool:
        return valid >= min(self.least, size)


def failure_policy(config: FailureConfig, min_group_size: int) -> FailurePolicy:
    """The policy that the configuration names. Raises ValueError for an unknown one."""
    if config.policy == "fail_fast":
        return FailFast()
    if config.policy == "retry":
        return Retry(config.retries)
    if config.policy == "minimum_group":
        return MinimumGroup(config.retries, min_group_size)
    raise ValueError(f"async_rl.on_failure.policy={config.policy!r}: fail_fast, retry or minimum_group")
