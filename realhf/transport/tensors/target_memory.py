"""Gives memory for what a consumer fetches, and takes it back when the last tensor in it is gone.

Fresh memory costs the kernel a page fault and zeros for every page, which is as much work as receiving into it and far
more when large pages are scarce. A trainer fetches batches of about the same size step after step.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from typing import Any

import numpy as np

from realhf.transport.tensors.shared_memory import PAGE

KEPT_FROM_BYTES = 4 << 20
"""Smaller memory is not kept: the allocator does that."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class TargetMemory:
    """Keeps at most ``idle_bytes`` of memory that no tensor uses; the kernel may take it when it needs some, without
    asking. Thread-safe."""

    def __init__(self, idle_bytes: int) -> None:
        self._idle_bytes = idle_bytes
        self._idle: list[mmap.mmap] = []
        # Reentrant: the garbage collector may return memory while this thread holds the lock.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> Bytes:
        """Return u8 ``(nbytes,)`` of any content; whoever gets it writes all of it. Raises MemoryError."""
        if nbytes < KEPT_FROM_BYTES:
            return np.empty(nbytes, dtype=np.uint8)
        mapping = self._used_again(nbytes) or _fresh(nbytes)
        found: Bytes = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
        weakref.finalize(found, self._take_back, mapping).atexit = False
        return found

    @property
    def idle_bytes(self) -> int:
        """Count the bytes that are kept for use again."""
        with self._lock:
            return sum(map(len, self._idle))

    def close(self) -> None:
        """Give up what is idle; what is in use ends with its tensors."""
        with self._lock:
            self._idle_bytes = 0
            self._idle.clear()

    def _used_again(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            fitting = [mapping for mapping in self._idle if nbytes <= len(mapping) <= 2 * nbytes]
            if not fitting:
                return None
            chosen = min(fitting, key=len)
            self._idle = [mapping for mapping in self._idle if mapping is not chosen]
            return chosen

    def _take_back(self, mapping: mmap.mmap) -> None:
        _advise(mapping, mmap.MADV_FREE)
        with self._lock:
            self._idle.append(mapping)
            while sum(map(len, self._idle)) > self._idle_bytes:
                self._idle.pop(0)


def _fresh(nbytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, -(-nbytes // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError(f"there are no {nbytes} bytes of memory for what was fetched") from None
    _advise(mapping, mmap.MADV_HUGEPAGE)
    return mapping


def _advise(mapping: mmap.mmap, advice: int) -> None:
    with contextlib.suppress(OSError):  # a kernel that does not know it
        mapping.madvise(advice)
