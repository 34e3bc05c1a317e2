"""Manages the threads that compute for one engine: how many there are, and how they wait for one another.

OpenMP threads meet at a barrier after every product, a hundred thousand times in a train step, and spin while they
wait. Where one of them has to share its core with another program, the others spin for milliseconds each time, and
everything takes twenty times as long. Sleeping instead costs a fifth of the speed on a quiet machine. So the threads
spin while cores are free and sleep while other programs keep them busy. Their number never changes, because gradients
depend on it in their last bits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from realhf.backends.threads.core_account import CoreAccount, LinuxCoreAccount
from realhf.backends.threads.omp_spin import OmpSpin

_log = logging.getLogger(__name__)

WINDOW_S = 0.06
"""How many seconds of computing are measured before the threads change the way they wait."""
CROWDED = 0.3
"""Core-seconds that threads waited for a core, per second of computing, from which cores count as crowded. Another
program on one of two cores makes it 0.3 to 0.6, while one window in 200 of a quiet run reaches it."""
STEADY_WINDOWS = 32
"""Number of windows for which spinning must last to count as right."""
LONGEST_PATIENCE = 8
"""Most quiet windows in a row that threads wait for before they spin again. Spinning that lasted ``STEADY_WINDOWS``
windows was right; if it lasted less, the wait for the next doubles, up to this number. A burst of other work at a bad
moment then costs half a second of sleep, which is up to twice as slow where cores fall idle."""


class Spin(Protocol):
    """See ``OmpSpin``."""

    @property
    def short(self) -> bool:
        """See ``OmpSpin``."""
        ...

    def shorten(self) -> None:
        """See ``OmpSpin``."""
        ...

    def lengthen(self) -> None:
        """See ``OmpSpin``."""
        ...


class ComputeThreads:
    """Runs ``count`` threads. With an ``account`` of cores and a ``spin`` to switch they sleep at barriers while other
    programs keep cores busy. They begin asleep, because a start among other programs would be as slow as any step. Not
    thread-safe: the thread that computes calls it."""

    def __init__(
        self,
        count: int,
        account: CoreAccount | None = None,
        spin: Spin | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self.count = count
        self._clock, self._set_threads = clock, set_threads
        self._account = account if spin is not None and count > 1 else None
        self._spin = spin
        self._at = self._waited = 0.0
        self._seen_s = self._seen_waited = 0.0
        self._patience, self._quiet, self._since_spin = 1, 0, STEADY_WINDOWS
        if self._account is not None and spin is not None:
            self._sleep(spin)

    def take(self) -> None:
        """Let the calling thread compute on ``count`` threads from now on."""
        self._set_threads(self.count)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Wrap a call that computes all the time, on the thread that computes. The time between two calls is not
        measured, because others may work for this engine then."""
        self.take()
        if self._account is None:
            yield
            return
        self._at, self._waited = self._clock(), self._account.waited_s()
        try:
            yield
        finally:
            self._look(self._account)

    def pace(self) -> None:
        """Look at the cores between two pieces of a call; costs next to nothing unless a window is over."""
        if self._account is not None and self._clock() - self._at >= WINDOW_S:
            self._look(self._account)

    def _look(self, account: CoreAccount) -> None:
        now, waited = self._clock(), account.waited_s()
        self._seen_s += now - self._at
        self._seen_waited += waited - self._waited
        self._at, self._waited = now, waited
        if self._seen_s >= WINDOW_S and self._spin is not None:
            crowded = self._seen_waited / self._seen_s >= CROWDED
            self._seen_s = self._seen_waited = 0.0
            self._switch(self._spin, crowded)

    def _switch(self, spin: Spin, crowded: bool) -> None:
        """Take a window into account: sleep from now on when it was crowded, spin again after enough quiet ones."""
        self._since_spin += 1
        if self._since_spin == STEADY_WINDOWS:
            self._patience = 1
        self._quiet = 0 if crowded else self._quiet + 1
        if crowded and not spin.short:
            if self._since_spin < STEADY_WINDOWS:
                self._patience = min(2 * self._patience, LONGEST_PATIENCE)
            self._since_spin = STEADY_WINDOWS
            self._sleep(spin)
        elif spin.short and self._quiet >= self._patience:
            self._quiet = self._since_spin = 0
            spin.lengthen()

    def _sleep(self, spin: Spin) -> None:
        """Shorten the spinning; where that fails the threads go on as they are, because slow is better than failed."""
        try:
            spin.shorten()
        except RuntimeError as error:
            self._account = None
            _log.warning("%s: threads spin at every barrier from now on, whatever other programs do", error)


def unmanaged() -> ComputeThreads:
    """Leave the number of threads as it is."""
    return ComputeThreads(1, set_threads=lambda _: None)


def threads(count: int) -> ComputeThreads:
    """Make ``count`` threads that sleep while other programs keep cores busy. Where the kernel keeps no account of
    cores or torch computes with another OpenMP, they always spin, and the log says so."""
    if count == 1:
        return ComputeThreads(1)
    account, spin = LinuxCoreAccount.open(), OmpSpin.find(count)
    if account is None or spin is None:
        missing = "the kernel does not tell how long threads wait" if account is None else "torch uses no libgomp"
        _log.warning(
            "%s: %d threads spin at every barrier, which is many times slower while other programs keep cores busy",
            missing,
            count,
        )
    return ComputeThreads(count, account, spin)
