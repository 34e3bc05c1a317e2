"""Schedules environments by stride: decides who is served next, and what it is charged.

Source: docs/reference/trajectory.md 3.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FairShare:
    """Holds the shares of environments and what they have been served.

    ``shares``: of each known environment; ``times``: served sequences over share, so far; ``clock``: the time of the
    one that was served last. Environments without a share count together under the key None, which has
    ``default_share``.
    """

    shares: Mapping[int | None, float]
    times: Mapping[int | None, float]
    clock: float
    default_share: float


@dataclass
class Ledger:
    """Keeps the accounts while one batch is formed. ``times`` holds changed times, ``served`` the sequences taken from
    each environment."""

    fair: FairShare
    clock: float = field(init=False)
    times: dict[int | None, float] = field(default_factory=dict)
    served: dict[int | None, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = self.fair.clock

    def key(self, env_id: int | None) -> int | None:
        """Return the account of an environment: its own, or None for those without a share."""
        return env_id if env_id in self.fair.shares else None

    def time(self, key: int | None) -> float:
        """Return the time of an account, including what this batch has charged."""
        found = self.times.get(key)
        return self.fair.times.get(key, 0.0) if found is None else found

    def charge(self, env_id: int | None, sequences: int) -> None:
        """Charge an environment for sequences taken from it."""
        key = self.key(env_id)
        self.times[key] = self.time(key) + sequences / self.fair.shares.get(key, self.fair.default_share)
        self.served[env_id] = self.served.get(env_id, 0) + sequences
