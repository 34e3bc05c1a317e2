"""Payload files: append-only segments of bounded size. A file is deleted when no record refers to
anything in it.

A single group in a mix buffer or in quarantine would keep a whole file. Therefore the unused parts
of mostly empty files are returned to the disk as holes; payloads never move. A reference is
``segment << 40 | offset``. Source: docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from realhf.trajectory.records import Payload

logger = logging.getLogger(__name__)
SEGMENT_BYTES = 64 << 20
"""Size at which a new file is started."""
_OFFSET_BITS = 40
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_MAX_BUFFERS = 512
"""Maximum number of payloads in one write, because the system limits the buffers of one call."""
_SLACK_FILES = 2
"""Number of mostly empty files that do not yet trigger compaction."""
_SPARE_FILES = 1
"""Number of emptied files kept for reuse, because their disk blocks are already allocated. These
and the file being written account for ``_SLACK_FILES``."""


class _Handle:
    """File descriptor that is closed when its last reference is dropped, because a read may outlive
    its file."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


@dataclass(eq=False)
class SegmentFile:
    """State of one segment file."""

    path: Path
    """Path of the file."""
    size: int = 0
    """Number of bytes that are assigned to payloads."""
    taken: int = 0
    """Bytes that occupy disk space: the size without holes."""
    room: int = 0
    """Bytes already allocated when a reused file was started; 0 for a new file."""
    live: int = 0
    """Number of references from committed records."""
    staged: int = 0
    """Number of references that are not committed yet."""
    handle: _Handle | None = None
    """Open descriptor; None if the file is not open."""

    @property
    def on_disk(self) -> int:
        """Bytes that the file occupies on the disk."""
        return max(self.taken, self.room)


class Segments:
    """Set of segment files. One thread appends, any thread reads. ``stage`` assigns offsets
    immediately; the bytes stay in memory until ``write``.

    A reference is *staged* until a commit keeps or frees it, or its owner discards it
    (``unstage``); it is *live* as long as a committed record refers to it. A file without
    references is deleted. After every failure live references are counted again from the records
    (``recount``), so a wrong count cannot delete a file in use. Only the event loop changes the
    tables; writers and readers look up a file and keep its handle while they use it.
    """

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._limit = segment_bytes
        self._files: dict[int, SegmentFile] = {}
        self._staged: set[int] = set()
        self._waiting: dict[int, bytes] = {}
        self.waiting_bytes = 0
        """Bytes that are staged and not written yet."""
        self.tight = False
        """Whether the disk is nearly full, so that mostly empty files are no longer tolerated."""
        self._spare: deque[tuple[Path, _Handle]] = deque()
        self._compact_from = 0
        """Number of the first file that may be compacted; earlier files may be referenced by
        damaged rows."""
        self._knows_holes = True
        self._new_names = False
        self._active = 0

    def restore(self, payloads: Sequence[Payload], *, keep_unused: bool) -> None:
        """Count references, open the referenced files, and delete the others unless
        ``keep_unused``; writing continues in a new segment. Raises OSError only if the folder
        itself cannot be read."""
        paths = {int(path.stem): path for path in self._folder.glob("*.seg") if path.stem.isdigit()}
        for number, path in paths.items():
            stats = path.stat()
            self._files[number] = SegmentFile(
                path, stats.st_size, min(stats.st_size, 512 * stats.st_blocks or stats.st_size)
            )
        self.recount(payloads)
        unused = [number for number, file in self._files.items() if not file.live]
        gone = [self._files.pop(number).path for number in unused]
        for path in (*(() if keep_unused else gone), *self._folder.glob("*.spare")):
            path.unlink(missing_ok=True)
        for file in self._files.values():
            try:  # now, while descriptors are available; a read should need none
                file.handle = _Handle(file.path)
            except OSError as error:
                logger.error("%s cannot be opened now, and is left as it is: %s", file.path, error)
        # File numbers are never reused.
        self._active = max([self._active, *paths, *map(_number_of, payloads)])
        self._begin_file()
        self._compact_from = self._active if keep_unused else 0

    def recount(self, payloads: Iterable[Payload]) -> None:
        """Count the live references in the committed records. A staged payload among them was
        committed after all, and becomes live."""
        for file in self._files.values():
            file.live = 0
        for payload in payloads:
            self._end_staging(ref_of(payload))
            if file := self._files.get(_number_of(payload)):
                file.live += 1

    def contains(self, payload: Payload) -> bool:
        """Return whether the payload lies within its file; a payload in a truncated end of the file
        does not."""
        file = self._files.get(_number_of(payload))
        return file is not None and file.size >= (ref_of(payload) & _OFFSET_MASK) + payload.nbytes

    def stage(self, payloads: Sequence[bytes]) -> list[int]:
        """Assign references to payloads; the next ``write`` writes them."""
        refs = []
        for payload in payloads:
            file = self._files[self._active]
            if file.size and file.size + len(payload) > self._limit:
                file = self._begin_file()
            ref = self._active << _OFFSET_BITS | file.size
            self._waiting[ref] = payload
            self.waiting_bytes += len(payload)
            file.size += len(payload)
            file.taken += len(payload)
            file.staged += 1
            self._staged.add(ref)
            refs.append(ref)
        return refs

    def waiting(self) -> dict[int, bytes]:
        """Return the payloads that are staged and not written, in order."""
        return dict(self._waiting)

    def write(self, staged: dict[int, bytes], durable: bool) -> None:
        """Write staged payloads, each to its own offset. Raises OSError; a retry writes to the same
        offsets."""
        written = set()
        for ref, payloads in _runs(staged):
            # The file is missing if everything in it has been discarded.
            if file := self._files.get(ref >> _OFFSET_BITS):
                file.handle = file.handle or self._new_file(file)
                _write_all(file.handle.number, ref & _OFFSET_MASK, payloads)
                written.add(file.handle)
        if durable:
            for handle in written:
                os.fdatasync(handle.number)
        if durable and self._new_names:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            self._new_names = (
                False  # only after the flush: after a failure the next try has to flush
            )

    def drop_written(self, staged: dict[int, bytes]) -> None:
        """Drop these payloads from memory after they have been written."""
        for ref in staged:
            self._drop_waiting(ref)

    def bytes_waiting(self, ref: int) -> bytes | None:
        """Return the bytes of a payload that is not written yet, or None."""
        return self._waiting.get(ref)

    def mark_live(self, payloads: Iterable[Payload]) -> None:
        """Mark these payloads as committed; staged ones become live."""
        for payload in payloads:
            if self._end_staging(ref_of(payload)):
                self._files[_number_of(payload)].live += 1

    def unstage(self, refs: Iterable[int]) -> None:
        """Discard staged payloads that no record will refer to. Payloads that are no longer staged
        belong to a record and stay."""
        for ref in refs:
            if self._end_staging(ref):
                self._drop_waiting(ref)

    def read(self, payload: Payload) -> bytes:
        """Read one payload. Returns fewer bytes if the file ends early, and none if the file was
        deleted. Raises OSError if it cannot be read now. Does not block writers."""
        file = self._files.get(_number_of(payload))
        offset = ref_of(payload) & _OFFSET_MASK
        if file is None:
            return b""
        handle = file.handle
        if handle is None:  # it could not be opened at the start, or is being deleted
            try:
                file.handle = handle = _Handle(file.path)
            except FileNotFoundError:
                return b""
        pieces = []
        missing = payload.nbytes
        while missing and (piece := os.pread(handle.number, missing, offset)):
            pieces.append(piece)
            offset = offset + len(piece)
            missing = missing - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def free(self, refs: Iterable[int]) -> list[SegmentFile]:
        """Drop references that no record holds any more. Returns the files without references, for
        ``remove``."""
        for ref in refs:
            if self._end_staging(ref):
                self._drop_waiting(ref)
            elif file := self._files.get(ref >> _OFFSET_BITS):
                file.live -= 1
        empty = [
            number
            for number, file in self._files.items()
            if number != self._active and file.live <= 0 and file.staged <= 0
        ]
        return [self._files.pop(number) for number in empty]

    def end_active(self) -> list[SegmentFile]:
        """Continue in a new file, so that the current one can be deleted or compacted. Returns the
        files without references, for ``remove``."""
        if self._files[self._active].size:
            self._begin_file()
        return self.free(())

    def is_wasteful(self, held_bytes: int) -> bool:
        """Return whether the files occupy more than twice the bytes in use (``held_bytes``) plus a
        slack of a few files."""
        taken = sum(
            file.on_disk for number, file in self._files.items() if number >= self._compact_from
        )
        return self._knows_holes and taken > 2 * held_bytes + (
            0 if self.tight else _SLACK_FILES * self._limit
        )

    def closed_files(self) -> dict[int, SegmentFile]:
        """Return the files that may get holes: they are no longer written to, and no commit refers
        to them."""
        return {
            number: file
            for number, file in self._files.items()
            if number >= self._compact_from and number != self._active and not file.staged
        }

    def punch_holes(self, number: int, file: SegmentFile, gaps: Sequence[tuple[int, int]]) -> int:
        """Punch holes at the gaps (offset, length) of a file; return the number of bytes freed.
        Must be called on the thread that calls ``remove``."""
        if self._files.get(number) is not file or file.handle is None or not self._knows_holes:
            return 0  # the file was deleted or reused
        for offset, length in gaps:
            start = -(-offset // _BLOCK_BYTES) * _BLOCK_BYTES
            end = (offset + length) // _BLOCK_BYTES * _BLOCK_BYTES
            if start < end and _fallocate(
                file.handle.number, _PUNCH_HOLE | _KEEP_SIZE, start, end - start
            ):
                code = ctypes.get_errno()
                if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise OSError(code, os.strerror(code), str(file.path))
                logger.warning(
                    "%s: this disk knows no holes, so files go only when they are empty",
                    self._folder,
                )
                self._knows_holes = False
                return 0
        before = file.on_disk
        end = max(file.size, file.room)
        file.taken = end - sum(length for _, length in gaps)
        file.room = 0
        return before - file.taken

    def remove(self, files: Sequence[SegmentFile]) -> None:
        """Keep files for reuse, or delete them. Slow, so it must be called off the event loop."""
        for file in files:
            handle = file.handle
            file.handle = None
            # A file that grew beyond the limit for a single large payload is not kept, because it
            # would hold more space than the slack allows.
            if (
                handle
                and len(self._spare) < _SPARE_FILES
                and os.fstat(handle.number).st_size <= self._limit
            ):
                self._spare.append((file.path.rename(file.path.with_suffix(".spare")), handle))
            else:
                file.path.unlink(missing_ok=True)

    def delete_spares(self) -> bool:
        """Delete the files kept for reuse; return whether there were any."""
        deleted = False
        with suppress(IndexError):
            while True:
                self._spare.pop()[0].unlink(missing_ok=True)
                deleted = True
        return deleted

    def close(self) -> None:
        """Close all files."""
        self._spare.clear()
        for file in self._files.values():
            file.handle = None

    def _end_staging(self, ref: int) -> bool:
        """End the staging of a reference; return whether it was staged."""
        if ref not in self._staged:
            return False
        self._staged.remove(ref)
        self._files[ref >> _OFFSET_BITS].staged -= 1
        return True

    def _drop_waiting(self, ref: int) -> None:
        self.waiting_bytes -= len(self._waiting.pop(ref, b""))

    def _begin_file(self) -> SegmentFile:
        self._active += 1
        file = self._files[self._active] = SegmentFile(self._folder / f"{self._active:08d}.seg")
        return file

    def _new_file(self, file: SegmentFile) -> _Handle:
        """Open a file for writing, reusing a spare one if possible. A slow reader of the old
        contents then gets new bytes, and detects that by the payload's checksum."""
        self._new_names = True
        with suppress(IndexError):
            spare, handle = self._spare.pop()
            spare.rename(file.path)
            file.room = os.fstat(handle.number).st_size
            return handle
        return _Handle(file.path, os.O_CREAT)


_PUNCH_HOLE = 2
_KEEP_SIZE = 1
"""``FALLOC_FL_PUNCH_HOLE`` and ``FALLOC_FL_KEEP_SIZE`` of ``linux/falloc.h``."""
_BLOCK_BYTES = 4096
"""Only whole blocks are returned to the disk. Gaps without a whole block are skipped, because one
system call for each of many small gaps would delay commits for seconds."""


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return library


def _fallocate(handle: int, mode: int, offset: int, length: int) -> int:
    return _libc().fallocate(handle, mode, offset, length)


def sparse_files(
    live: Iterable[Payload], closed_files: Mapping[int, SegmentFile]
) -> Iterator[tuple[int, SegmentFile, list[tuple[int, int]]]]:
    """Yield (number, file, gaps) for the files of which at most half is in use; gaps are (offset,
    length) between ``live`` payloads."""
    places: dict[int, list[tuple[int, int]]] = {}
    for payload in live:
        places.setdefault(_number_of(payload), []).append(
            (ref_of(payload) & _OFFSET_MASK, payload.nbytes)
        )
    for number, used in places.items():
        file = closed_files.get(number)
        if file is None or sum(nbytes for _, nbytes in used) > file.on_disk // 2:
            continue
        gaps = []
        at = 0
        for offset, nbytes in (*sorted(used), (max(file.size, file.room), 0)):
            if offset > at:
                gaps.append((at, offset - at))
            at = offset + nbytes
        yield number, file, gaps


def _number_of(payload: Payload) -> int:
    return ref_of(payload) >> _OFFSET_BITS


def ref_of(payload: Payload) -> int:
    """Return the reference of a payload."""
    assert isinstance(payload.ref, int)
    return payload.ref


def _runs(staged: Mapping[int, bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Yield (reference of the first payload, payloads) for each run of adjacent payloads in one
    file. A discarded payload leaves a gap, across which a single write must not go."""
    first = 0
    after = -1
    run = []
    for ref, payload in staged.items():
        if ref != after or len(run) >= _MAX_BUFFERS:
            if run:
                yield first, run
            first = ref
            run = []
        run.append(payload)
        after = ref + len(payload)
    if run:
        yield first, run


def _write_all(handle: int, offset: int, buffers: list[bytes]) -> None:
    """Write all buffers consecutively from ``offset``, repeating after short writes."""
    remaining = [memoryview(buffer) for buffer in buffers if buffer]
    while remaining:
        written = os.pwritev(handle, remaining, offset)
        offset += written
        while remaining and written >= len(remaining[0]):
            written -= len(remaining.pop(0))
        if written:
            remaining[0] = remaining[0][written:]
