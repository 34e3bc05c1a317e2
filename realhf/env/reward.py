"""From progress to reward: differences of a potential, so that the return of an episode is its final score.

    achieved      V = (1.05 where chaos was survived, else 1) * 0.85**hints
    not achieved  V = clamp(0.9 P (half of it after a failed command) - 0.1 rollbacks + 0.02 retries, 0, 0.99)
                      * 0.85**hints
    reward of a step = V now - V before,  V before the first step = 0

Cycling, repeating and idling earn nothing. Source: environment spec section 7.
"""

from __future__ import annotations

from typing import Any

PROGRESS_WEIGHT = 0.9
FAILED_COMMAND_FACTOR = 0.5
ROLLBACK_PENALTY = 0.1
RETRY_BONUS = 0.02
UNFINISHED_CAP = 0.99
HINT_FACTOR = 0.85
CHAOS_SURVIVED = 1.05
_GRID = float(1 << 30)


def score(
    progress: float,
    *,
    achieved: bool,
    last_failed: bool = False,
    rollbacks: int = 0,
    idempotent_retries: int = 0,
    hints: int = 0,
    chaos_survived: bool = False,
) -> float:
    """The potential V in [0, 1.05], on a grid of 2**-30 so that sums of differences are exact."""
    if achieved:
        return _on_grid((CHAOS_SURVIVED if chaos_survived else 1.0) * HINT_FACTOR**hints)
    value = PROGRESS_WEIGHT * progress * (FAILED_COMMAND_FACTOR if last_failed else 1.0)
    value += RETRY_BONUS * idempotent_retries - ROLLBACK_PENALTY * rollbacks
    return _on_grid(min(max(value, 0.0), UNFINISHED_CAP) * HINT_FACTOR**hints)


def _on_grid(value: float) -> float:
    return round(value * _GRID) / _GRID


def monotone_progress(best: float, now: float) -> float:
    """Layer 6: progress never falls, so ground that was lost cannot be earned a second time."""
    return max(best, now)


class RewardMeter:
    """The reward of each step of one episode. ``progress`` is the best so far, ``total`` the sum of rewards."""

    def __init__(self) -> None:
        self.progress = 0.0
        self.total = 0.0

    def step(self, progress: float, *, achieved: bool, **circumstances: Any) -> float:
        """Take in the state after a step, ``circumstances`` as ``score`` takes them; returns the step's reward, which
        may be negative."""
        self.progress = monotone_progress(self.progress, progress)
        value = score(self.progress, achieved=achieved, **circumstances)
        reward, self.total = value - self.total, value
        return reward
