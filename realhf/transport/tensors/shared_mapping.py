"""Maps shared memory segments of other processes, on the consumer's side.

A mapping is private, so what the consumer writes stays with it. Setting one up costs a page fault per page, as much as
the copy itself. So mappings whose tensors are gone are kept and used again when the producer fills the same segment
anew, unless the consumer wrote to them. The lock on a segment belongs to the tensors and not to the mapping: see
shared_memory.py.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np

from realhf.transport.errors import ProtocolError
from realhf.transport.tensors.shared_memory import SegmentRef

PAGE = mmap.PAGESIZE
FILE_PAGE, SWAPPED, PRESENT = 1 << 61, 1 << 62, 1 << 63

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class MappingCache:
    """Maps segments and keeps at most ``idle_bytes`` of mappings that no tensor uses. Thread-safe."""

    def __init__(self, idle_bytes: int) -> None:
        self._idle_bytes = idle_bytes
        self._idle: dict[tuple[int, int], mmap.mmap] = {}
        # Reentrant: the garbage collector may return a mapping while this thread holds the lock.
        self._lock = threading.RLock()

    def open(self, ref: SegmentRef) -> list[memoryview] | None:
        """Open the buffers of a filling; None when it cannot be reached or no longer exists. Raises ProtocolError when
        the reference contradicts the segment."""
        path = f"/proc/{ref.pid}/fd/{ref.descriptor}"
        try:
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            views = self._locked_views(ref, path, lock)
        except BaseException:
            os.close(lock)
            raise
        if views is None:
            os.close(lock)
        return views

    def _locked_views(self, ref: SegmentRef, path: str, lock: int) -> list[memoryview] | None:
        try:
            status = os.fstat(lock)
            if status.st_ino != ref.inode:
                return None
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if int.from_bytes(os.pread(lock, 8, 0), "little") != ref.filling:
                return None
            if any(offset + size > status.st_size for offset, size in zip(ref.offsets, ref.sizes, strict=True)):
                raise ProtocolError("a segment reference points behind the end of its segment")
            mapping = self._mapping(path, (status.st_dev, status.st_ino), status.st_size)
        except OSError:
            return None
        whole: Bytes = np.frombuffer(mapping, dtype=np.uint8)
        weakref.finalize(whole, self._release, (status.st_dev, status.st_ino), mapping, lock)
        view = memoryview(whole)  # pyright: ignore[reportArgumentType]
        return [view[offset : offset + size] for offset, size in zip(ref.offsets, ref.sizes, strict=True)]

    def _mapping(self, path: str, name: tuple[int, int], size: int) -> mmap.mmap:
        with self._lock:
            mapping = self._idle.pop(name, None)
        # An idle mapping keeps its inode in use, so the same number means the same segment.
        if mapping is not None and _unwritten(mapping):
            return mapping
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if (os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino) != name:
                raise FileNotFoundError(path)
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)

    def _release(self, name: tuple[int, int], mapping: mmap.mmap, lock: int) -> None:
        """Take back a mapping whose last tensor is gone."""
        os.close(lock)
        with self._lock:
            self._idle[name] = mapping
            while sum(map(len, list(self._idle.values()))) > self._idle_bytes:
                del self._idle[next(iter(self._idle))]

    def close(self) -> None:
        """Give up the idle mappings; those in use end with their tensors."""
        with self._lock:
            self._idle_bytes = 0
            self._idle.clear()


def _unwritten(mapping: mmap.mmap) -> bool:
    """Return whether every page of a private mapping is still the file's own."""
    whole: Bytes = np.frombuffer(mapping, dtype=np.uint8)
    pages = -(-len(whole) // PAGE)
    try:
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        raw = os.pread(descriptor, 8 * pages, whole.ctypes.data // PAGE * 8)
    finally:
        os.close(descriptor)
    entries = np.frombuffer(raw, dtype=np.uint64)
    in_use = (entries & np.uint64(PRESENT | SWAPPED)) != 0
    own = (entries & np.uint64(FILE_PAGE)) == 0
    return len(entries) == pages and not bool((in_use & own).any())
