"""Changes how long OpenMP threads spin at a barrier before they sleep, while the process runs.

libgomp lets a waiting thread spin for about three milliseconds, but hardly at all once it manages more threads than
there are cores. A parked team of idle threads makes that so, and its end undoes it. The number of threads that compute
and the way their work is divided stay what they are, so every result is the same to the last bit.

Source: libgomp's ``config/linux/wait.h`` (``do_spin``) and the description of ``GOMP_SPINCOUNT`` in its manual.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

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
        if not ready.wait(_START_S):
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
