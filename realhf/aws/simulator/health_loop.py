"""Watches free slots and brings dead ones back, with growing patience (docs/reference/environment.md 3)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from realhf.aws.cli.executor import SimulatorLost
from realhf.aws.simulator.lease_book import LeaseBook, SlotState
from realhf.aws.simulator.ministack_process import ANSWER_S
from realhf.aws.simulator.slot import Slot

INTERVAL_S = 5.0
FIRST_BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 30.0
_STOP_S = 10.0

logger = logging.getLogger(__name__)


def back_off_s(failures: int) -> float:
    """Return the seconds until the next attempt after ``failures`` failed ones in a row: 0, 0.5, 1, 2 .. 30."""
    return min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2 ** (failures - 1)) if failures else 0.0


class HealthLoop:
    """Checks every free slot every ``interval_s`` on a thread, and respawns UNHEALTHY ones.

    ``respawns`` counts replaced simulators, ``failures`` attempts that replaced none.
    """

    def __init__(self, book: LeaseBook[Slot], slots: Sequence[Slot], interval_s: float = INTERVAL_S) -> None:
        self.respawns = 0
        self.failures = 0
        self._book = book
        self._slots = slots
        self._interval_s = interval_s
        self._failed = [0] * len(slots)
        self._due = [0.0] * len(slots)
        self._woken = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="ministack-health", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Start the next round now: there is an unhealthy slot."""
        self._woken.set()

    def stop(self) -> None:
        """End the thread, after the answer or the respawn that it waits for. Idempotent."""
        self._ending = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def sweep(self) -> None:
        """Run one round: check the free slots, then respawn what is due."""
        for index in self._book.in_state(SlotState.FREE):
            if self._ending:
                return
            if not self._slots[index].ministack.answers(ANSWER_S) and self._book.fail_if_free(index):
                logger.warning("slot %d: its simulator does not answer and is replaced", index)
        for index in self._book.in_state(SlotState.UNHEALTHY):
            if not self._ending and time.monotonic() >= self._due[index] and self._book.begin_respawn(index):
                self._respawn(index)

    def _respawn(self, index: int) -> None:
        try:
            self._slots[index].respawn()
        except SimulatorLost as error:
            self.failures += 1
            self._failed[index] += 1
            wait_s = back_off_s(self._failed[index])
            self._due[index] = time.monotonic() + wait_s
            self._book.fail(index)
            logger.error("slot %d cannot be respawned, next attempt in %g s: %s", index, wait_s, error)
        else:
            self.respawns += 1
            self._failed[index] = 0
            self._book.free(index)

    def _run(self) -> None:
        next_round = time.monotonic() + self._interval_s
        while not self._ending:
            waiting = [self._due[index] for index in self._book.in_state(SlotState.UNHEALTHY)]
            self._woken.wait(max(0.01, min([next_round, *waiting]) - time.monotonic()))
            self._woken.clear()
            if self._ending:
                return
            self.sweep()
            next_round = time.monotonic() + self._interval_s
