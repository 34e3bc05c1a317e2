"""Reward from progress: differences of a potential, so that the rewards of an episode sum to its
final score.

    achieved      V = (1.05 if chaos was survived, else 1) * 0.85**hints
    not achieved  V = clamp(0.9 P (half of it after a failed command) - 0.1 rollbacks + 0.02 retries, 0, 0.99)
                      * 0.85**hints
    drift tasks   V * 0.5**(writes that repaired nothing)
    harmed        V = -0.25 while something that the task protects differs from the set-up
    reward of a step = V after the step - V before it,  V before the first step = 0

P is the progress in [0, 1]. Cycling, repeating and idling earn nothing. In the mode ``level``, for
comparisons, the reward of a step is a level instead of a difference (0.8 P, plus 0.1 if P rose),
and a trainer has to use the last reward, not the sum. Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REWARD_MODES = ("potential", "level")
PROGRESS_WEIGHT = 0.9
"""Weight of the progress in the potential of a task that is not achieved."""
LEVEL_WEIGHT = 0.8
"""Weight of the progress in the mode ``level``."""
LEVEL_RISE = 0.1
"""Bonus of the mode ``level`` for a step that raised the progress."""
FAILED_COMMAND_FACTOR = 0.5
"""Factor of the progress while the last command is a failed one."""
ROLLBACK_PENALTY = 0.1
"""Deduction per resource that the agent created and deleted again."""
RETRY_BONUS = 0.02
"""Bonus per create that met an existing resource and was followed by progress."""
UNFINISHED_CAP = 0.99
"""Highest potential of a task that is not achieved."""
HINT_FACTOR = 0.85
"""Factor per hint."""
NEEDLESS_FACTOR = 0.5
"""Factor per write that repaired nothing, in drift tasks, which ask to look before writing. An
agent that applies the whole desired state without a look sends one to three such writes."""
HARM_PENALTY = 0.25
"""Negative score after harm: harm must be worse than no action, and no progress offsets it."""
CHAOS_SURVIVED = 1.05
"""Score of an achieved task whose chaos disturbance the agent repaired."""
_GRID = float(1 << 30)
"""Steps per unit of the score grid. Multiples of 2**-30 add up exactly in float64."""


@dataclass(frozen=True)
class Standing:
    """The state that determines a score, in addition to the progress."""

    achieved: bool = False
    """Whether the task is achieved."""
    last_failed: bool = False
    """Whether the last command failed."""
    rollbacks: int = 0
    """Resources that the agent created and deleted again."""
    idempotent_retries: int = 0
    """Creates that met an existing resource and were followed by progress."""
    hints: int = 0
    """Hints that the agent asked for."""
    chaos_survived: bool = False
    """Whether the agent repaired what chaos disturbed."""
    harmed: bool = False
    """Whether a protected resource is harmed now."""
    needless_writes: int = 0
    """Writes of a drift task that repaired nothing."""

    def score(self, earned: float) -> float:
        """Return the final score in [0, 1.05] for ``earned``, the weighted progress; negative only
        after harm."""
        if self.harmed:
            return -_round_to_grid(HARM_PENALTY)
        cost = HINT_FACTOR**self.hints * NEEDLESS_FACTOR**self.needless_writes
        if self.achieved:
            return _round_to_grid((CHAOS_SURVIVED if self.chaos_survived else 1.0) * cost)
        value = earned * (FAILED_COMMAND_FACTOR if self.last_failed else 1.0)
        value += RETRY_BONUS * self.idempotent_retries - ROLLBACK_PENALTY * self.rollbacks
        return _round_to_grid(min(max(value, 0.0), UNFINISHED_CAP) * cost)


def score(progress: float, **standing: Any) -> float:
    """Return the potential V for a progress in [0, 1] and the fields of ``Standing``.

    The value lies on a grid of 2**-30, so that sums of differences are exact.
    """
    return Standing(**standing).score(PROGRESS_WEIGHT * progress)


def level(progress: float, *, rose: bool, **standing: Any) -> float:
    """Return the reward of a step in the mode ``level``. ``rose``: whether the progress rose."""
    return Standing(**standing).score(LEVEL_WEIGHT * progress + (LEVEL_RISE if rose else 0.0))


def _round_to_grid(value: float) -> float:
    return round(value * _GRID) / _GRID


def monotone_progress(best: float, now: float) -> float:
    """Return the larger progress (layer 6).

    Progress never falls, so progress that is lost and regained is not paid twice.
    """
    return max(best, now)


class RewardMeter:
    """Computes the reward of each step of one episode.

    ``mode``: one of ``REWARD_MODES``. ``falls``: use the latest progress instead of the best so
    far. Raises ValueError for an unknown mode.
    """

    def __init__(self, mode: str = "potential", *, falls: bool = False) -> None:
        if mode not in REWARD_MODES:
            raise ValueError(f"reward mode is {mode!r}; known: {', '.join(REWARD_MODES)}")
        self._mode = mode
        self._falls = falls
        self.progress = 0.0
        """The best progress so far, or with ``falls`` the latest."""
        self.total = 0.0
        """The score so far: the sum of the rewards, or in the mode ``level`` the last one."""

    def standstill(self) -> float:
        """Return the reward of a step that leaves the score unchanged."""
        return self.total if self._mode == "level" else 0.0

    def step(self, progress: float, **standing: Any) -> float:
        """Update the score after a step and return the reward of the step.

        ``standing``: the fields of ``Standing``. The reward may be negative (in the mode ``level``
        only after harm).
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
