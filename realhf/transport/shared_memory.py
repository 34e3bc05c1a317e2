"""Shared memory between processes of one host, and reuse of receive memory.

A segment is an anonymous memory file (memfd) of the producer. The consumer opens it through the
producer's /proc entry, so there is no name to unlink: the kernel frees the memory when the last
process that holds it ends. Consumers hold a shared file lock while they use a segment. The producer
refills a cleared segment only under an exclusive lock, and gives every filling a number, by which a
late consumer notices the refill. Consumers map copy-on-write: their writes are private.

Setting up a mapping costs a page fault per page, as much as copying the data. So mappings whose
tensors are gone are kept, and reused when the producer refills the same segment, unless the
consumer wrote to them. The lock on a segment lasts as long as the tensors, not as long as the
mapping.

New receive memory costs the kernel a page fault and zeroing for every page, which is as much work
as receiving into it, and far more when large pages are scarce. A trainer fetches batches of about
the same size in each step, so ``TargetMemory`` reuses it.
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
"""Buffers start at multiples of this many bytes; the first bytes of a segment hold the filling
number."""
PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class SegmentRef:
    """Location of the current contents of a segment, by which another process on the host can map
    them."""

    pid: int
    """Process id of the producer."""
    descriptor: int
    """File descriptor of the segment in that process."""
    inode: int
    """Inode of the memory file, by which a reused descriptor is detected."""
    filling: int
    offsets: list[int]
    """Start of each buffer in the segment, in bytes."""
    sizes: list[int]
    """Size of each buffer, in bytes."""

    def to_map(self) -> dict[str, Any]:
        """Return the reference as plain data for a message."""
        return asdict(self)

    @staticmethod
    def from_map(value: Any) -> SegmentRef:
        """Parse the result of ``to_map``. Raises ProtocolError for anything else."""
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
    """Producer's side of a segment. Raises OSError if the system is out of memory."""

    def __init__(self, capacity: int) -> None:
        self.capacity = -(-capacity // PAGE) * PAGE
        self._descriptor = os.memfd_create("realhf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._filling = 0
        self._map: mmap.mmap | None = None
        os.ftruncate(self._descriptor, self.capacity)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def fill(self, buffers: Sequence[bytes | memoryview]) -> SegmentRef | None:
        """Write new contents and return their location; return None if a consumer still reads the
        old ones. Raises OSError."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        offsets, end = compute_offsets([view.nbytes for view in views])
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
        # Allocating pages, in the first filling, is faster by pwrite; later fillings write to a
        # mapping.
        if self._filling > 1:
            if self._map is None:
                self._map = mmap.mmap(self._descriptor, self.capacity)
            self._map[offset : offset + view.nbytes] = view  # pyright: ignore[reportArgumentType, reportCallIssue]
            return
        done = 0
        while done < view.nbytes:
            done += os.pwrite(self._descriptor, view[done:], offset + done)

    def close(self) -> None:
        """Release the memory in this process; consumers that have mapped it keep it."""
        if self._map is not None:
            self._map.close()
        os.close(self._descriptor)


def compute_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the aligned offsets of buffers after the filling number, and the total size."""
    offsets = []
    end = ALIGNMENT
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


class SegmentPool:
    """Segments in use, by name, and up to ``spare_bytes`` of released segments for reuse. Not
    thread-safe."""

    def __init__(self, spare_bytes: int) -> None:
        self._spare_bytes = spare_bytes
        self._used: dict[Any, tuple[Segment, SegmentRef]] = {}
        self._spare: list[Segment] = []

    def find(self, name: Any) -> SegmentRef | None:
        """Return the location of the contents with this name; None if there are none."""
        entry = self._used.get(name)
        return entry[1] if entry else None

    def store(self, name: Any, buffers: Sequence[bytes | memoryview]) -> SegmentRef | None:
        """Copy buffers into a segment and return their location; None if the system has no memory
        for one."""
        _, size = compute_offsets([memoryview(buffer).nbytes for buffer in buffers])
        # The smallest released segment that fits, if it is not much too large and no consumer reads
        # it.
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
        """Release the contents with this name, and keep the segment for reuse."""
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
        """Total bytes of all segments, including the ones kept for reuse."""
        return sum(s.capacity for s, _ in self._used.values()) + sum(
            s.capacity for s in self._spare
        )


# Flags of an entry of /proc/self/pagemap.
FILE_PAGE = 1 << 61
SWAPPED = 1 << 62
PRESENT = 1 << 63
ByteArray = np.ndarray[Any, np.dtype[np.uint8]]


class MappingCache:
    """Cache of a consumer's mappings of segments. Up to ``idle_bytes`` of unused mappings are kept
    for reuse. Thread-safe."""

    def __init__(self, idle_bytes: int) -> None:
        self._idle_bytes = idle_bytes
        self._idle: dict[tuple[int, int], mmap.mmap] = {}
        # Reentrant: the garbage collector may return a mapping while this thread holds the lock.
        self._lock = threading.RLock()

    def open(self, ref: SegmentRef) -> list[memoryview] | None:
        """Map the buffers of a segment's contents; return None if the segment cannot be opened or
        the contents no longer exist.

        Raises ProtocolError if the reference does not fit the segment.
        """
        path = f"/proc/{ref.pid}/fd/{ref.descriptor}"
        try:
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            views = self._open_views(ref, path, lock)
        except BaseException:
            os.close(lock)
            raise
        if views is None:
            os.close(lock)
        return views

    def _open_views(self, ref: SegmentRef, path: str, lock: int) -> list[memoryview] | None:
        try:
            status = os.fstat(lock)
            if status.st_ino != ref.inode:
                return None
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if int.from_bytes(os.pread(lock, 8, 0), "little") != ref.filling:
                return None
            if any(
                offset + size > status.st_size
                for offset, size in zip(ref.offsets, ref.sizes, strict=True)
            ):
                raise ProtocolError("a segment reference points behind the end of its segment")
            mapping = self._mapping(path, (status.st_dev, status.st_ino), status.st_size)
        except OSError:
            return None
        whole: ByteArray = np.frombuffer(mapping, dtype=np.uint8)
        weakref.finalize(whole, self._release, (status.st_dev, status.st_ino), mapping, lock)
        view = memoryview(whole)  # pyright: ignore[reportArgumentType]
        return [
            view[offset : offset + size]
            for offset, size in zip(ref.offsets, ref.sizes, strict=True)
        ]

    def _mapping(self, path: str, name: tuple[int, int], size: int) -> mmap.mmap:
        with self._lock:
            mapping = self._idle.pop(name, None)
        # An idle mapping keeps its inode in use, so an equal number means the same segment.
        if mapping is not None and _is_unwritten(mapping):
            return mapping
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if (os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino) != name:
                raise FileNotFoundError(path)
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)

    def _release(self, name: tuple[int, int], mapping: mmap.mmap, lock: int) -> None:
        """Keep a mapping for reuse, because its last tensor is gone; drop the oldest ones beyond
        ``idle_bytes``."""
        os.close(lock)
        with self._lock:
            self._idle[name] = mapping
            while sum(map(len, list(self._idle.values()))) > self._idle_bytes:
                del self._idle[next(iter(self._idle))]

    def close(self) -> None:
        """Release the unused mappings; the others are released with their tensors."""
        with self._lock:
            self._idle_bytes = 0
            self._idle.clear()


def _is_unwritten(mapping: mmap.mmap) -> bool:
    """Return whether no page of a private mapping has been written to (then each still belongs to
    the file)."""
    whole: ByteArray = np.frombuffer(mapping, dtype=np.uint8)
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
"""Size in bytes from which memory is kept for reuse; smaller blocks are reused by the allocator
itself."""


class TargetMemory:
    """Pool of receive memory. Up to ``idle_bytes`` of unused memory are kept, which the kernel may
    reclaim. Thread-safe."""

    def __init__(self, idle_bytes: int) -> None:
        self._idle_bytes = idle_bytes
        self._idle: list[mmap.mmap] = []
        # Reentrant: the garbage collector may return memory while this thread holds the lock.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> ByteArray:
        """Return an uninitialised u8 array ``(nbytes,)``. Raises MemoryError."""
        if nbytes < KEPT_FROM_BYTES:
            return np.empty(nbytes, dtype=np.uint8)
        mapping = self._reuse(nbytes) or _map_memory(nbytes)
        memory: ByteArray = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
        weakref.finalize(memory, self._recycle, mapping).atexit = False
        return memory

    @property
    def idle_bytes(self) -> int:
        """Bytes of unused memory that is kept."""
        with self._lock:
            return sum(map(len, self._idle))

    def close(self) -> None:
        """Release the unused memory; the rest is released with its tensors."""
        with self._lock:
            self._idle_bytes = 0
            self._idle.clear()

    def _reuse(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            fitting = [mapping for mapping in self._idle if nbytes <= len(mapping) <= 2 * nbytes]
            if not fitting:
                return None
            chosen = min(fitting, key=len)
            self._idle = [mapping for mapping in self._idle if mapping is not chosen]
            return chosen

    def _recycle(self, mapping: mmap.mmap) -> None:
        _advise(mapping, mmap.MADV_FREE)
        with self._lock:
            self._idle.append(mapping)
            while sum(map(len, self._idle)) > self._idle_bytes:
                self._idle.pop(0)


def _map_memory(nbytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(
            -1, -(-nbytes // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except OSError:
        raise MemoryError(f"there are no {nbytes} bytes of memory for what was fetched") from None
    _advise(mapping, mmap.MADV_HUGEPAGE)
    return mapping


def _advise(mapping: mmap.mmap, advice: int) -> None:
    with contextlib.suppress(OSError):  # the kernel does not know this advice
        mapping.madvise(advice)
