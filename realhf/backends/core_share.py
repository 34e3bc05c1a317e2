"""How many threads arithmetic takes: all that it may, and fewer while other programs keep cores busy.

OpenMP threads meet at a barrier after every product, a hundred thousand times in a train step, and spin while they
wait. Where one of them has to share its core with a stranger, the others spin for milliseconds each time, and
everything takes twenty times as long. To spin less costs a third of the speed on a quiet machine, so the number of
threads follows the cores instead: one thread fewer than cores is slower by its share and no more.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from realhf.backends.core_account import CoreAccount, LinuxCoreAccount

_log = logging.getLogger(__name__)

WINDOW_S = 0.06
"""So much computing is looked at before the number of threads changes."""
CROWDED = 0.2
"""Cores' worth of time that threads stood in the queue: a stranger on one core makes it a half or more."""
FREE = 0.8
"""Cores' worth of idle time that is enough for one more thread."""
STEADY_WINDOWS = 32
LONGEST_PATIENCE = 64
"""Windows: a rise that has lasted so long was right; one that has not doubles the wait for the next, up to so many."""


class CoreShare:
    """The share of one computing thread and its helpers: at most ``most`` threads, without an ``account`` exactly so
    many. It begins with one, because a start among strangers would be as slow as any step. Not thread-safe: whoever
    computes calls it."""

    def __init__(
        self,
        most: int,
        account: CoreAccount | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._most, self._clock, self._set_threads = most, clock, set_threads
        self._account = account if most > 1 else None
        self._threads = most if self._account is None else 1
        self._reading = _Reading(0.0, 0.0, 0.0)
        self._seen = _Reading(0.0, 0.0, 0.0)
        self._patience, self._quiet, self._since_rise = 1, 0, STEADY_WINDOWS

    @property
    def threads(self) -> int:
        """How many threads compute now."""
        return self._threads

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Around a call that computes all the time, on the thread that does. What happens between two calls is not
        looked at: there others may be at work for this one."""
        self._set_threads(self._threads)
        if self._account is None:
            yield
            return
        self._reading = self._read(self._account)
        try:
            yield
        finally:
            self._look(self._account)

    def pace(self) -> None:
        """Between two pieces of a call; costs next to nothing unless it is time to look."""
        if self._account is not None and self._clock() - self._reading.at >= WINDOW_S:
            self._look(self._account)

    def _read(self, account: CoreAccount) -> _Reading:
        idle = account.idle_s() if self._threads < self._most else 0.0
        return _Reading(self._clock(), account.waited_s(), idle)

    def _look(self, account: CoreAccount) -> None:
        now = self._read(account)
        self._seen = self._seen + (now - self._reading)
        self._reading = now
        if self._seen.at >= WINDOW_S:
            waited, idle = self._seen.waited / self._seen.at, self._seen.idle / self._seen.at
            self._seen = _Reading(0.0, 0.0, 0.0)
            before = self._threads
            self._threads = self._wanted(waited, idle)
            if self._threads != before:
                self._set_threads(self._threads)
                self._reading = self._read(account)

    def _wanted(self, waited: float, idle: float) -> int:
        """The number of threads after a window with so many cores' worth of waiting and of idleness."""
        self._since_rise += 1
        if self._since_rise == STEADY_WINDOWS:
            self._patience = 1
        self._quiet = self._quiet + 1 if idle >= FREE else 0
        if waited >= CROWDED and self._threads > 1:
            if self._since_rise < STEADY_WINDOWS:
                self._patience = min(2 * self._patience, LONGEST_PATIENCE)
            self._since_rise = STEADY_WINDOWS
            # A thread that shares its core with one stranger waits half of the time.
            return max(1, self._threads - max(1, round(2 * waited)))
        if self._threads < self._most and self._quiet >= self._patience:
            self._quiet, self._since_rise = 0, 0
            return min(self._most, self._threads + int(idle + 1 - FREE))
        return self._threads


@dataclass(frozen=True)
class _Reading:
    """A moment and the totals at it, or differences of them."""

    at: float
    waited: float
    idle: float

    def __add__(self, other: _Reading) -> _Reading:
        return _Reading(self.at + other.at, self.waited + other.waited, self.idle + other.idle)

    def __sub__(self, other: _Reading) -> _Reading:
        return _Reading(self.at - other.at, self.waited - other.waited, self.idle - other.idle)


def fixed_threads(count: int) -> CoreShare:
    """So many threads, whatever others do."""
    return CoreShare(count, None)


def unmanaged() -> CoreShare:
    """The number of threads is whatever it is already."""
    return CoreShare(1, None, set_threads=lambda _: None)


def up_to(most: int) -> CoreShare:
    """At most so many threads. Where the kernel keeps no account of cores the number is fixed, and said so."""
    account = LinuxCoreAccount.open() if most > 1 else None
    if account is None and most > 1:
        _log.warning("the kernel does not tell how long threads wait for cores: %d threads compute even while other "
                     "programs keep cores busy, which slows them down many times", most)
    return CoreShare(most, account)
