"""Shares memory between processes of one host, and keeps memory that was fetched into for use again.

A segment is an anonymous memory file (memfd) of the producer. The consumer opens it through the producer's /proc entry,
so there is no name to unlink or to sweep: the kernel frees the memory when the last process that holds it ends, however
it ends. Consumers hold a shared file lock as long as they use a segment; the producer writes new contents into a
cleared segment only under an exclusive lock, and every filling has a number of its own, so a consumer that comes late
notices it. Consumers map privately: what they write stays with them.

Setting a mapping up costs a page fault per page, as much as the copy itself. So mappings whose tensors are gone are
kept and used again when the producer fills the same segment anew, unless the consumer wrote to them. The lock on a
segment belongs to the tensors and not to the mapping.

Fresh memory costs the kernel a page fault and zeros for every page, which is as much work as receiving into it and far
more when large pages are scarce. A trainer fetches batches of about the same size step after step.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from realhf.transport.errors import ProtocolError

ALIGNMENT = 64
PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class SegmentRef:
    """Says where a filling of a segment is: enough for another process of the host to map it."""

    pid: int
    descriptor: int
    inode: int
    filling: int
    offsets: list[int]
    sizes: list[int]

    def to_map(self) -> dict[str, Any]:
        """Return the reference as plain data for a message."""
        return asdict(self)

    @staticmethod
    def from_map(value: Any) -> SegmentRef:
        """Read what ``to_map`` returned. Raises ProtocolError on a map that is not a reference."""
        try:
            ref = SegmentRef(**value)
        except TypeError as error:
            raise ProtocolError(f"not a segment reference: {error}") from None
        lists = (ref.offsets, ref.sizes)
        numbers = [ref.pid, ref.descriptor, ref.inode, ref.filling]
        if not all(isinstance(x, list) for x in lists) or len(ref.offsets) != len(ref.sizes):
            raise ProtocolError("not a segment reference: offsets and sizes do not match")
        if not all(type(n) is int and n >= 0 for n in [*numbers, *ref.offsets, *ref.sizes]):
            raise ProtocolError("not a segment reference: negative or non-integer number")
        return ref


class Segment:
    """Owns one segment on the producer's side. Raises OSError when the system has no memory left."""

    def __init__(self, capacity: int) -> None:
        self.capacity = -(-capacity // PAGE) * PAGE
        self._descriptor = os.memfd_create("realhf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._filling = 0
        self._map: mmap.mmap | None = None
        os.ftruncate(self._descriptor, self.capacity)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def fill(self, buffers: Sequence[bytes | memoryview]) -> SegmentRef | None:
        """Write new contents; return None when a consumer still reads the old ones."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        offsets, end = layout([view.nbytes for view in views])
        if end > self.capacity:
            raise ValueError(f"{end} bytes do not fit a segment of {self.capacity}")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        try:
            self._filling += 1
            os.pwrite(self._descriptor, self._filling.to_bytes(8, "little"), 0)
            for offset, view in zip(offsets, views, strict=True):
                self._write(offset, view)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        inode = os.fstat(self._descriptor).st_ino
        sizes = [view.nbytes for view in views]
        return SegmentRef(os.getpid(), self._descriptor, inode, self._filling, offsets, sizes)

    def _write(self, offset: int, view: memoryview) -> None:
        # The first filling allocates pages, which is faster by pwrite; later ones write to the mapping.
        if self._filling > 1:
            if self._map is None:
                self._map = mmap.mmap(self._descriptor, self.capacity)
            self._map[offset : offset + view.nbytes] = view  # pyright: ignore[reportArgumentType, reportCallIssue]
            return
        done = 0
        while done < view.nbytes:
            done += os.pwrite(self._descriptor, view[done:], offset + done)

    def close(self) -> None:
        """Release the memory here; consumers that have mapped it keep it."""
        if self._map is not None:
            self._map.close()
        os.close(self._descriptor)


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the aligned offsets of buffers behind the filling number, and the total size."""
    offsets, end = [], ALIGNMENT
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


class SegmentPool:
    """Holds segments in use by name, and keeps cleared ones for the next filling (at most ``spare_bytes``). Not
    thread-safe."""

    def __init__(self, spare_bytes: int) -> None:
        self._spare_bytes = spare_bytes
        self._used: dict[Any, tuple[Segment, SegmentRef]] = {}
        self._spare: list[Segment] = []

    def find(self, name: Any) -> SegmentRef | None:
        """Return where the contents of this name are, or None."""
        entry = self._used.get(name)
        return entry[1] if entry else None

    def store(self, name: Any, buffers: Sequence[bytes | memoryview]) -> SegmentRef | None:
        """Copy buffers into a segment; None when the system has no memory for one."""
        _, size = layout([memoryview(buffer).nbytes for buffer in buffers])
        for segment in sorted(self._spare, key=lambda s: s.capacity):
            if size <= segment.capacity <= 2 * size + PAGE:
                ref = segment.fill(buffers)
                if ref is not None:
                    self._spare.remove(segment)
                    self._used[name] = (segment, ref)
                    return ref
        segment = None
        try:
            segment = Segment(size)
            ref = segment.fill(buffers)
        except OSError:
            ref = None
        if ref is None:
            if segment is not None:
                segment.close()
            return None
        self._used[name] = (segment, ref)  # pyright: ignore[reportArgumentType]
        return ref

    def release(self, name: Any) -> None:
        """Stop serving the contents under this name."""
        entry = self._used.pop(name, None)
        if entry is None:
            return
        self._spare.append(entry[0])
        while sum(segment.capacity for segment in self._spare) > self._spare_bytes:
            self._spare.pop(0).close()

    def close(self) -> None:
        """Release all segments."""
        for segment, _ in self._used.values():
            segment.close()
        for segment in self._spare:
            segment.close()
        self._used.clear()
        self._spare.clear()

    @property
    def nbytes(self) -> int:
        """Count the bytes of all segments, spare ones included."""
        return sum(s.capacity for s, _ in self._used.values()) + sum(s.capacity for s in self._spare)


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


KEPT_FROM_BYTES = 4 << 20
"""Smaller memory is not kept: the allocator does that."""


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
