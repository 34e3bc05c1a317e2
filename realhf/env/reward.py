"""From progress to reward: differences of a potential, so that the return of an episode is its final score.

    achieved      V = 1
    not achieved  V = clamp(0.9 P (half of it after a failed command) - 0.1 rollbacks + 0.02 retries, 0, 0.99)
    reward of a step = V now - V before,  V before the first step = 0

Cycling, repeating and idling earn nothing. Source: environment spec section 7.
"""

from __future__ import annotations

PROGRESS_WEIGHT = 0.9
FAILED_COMMAND_FACTOR = 0.5
ROLLBACK_PENALTY = 0.1
RETRY_BONUS = 0.02
UNFINISHED_CAP = 0.99
_GRID = float(1 << 30)


def score(
    progress: float, *, achieved: bool, last_failed: bool = False, rollbacks: int = 0, idempotent_retries: int = 0
) -> float:
    """The potential V in [0, 1], on a grid of 2**-30 so that sums of differences are exact."""
    if achieved:
        return 1.0
    value = PROGRESS_WEIGHT * progress * (FAILED_COMMAND_FACTOR if last_failed else 1.0)
    value += RETRY_BONUS * idempotent_retries - ROLLBACK_PENALTY * rollbacks
    return round(min(max(value, 0.0), UNFINISHED_CAP) * _GRID) / _GRID


def monotone_progress(best: float, now: float) -> float:
    """Layer 6: progress never falls, so ground that was lost cannot be earned a second time."""
    return max(best, now)


class RewardMeter:
    """The reward of each step of one episode. ``progress`` is the best so far, ``total`` the sum of rewards."""

    def __init__(self) -> None:
        self.progress = 0.0
        self.total = 0.0

    def step(
        self, progress: float, *, achieved: bool, last_failed: bool, rollbacks: int, idempotent_retries: int
    ) -> float:
        """Take in the state after a step; returns its reward, which may be negative."""
        self.progress = monotone_progress(self.progress, progress)
        value = score(
            self.progress,
            achieved=achieved,
            last_failed=last_failed,
            rollbacks=rollbacks,
            idempotent_retries=idempotent_retries,
        )
        reward, self.total = value - self.total, value
        return reward
