"""From progress to reward: differences of a potential, so that the return of an episode is its final score.

    achieved      V = (1.05 where chaos was survived, else 1) * 0.85**hints
    not achieved  V = clamp(0.9 P (half of it after a failed command) - 0.1 rollbacks + 0.02 retries, 0, 0.99)
                      * 0.85**hints
    sparing tasks V * 0.5**(writes that mended nothing)
    harmed        V = -0.25 while something that the task protects is not as set-up left it
    reward of a step = V now - V before,  V before the first step = 0

Cycling, repeating and idling earn nothing. In the mode ``level``, for comparisons, the reward of a step is a level of
its own (0.8 P, 0.1 more where P rose) and a trainer has to use the last one, not the sum.
Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REWARD_MODES = ("potential", "level")
PROGRESS_WEIGHT = 0.9
LEVEL_WEIGHT = 0.8
LEVEL_RISE = 0.1
FAILED_COMMAND_FACTOR = 0.5
ROLLBACK_PENALTY = 0.1
RETRY_BONUS = 0.02
UNFINISHED_CAP = 0.99
HINT_FACTOR = 0.85
NEEDLESS_FACTOR = 0.5
"""Factor per write that mended nothing, in tasks that ask to look before anything is written: whoever applies the whole
desired state without a look writes one to three of them."""
HARM_PENALTY = 0.25
"""Score after harm: to do harm must be worse than to do nothing, and no progress makes up for it."""
CHAOS_SURVIVED = 1.05
_GRID = float(1 << 30)


@dataclass(frozen=True)
class Standing:
    """Holds what a score depends on beside progress, as of now."""

    achieved: bool = False
    last_failed: bool = False
    rollbacks: int = 0
    idempotent_retries: int = 0
    hints: int = 0
    chaos_survived: bool = False
    harmed: bool = False
    needless_writes: int = 0

    def score(self, earned: float) -> float:
        """Return the final score in [0, 1.05], where progress earned ``earned``; below 0 after harm alone."""
        if self.harmed:
            return -_on_grid(HARM_PENALTY)
        cost = HINT_FACTOR**self.hints * NEEDLESS_FACTOR**self.needless_writes
        if self.achieved:
            return _on_grid((CHAOS_SURVIVED if self.chaos_survived else 1.0) * cost)
        value = earned * (FAILED_COMMAND_FACTOR if self.last_failed else 1.0)
        value += RETRY_BONUS * self.idempotent_retries - ROLLBACK_PENALTY * self.rollbacks
        return _on_grid(min(max(value, 0.0), UNFINISHED_CAP) * cost)


def score(progress: float, **standing: Any) -> float:
    """Return the potential V of this progress and the fields of ``Standing``, on a grid of 2**-30, so that sums of
    differences are exact."""
    return Standing(**standing).score(PROGRESS_WEIGHT * progress)


def level(progress: float, *, rose: bool, **standing: Any) -> float:
    """Return the reward of a step in the mode ``level``."""
    return Standing(**standing).score(LEVEL_WEIGHT * progress + (LEVEL_RISE if rose else 0.0))


def _on_grid(value: float) -> float:
    return round(value * _GRID) / _GRID


def monotone_progress(best: float, now: float) -> float:
    """Return the larger progress (layer 6): progress never falls, so ground that was lost cannot be earned a second
    time."""
    return max(best, now)


class RewardMeter:
    """Computes the reward of each step of one episode. ``progress`` is the best so far, or with ``falls`` the latest,
    ``total`` the score so far: the sum of the rewards, in the mode ``level`` the last one. Raises ValueError for an
    unknown mode."""

    def __init__(self, mode: str = "potential", *, falls: bool = False) -> None:
        if mode not in REWARD_MODES:
            raise ValueError(f"reward mode is {mode!r}; known: {', '.join(REWARD_MODES)}")
        self._mode = mode
        self._falls = falls
        self.progress = 0.0
        self.total = 0.0

    def standstill(self) -> float:
        """Return the reward of a step that changes no score."""
        return self.total if self._mode == "level" else 0.0

    def step(self, progress: float, **standing: Any) -> float:
        """Take in the state after a step, ``standing`` as fields of ``Standing``; returns the step's reward, which may
        be negative (in the mode ``level`` after harm alone)."""
        rose = progress > self.progress
        self.progress = progress if self._falls else monotone_progress(self.progress, progress)
        if self._mode == "level":
            self.total = level(self.progress, rose=rose, **standing)
            return self.total
        value = score(self.progress, **standing)
        reward = value - self.total
        self.total = value
        return reward
