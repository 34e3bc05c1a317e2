"""Compute threads of an engine: their number, and whether they spin or sleep at barriers.

OpenMP threads meet at a barrier after every matrix product, a hundred thousand times in a train
step, and spin while they wait. If one of them shares its core with another program, the others spin
for milliseconds each time, and everything takes twenty times as long. Sleeping instead costs a
fifth of the speed on an idle machine. So the threads spin while cores are free and sleep while
other programs use them. Their number never changes, because the last bits of gradients depend on
it.

libgomp lets a waiting thread spin for about three milliseconds, but hardly at all once it manages
more threads than there are cores (``do_spin`` in its ``config/linux/wait.h``, ``GOMP_SPINCOUNT`` in
its manual). Starting a parked team of idle threads causes that, ending it reverts it. The time that
a thread waited for a core is the second number of ``/proc/<pid>/task/<tid>/schedstat`` (Linux
only).
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

_log = logging.getLogger(__name__)
_TASKS = "/proc/self/task"
_START_S = 10.0
"""Timeout for starting or ending the idle team, in seconds."""
_MARGIN = 3
"""Number by which the idle team's threads exceed the unused cores. libgomp may not count the team's
first thread."""
WINDOW_S = 0.06
"""Length of a measurement window in seconds of computing. The threads switch between spinning and
sleeping only at the end of a window."""
CROWDED = 0.3
"""Threshold above which cores count as crowded: core-seconds that threads waited for a core, per
second of computing. Another program on one of two cores makes it 0.3 to 0.6; on an idle machine one
window in 200 reaches it."""
STEADY_WINDOWS = 32
"""Number of windows for which spinning must last before the switch to it counts as correct."""
MAX_PATIENCE = 8
"""Maximum number of consecutive quiet windows required before the threads spin again (see
``ComputeThreads._switch``). A short burst of other load then costs half a second of sleeping, which
is up to twice as slow as spinning."""


class LinuxCoreAccount:
    """Reader of the total time that this process's threads have waited for a core.

    One file descriptor per thread stays open, so that reading it costs a few microseconds per
    thread. Not thread-safe.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._last_waiting_ns: dict[str, int] = {}
        self._total_waiting_ns = 0

    @staticmethod
    def open() -> LinuxCoreAccount | None:
        """Return a new reader, or None if the kernel does not record waiting times."""
        try:
            with open(f"{_TASKS}/{os.getpid()}/schedstat", "rb") as file:
                return LinuxCoreAccount() if len(file.read().split()) == 3 else None
        except OSError:
            return None

    def total_waiting_s(self) -> float:
        """Return the total time in seconds that threads of this process were ready to run but had
        no core."""
        threads = set(os.listdir(_TASKS))
        for ended in self._files.keys() - threads:
            self._forget(ended)
        for thread in threads:
            waiting_ns = self._read_waiting_ns(thread)
            if waiting_ns is not None:
                # The time that a thread waited before it was first read belongs to no window and is
                # not counted.
                self._total_waiting_ns += waiting_ns - self._last_waiting_ns.get(thread, waiting_ns)
                self._last_waiting_ns[thread] = waiting_ns
        return self._total_waiting_ns * 1e-9

    def close(self) -> None:
        """Close all descriptors."""
        for thread in list(self._files):
            self._forget(thread)

    def _read_waiting_ns(self, thread: str) -> int | None:
        """Return the waiting time of a thread in nanoseconds, None if it has ended."""
        try:
            if thread not in self._files:
                self._files[thread] = os.open(
                    f"{_TASKS}/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC
                )
            return int(os.pread(self._files[thread], 128, 0).split()[1])
        except (OSError, IndexError):
            self._forget(thread)  # The thread has ended.
            return None

    def _forget(self, thread: str) -> None:
        self._last_waiting_ns.pop(thread, None)
        descriptor = self._files.pop(thread, None)
        if descriptor is not None:
            os.close(descriptor)


def find_libgomp() -> ctypes.CDLL | None:
    """Return the loaded libgomp, or None if the process has loaded none or more than one."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}
    if len(paths) != 1:
        return None
    library = ctypes.CDLL(paths.pop())
    return library if hasattr(library, "GOMP_parallel") else None


class OmpSpin:
    """Switch between long and short spinning of this process's OpenMP threads.

    ``computing`` is the number of threads that compute at the same time. Not thread-safe.
    """

    def __init__(self, library: Any, computing: int) -> None:
        self._library = library
        self._idle = max(2, len(os.sched_getaffinity(0)) - computing + _MARGIN)
        self._release: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @staticmethod
    def find(computing: int) -> OmpSpin | None:
        """Return the switch for the loaded libgomp, or None if the process has loaded none or more
        than one."""
        library = find_libgomp()
        return None if library is None else OmpSpin(library, computing)

    @property
    def is_short(self) -> bool:
        """Whether waiting threads sleep at once instead of spinning."""
        return self._thread is not None

    def shorten(self) -> None:
        """Make waiting threads sleep at once. Raises RuntimeError if the idle team does not
        start."""
        if self._thread is not None:
            return
        ready = threading.Event()
        release = threading.Event()
        self._thread = threading.Thread(
            target=self._park, args=(ready, release), name="idle-omp-team", daemon=True
        )
        self._release = release
        self._thread.start()
        if not process_clock.wait(ready.wait, _START_S):
            self.lengthen()
            raise RuntimeError(
                f"the idle team of OpenMP threads did not start within {_START_S:g} s"
            )

    def lengthen(self) -> None:
        """Make waiting threads spin, libgomp's default."""
        thread = self._thread
        release = self._release
        self._thread = self._release = None
        if thread is not None and release is not None:
            release.set()
            thread.join(_START_S)

    def _park(self, ready: threading.Event, release: threading.Event) -> None:
        """Start the idle team by running an empty parallel region, then wait for ``release``. The
        team's threads belong to the calling thread and end with it."""
        no_work = ctypes.cast(self._library.omp_get_thread_num, ctypes.c_void_p)
        self._library.GOMP_parallel(no_work, None, self._idle, 0)
        ready.set()
        release.wait()


class ComputeThreads:
    """The ``count`` compute threads of an engine.

    With an ``account`` and a ``spin`` they sleep at barriers while other programs use the cores.
    They start in the sleeping state, because spinning on crowded cores is the more expensive
    mistake. Not thread-safe: only the thread that computes may call it.
    """

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
        self._clock = clock
        self._set_threads = set_threads
        self._account = account if spin is not None and count > 1 else None
        self._spin = spin
        # Clock and waiting time at the last measurement, seconds.
        self._measured_at = 0.0
        self._measured_waiting_s = 0.0
        # Computing and waiting time of the current window, seconds.
        self._window_s = 0.0
        self._window_waiting_s = 0.0
        # State of _switch: quiet windows required before spinning, quiet windows in a row, windows
        # since spinning started (STEADY_WINDOWS or more: not on trial).
        self._patience = 1
        self._quiet = 0
        self._since_spin = STEADY_WINDOWS
        if self._account is not None and spin is not None:
            self._sleep(spin)

    def use_in_this_thread(self) -> None:
        """Make the calling thread compute with ``count`` threads."""
        self._set_threads(self.count)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Context manager for computing on the calling thread without interruption; it measures
        whether cores are free.

        The time between two such blocks is not measured, because other processes may then work for
        this engine.
        """
        self.use_in_this_thread()
        if self._account is None:
            yield
            return
        self._measured_at = self._clock()
        self._measured_waiting_s = self._account.total_waiting_s()
        try:
            yield
        finally:
            self._measure(self._account)

    def measure_if_due(self) -> None:
        """Evaluate the current measurement window if it is over. Cheap enough to be called between
        the passes of a block."""
        if self._account is not None and self._clock() - self._measured_at >= WINDOW_S:
            self._measure(self._account)

    def _measure(self, account: LinuxCoreAccount) -> None:
        """Add the time since the last measurement to the window, and evaluate the window if it is
        complete."""
        now = self._clock()
        waiting_s = account.total_waiting_s()
        self._window_s += now - self._measured_at
        self._window_waiting_s += waiting_s - self._measured_waiting_s
        self._measured_at = now
        self._measured_waiting_s = waiting_s
        if self._window_s >= WINDOW_S and self._spin is not None:
            crowded = self._window_waiting_s / self._window_s >= CROWDED
            self._window_s = 0.0
            self._window_waiting_s = 0.0
            self._switch(self._spin, crowded)

    def _switch(self, spin: OmpSpin, crowded: bool) -> None:
        """Choose between spinning and sleeping after a window, with exponential back-off.

        Two states. Spinning: the first crowded window switches to sleeping. Sleeping: ``_patience``
        quiet windows in a row switch to spinning, which is then on trial for ``STEADY_WINDOWS``
        windows. A trial that fails doubles the patience, up to ``MAX_PATIENCE``; one that
        succeeds resets it to 1.
        """
        self._since_spin += 1
        if self._since_spin == STEADY_WINDOWS:
            self._patience = 1  # The trial succeeded.
        self._quiet = 0 if crowded else self._quiet + 1
        if crowded and not spin.is_short:
            if self._since_spin < STEADY_WINDOWS:
                self._patience = min(2 * self._patience, MAX_PATIENCE)  # The trial failed.
            # The count stays at STEADY_WINDOWS or above while asleep, so that it cannot reset the
            # patience.
            self._since_spin = STEADY_WINDOWS
            self._sleep(spin)
        elif spin.is_short and self._quiet >= self._patience:
            self._quiet = 0
            self._since_spin = 0
            spin.lengthen()

    def _sleep(self, spin: OmpSpin) -> None:
        """Switch to sleeping. If that fails, the threads keep spinning: slow is better than failing
        the run."""
        try:
            spin.shorten()
        except RuntimeError as error:
            self._account = None
            _log.warning(
                "%s: threads spin at every barrier from now on, whatever other programs do", error
            )


def unmanaged_threads() -> ComputeThreads:
    """Return compute threads that leave torch's number of threads unchanged."""
    return ComputeThreads(1, set_threads=lambda _: None)


def threads(count: int) -> ComputeThreads:
    """Return ``count`` compute threads that sleep while other programs use the cores.

    If the kernel does not record waiting times, or torch uses an OpenMP library other than libgomp,
    the threads always spin and a warning is logged.
    """
    if count == 1:
        return ComputeThreads(1)
    account = LinuxCoreAccount.open()
    spin = OmpSpin.find(count)
    if account is None or spin is None:
        missing = (
            "the kernel does not tell how long threads wait"
            if account is None
            else "torch uses no libgomp"
        )
        _log.warning(
            "%s: %d threads spin at every barrier, which is many times slower while other programs "
            "keep cores busy",
            missing,
            count,
        )
    return ComputeThreads(count, account, spin)
