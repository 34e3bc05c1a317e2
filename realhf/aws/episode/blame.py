"""Decides whose doing it is when a step does not come to its ordinary end: here, and nowhere else.

What becomes of a simulator while it executes a command of the agent, or so that it does not answer after one, is the
agent's doing: the episode ends with the score it had, and cannot be had anew by breaking the account. What happens
between commands is the environment's, and the episode does not count. An account that nobody can read, in a simulator
that works, is neither: it is not as the task wants it, which is counted by kind, and the episode goes on.
"""

from __future__ import annotations

from enum import Enum

from realhf.aws.cli.executor import SimulatorLost
from realhf.aws.cli.state_client import StateCallError, UnreadableAnswer
from realhf.aws.grading.snapshot import SnapshotError
from realhf.aws.simulator.pool import Slot


class Blame(Enum):
    """Says whose doing a fault is; UNREADABLE: nobody's, but the account does not show what was asked for."""

    AGENT = "agent"
    ENVIRONMENT = "environment"
    UNREADABLE = "unreadable"


class Watch:
    """Watches the simulator of a slot from now on: over a command, or over the reads that grade it."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._worked_s = slot.ministack.worked_s() if slot.simulated else 0.0

    def blame(self, error: Exception, *, begun: bool = True) -> Blame:
        """Say whose doing an error is; ``begun``: whether it came after a command had begun. Blocks until a simulator
        that did not answer is known to be lost."""
        lost = isinstance(error, SimulatorLost | ConnectionError)
        if not begun:
            return Blame.ENVIRONMENT
        if not self._slot.simulated:
            if isinstance(error, SnapshotError):
                return Blame.UNREADABLE
            return Blame.ENVIRONMENT if lost or isinstance(error, StateCallError) else Blame.UNREADABLE
        simulator = self._slot.ministack
        idle = 0 <= simulator.worked_s() == self._worked_s
        if simulator.stopped():
            return Blame.ENVIRONMENT
        if not isinstance(error, SimulatorLost) and simulator.alive() and (not lost or simulator.healthy()):
            return Blame.UNREADABLE
        return Blame.ENVIRONMENT if idle else Blame.AGENT  # nothing inside it can keep all of it from running


def unreadable_kind(error: Exception) -> str:
    """Return a word for why an account could not be read: an ``answer`` that is too large or cannot be decoded, a
    ``service`` that answered with an error, ``silence`` where others are answered, a ``grader`` that failed."""
    if isinstance(error, UnreadableAnswer | SnapshotError):
        return "answer"
    if isinstance(error, StateCallError):
        return "service"
    return "silence" if isinstance(error, ConnectionError) else "grader"
