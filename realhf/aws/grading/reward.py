"""Reward from progress: differences of a potential, so that the rewards of an episode sum to its
final score.

    achieved      V = (1.05 if chaos was survived, else 1) * 0.85**hints
    not achieved  V = clamp(0.9 P (half of it after a failed command) - 0.1 rollbacks + 0.02 retries, 0, 0.99)
                      * 0.85**hints
    drift tasks   V * 0.5**(writes that repaired nothing)
    harmed        V = -0.25 while a resource that the task protects is harmed
    reward of a step = V after the step - V before it,  V before the first step = 0

P is the progress in [0, 1]. Cycling, repeating and idling earn nothing. In the mode ``level``,
which exists for comparisons, the reward of a step is the score after the step instead of a
difference: 0.8 P, plus 0.1 if P rose. A trainer must then use the last reward instead of the sum.
Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REWARD_MODES = ("potential", "level")
PROGRESS_WEIGHT = 0.9
"""Weight of the progress in the potential of an unachieved task."""
LEVEL_WEIGHT = 0.8
"""Weight of the progress in ``level`` mode."""
LEVEL_RISE = 0.1
"""Bonus in ``level`` mode for a step that raised the progress."""
FAILED_COMMAND_FACTOR = 0.5
"""Factor applied to the progress if the last command failed."""
ROLLBACK_PENALTY = 0.1
"""Deduction for each resource that the agent created and then deleted."""
RETRY_BONUS = 0.02
"""Bonus for each create request that met an existing resource and was followed by progress."""
UNFINISHED_CAP = 0.99
"""Maximum potential of an unachieved task."""
HINT_FACTOR = 0.85
"""Factor for each hint."""
NEEDLESS_FACTOR = 0.5
"""Factor, in drift tasks, for each write that repaired nothing. Drift tasks require looking before
writing: an agent that applies the whole desired state blindly sends one to three such writes."""
HARM_PENALTY = 0.25
"""Magnitude of the negative score after harm. Harm must be worse than doing nothing, and progress
does not offset it."""
CHAOS_SURVIVED = 1.05
"""Score of an achieved task in which the agent repaired what chaos had disturbed."""
_GRID = float(1 << 30)
"""Resolution of scores, as steps per unit. Multiples of 2**-30 add up without rounding in
float64."""


@dataclass(frozen=True)
class Standing:
    """Everything except the progress that determines a score."""

    achieved: bool = False
    """Whether the task is achieved."""
    last_failed: bool = False
    """Whether the last command failed."""
    rollbacks: int = 0
    """Number of resources that the agent created and then deleted."""
    idempotent_retries: int = 0
    """Number of create requests that met an existing resource and were followed by progress."""
    hints: int = 0
    """Number of hints that the agent asked for."""
    chaos_survived: bool = False
    """Whether the agent repaired what chaos disturbed."""
    harmed: bool = False
    """Whether a protected resource is harmed at present."""
    needless_writes: int = 0
    """Number of writes, in a drift task, that repaired nothing."""

    def score(self, earned: float) -> float:
        """Return the score, in [0, 1.05], or -HARM_PENALTY after harm.

        ``earned``: the progress multiplied by its weight.
        """
        if self.harmed:
            return -_round_to_grid(HARM_PENALTY)
        cost = HINT_FACTOR**self.hints * NEEDLESS_FACTOR**self.needless_writes
        if self.achieved:
            return _round_to_grid((CHAOS_SURVIVED if self.chaos_survived else 1.0) * cost)
        value = earned * (FAILED_COMMAND_FACTOR if self.last_failed else 1.0)
        value += RETRY_BONUS * self.idempotent_retries - ROLLBACK_PENALTY * self.rollbacks
        return _round_to_grid(min(max(value, 0.0), UNFINISHED_CAP) * cost)


def score(progress: float, **standing: Any) -> float:
    """Return the potential V. ``progress`` is in [0, 1]; ``standing`` are the fields of
    ``Standing``.

    The value is a multiple of 2**-30, so that sums of differences are exact.
    """
    return Standing(**standing).score(PROGRESS_WEIGHT * progress)


def level(progress: float, *, rose: bool, **standing: Any) -> float:
    """Return the reward of a step in ``level`` mode. ``rose``: whether the step raised the
    progress. ``standing``: the fields of ``Standing``."""
    return Standing(**standing).score(LEVEL_WEIGHT * progress + (LEVEL_RISE if rose else 0.0))


def _round_to_grid(value: float) -> float:
    return round(value * _GRID) / _GRID


def monotone_progress(best: float, now: float) -> float:
    """Return the larger of the two progress values (layer 6 of the ``grader`` module docstring).

    With it, progress that is lost and regained is not paid twice.
    """
    return max(best, now)


class RewardMeter:
    """Calculator of the reward of each step of one episode.

    ``mode``: one of ``REWARD_MODES``. ``falls``: whether progress may fall; the latest progress is
    then used instead of the best so far. Raises ValueError for an unknown mode.
    """

    def __init__(self, mode: str = "potential", *, falls: bool = False) -> None:
        if mode not in REWARD_MODES:
            raise ValueError(f"reward mode is {mode!r}; known: {', '.join(REWARD_MODES)}")
        self._mode = mode
        self._falls = falls
        self.progress = 0.0
        """The best progress so far; the latest one if progress may fall."""
        self.total = 0.0
        """The score so far: the sum of the rewards, or the last reward in ``level`` mode."""

    def standstill(self) -> float:
        """Return the reward of a step that leaves the score unchanged."""
        return self.total if self._mode == "level" else 0.0

    def step(self, progress: float, **standing: Any) -> float:
        """Update the score after a step and return the step's reward.

        ``standing``: the fields of ``Standing``. The reward may be negative; in ``level`` mode only
        after harm.
        """
        rose = progress > self.progress
        self.progress = progress if self._falls else monotone_progress(self.progress, progress)
        if self._mode == "level":
            self.total = level(self.progress, rose=rose, **standing)
            return self.total
        value = score(self.progress, **standing)
        reward = value - self.total
        self.total = value
        return reward
