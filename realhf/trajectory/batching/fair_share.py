"""Stride scheduling between environments: who is served next, and what it is charged.

Source: docs/reference/trajectory.md 3.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FairShare:
    """``shares``: of each known environment; ``times``: served sequences over share, so far; ``clock``: the time of
    the one that was served last. Environments without a share fall together under the key None, which has
    ``default_share``."""

    shares: Mapping[int | None, float]
    times: Mapping[int | None, float]
    clock: float
    default_share: float


@dataclass
class Ledger:
    """The accounts while one batch is formed. ``times`` holds changed times, ``served`` sequences of
    each environment."""

    fair: FairShare
    clock: float = field(init=False)
    times: dict[int | None, float] = field(default_factory=dict)
    served: dict[int | None, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = self.fair.clock

    def key(self, env_id: int | None) -> int | None:
        """Under which account an environment runs."""
        return env_id if env_id in self.fair.shares else None

    def time(self, key: int | None) -> float:
        found = self.times.get(key)
        return self.fair.times.get(key, 0.0) if found is None else found

    def charge(self, env_id: int | None, sequences: int) -> None:
        """Sequences were taken from an environment."""
        key = self.key(env_id)
        self.times[key] = self.time(key) + sequences / self.fair.shares.get(key, self.fair.default_share)
        self.served[env_id] = self.served.get(env_id, 0) + sequences
