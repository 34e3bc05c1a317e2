"""Manages the threads that compute for one engine: how many there are, and how they wait for one another.

OpenMP threads meet at a barrier after every product, a hundred thousand times in a train step, and spin while they
wait. Where one of them has to share its core with another program, the others spin for milliseconds each time, and
everything takes twenty times as long. Sleeping instead costs a fifth of the speed on a quiet machine. So the threads
spin while cores are free and sleep while other programs keep them busy. Their number never changes, because gradients
depend on it in their last bits.

libgomp lets a waiting thread spin for about three milliseconds, but hardly at all once it manages more threads than
there are cores (``do_spin`` in its ``config/linux/wait.h``, ``GOMP_SPINCOUNT`` in its manual). A parked team of idle
threads makes that so, and its end undoes it. How long threads waited for a core is the second number of
``/proc/<pid>/task/<tid>/schedstat`` (Linux only).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from realhf.base import process_clock

_TASKS = "/proc/self/task"


class LinuxCoreAccount:
    """Keeps a running total of seconds times cores. One descriptor per thread stays open, so that asking costs a few
    microseconds a thread. Not thread-safe."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._waited_ns = 0

    @staticmethod
    def open() -> LinuxCoreAccount | None:
        """Open the account; None where the kernel does not keep it."""
        try:
            with open(f"{_TASKS}/{os.getpid()}/schedstat", "rb") as file:
                return LinuxCoreAccount() if len(file.read().split()) == 3 else None
        except OSError:
            return None

    def waited_s(self) -> float:
        """Return how long threads of this process were ready to run and had no core."""
        threads = set(os.listdir(_TASKS))
        for gone in self._files.keys() - threads:
            self._forget(gone)
        for thread in threads:
            waited = self._waited_of(thread)
            if waited is not None:
                # The time that a thread waited before it was first seen belongs to no window.
                self._waited_ns += waited - self._seen.get(thread, waited)
                self._seen[thread] = waited
        return self._waited_ns * 1e-9

    def close(self) -> None:
        """Close all descriptors."""
        for thread in list(self._files):
            self._forget(thread)

    def _waited_of(self, thread: str) -> int | None:
        try:
            if thread not in self._files:
                self._files[thread] = os.open(f"{_TASKS}/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._files[thread], 128, 0).split()[1])
        except (OSError, IndexError):
            self._forget(thread)  # it ended meanwhile
            return None

    def _forget(self, thread: str) -> None:
        self._seen.pop(thread, None)
        descriptor = self._files.pop(thread, None)
        if descriptor is not None:
            os.close(descriptor)


_START_S = 10.0
"""How long the idle team may take to start or to end."""
_MARGIN = 3
"""Number of threads that the idle team has above the number of unused cores, as its first thread may not count."""


class OmpSpin:
    """Switches the process's OpenMP threads between long and short spinning; ``computing`` of them work at the same
    time. Not thread-safe."""

    def __init__(self, library: Any, computing: int) -> None:
        self._library = library
        self._idle = max(2, len(os.sched_getaffinity(0)) - computing + _MARGIN)
        self._release: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @staticmethod
    def find(computing: int) -> OmpSpin | None:
        """Find libgomp; None where the process has loaded none, or more than one."""
        try:
            lines = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            return None
        paths = {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}
        if len(paths) != 1:
            return None
        library = ctypes.CDLL(paths.pop())
        return OmpSpin(library, computing) if hasattr(library, "GOMP_parallel") else None

    @property
    def short(self) -> bool:
        """Whether waiting threads go to sleep at once."""
        return self._thread is not None

    def shorten(self) -> None:
        """Let waiting threads sleep at once. Raises RuntimeError when the idle team does not start."""
        if self._thread is not None:
            return
        ready, release = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._park, args=(ready, release), name="idle-omp-team", daemon=True)
        self._release = release
        self._thread.start()
        if not process_clock.wait(ready.wait, _START_S):
            self.lengthen()
            raise RuntimeError(f"the idle team of OpenMP threads did not start within {_START_S:g} s")

    def lengthen(self) -> None:
        """Let waiting threads spin as libgomp does by itself."""
        thread, release = self._thread, self._release
        self._thread = self._release = None
        if thread is not None and release is not None:
            release.set()
            thread.join(_START_S)

    def _park(self, ready: threading.Event, release: threading.Event) -> None:
        """Open a parallel region in which nothing happens: its threads stay with this one until it ends."""
        nothing = ctypes.cast(self._library.omp_get_thread_num, ctypes.c_void_p)
        self._library.GOMP_parallel(nothing, None, self._idle, 0)
        ready.set()
        release.wait()


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


class ComputeThreads:
    """Runs ``count`` threads. With an ``account`` of cores and a ``spin`` to switch they sleep at barriers while other
    programs keep cores busy. They begin asleep, because a start among other programs would be as slow as any step. Not
    thread-safe: the thread that computes calls it."""

    def __init__(
        self,
        count: int,
        account: LinuxCoreAccount | None = None,
        spin: OmpSpin | None = None,
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

    def _look(self, account: LinuxCoreAccount) -> None:
        now, waited = self._clock(), account.waited_s()
        self._seen_s += now - self._at
        self._seen_waited += waited - self._waited
        self._at, self._waited = now, waited
        if self._seen_s >= WINDOW_S and self._spin is not None:
            crowded = self._seen_waited / self._seen_s >= CROWDED
            self._seen_s = self._seen_waited = 0.0
            self._switch(self._spin, crowded)

    def _switch(self, spin: OmpSpin, crowded: bool) -> None:
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

    def _sleep(self, spin: OmpSpin) -> None:
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
