"""Keeps finished samples on disk until a checkpoint covers their training (docs/reference/dataflow.md 9, Journal).

Each rank of the trainer has a log of its own, the first in the folder, the others in ``rank-<r>`` below it, and reads
those of all, also of ranks that an earlier start of the run had. Segments ``payload-<n>.log`` hold records
``crc32 u32 | frames u32 | size u64 per frame | frames``, little-endian; the checksum covers all that follows it. A log
never appends to a segment of an earlier one, so a torn tail stays where it is and harms nothing: a record counts from
when its reference was handed out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from realhf.api.calls import PayloadRef, rank_of
from realhf.base.files import disk_blamed

SEGMENT_BYTES = 64 << 20
MAX_FRAMES = 1 << 16
_IOV_MAX = 1024


class PayloadDamaged(ValueError):
    """A reference points to something that is not the record that was written."""


class PayloadLog:
    """Appends records to one segment at a time and begins a new one after ``segment_bytes``. It is not thread-safe.
    ``folder`` is that of all ranks. Raises OSError when the own one cannot be made or read."""

    def __init__(self, folder: Path, *, rank: int = 0, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._root, self._rank, self._segment_bytes = folder, rank, segment_bytes
        self._folder = _folder_of(folder, rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._next = max(self.segments(), default=-1) + 1
        self._active, self._descriptor, self._end = -1, -1, 0

    @property
    def folder(self) -> Path:
        """The folder of the logs of all ranks."""
        return self._root

    @property
    def active(self) -> int:
        """The number of the segment that is written to; -1 before the first append."""
        return self._active

    def segments(self) -> list[int]:
        """Return the numbers of the segments of the own rank, ascending."""
        return _segments(self._folder)

    def append(self, items: Sequence[Sequence[Any]]) -> list[PayloadRef]:
        """Write one record per item (its frames, any buffers) and make all durable with one sync. Raises OSError; then
        none of them counts, and the next call begins a new segment."""
        if not items:
            return []
        if self._descriptor < 0 or self._end >= self._segment_bytes:
            self._roll()
        refs: list[PayloadRef] = []
        buffers: list[Any] = []
        end = self._end
        for frames in items:
            record = _record(frames)
            nbytes = sum(part.nbytes for part in record)
            refs.append([self._active, end, nbytes, *([self._rank] if self._rank else [])])
            buffers += record
            end += nbytes
        try:
            with disk_blamed(self._folder):
                _write_all(self._descriptor, buffers)
                os.fdatasync(self._descriptor)
        except BaseException:
            self.close()
            raise
        self._end = end
        return refs

    def read(self, ref: Sequence[int]) -> list[bytearray]:
        """Read the frames of a record of any rank into writable memory. Raises PayloadDamaged for one that is not there
        as it was written, and OSError where that cannot be said now, e.g. for want of a descriptor."""
        segment, offset, nbytes = ref[:3]
        try:
            with open(_path(_folder_of(self._root, rank_of(ref)), segment), "rb") as file:
                file.seek(offset)
                raw = memoryview(file.read(nbytes))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EINVAL):
                raise  # the record may be whole: what cannot be read now is not lost
            raise PayloadDamaged(f"payload {list(ref)} cannot be read: {error}") from None
        if raw.nbytes != nbytes or nbytes < 8:
            raise PayloadDamaged(f"payload {list(ref)}: {raw.nbytes} of {nbytes} bytes are there")
        crc, count = struct.unpack_from("<II", raw)
        if zlib.crc32(raw[4:]) != crc or count > MAX_FRAMES or 8 + 8 * count > nbytes:
            raise PayloadDamaged(f"payload {list(ref)}: the checksum is wrong")
        sizes = struct.unpack_from(f"<{count}Q", raw, 8)
        frames, begin = [], 8 + 8 * count
        for size in sizes:
            frames.append(bytearray(raw[begin : begin + size]))
            begin += size
        if begin != nbytes:
            raise PayloadDamaged(f"payload {list(ref)}: its frames have {begin} bytes, it has {nbytes}")
        return frames

    def keep_only(self, segments: Collection[int]) -> list[int]:
        """Delete all other segments except the one that is written to. Returns those deleted."""
        gone = [n for n in self.segments() if n not in segments and n != self._active]
        for number in gone:
            _path(self._folder, number).unlink()
        return gone

    def sweep(self, alive: Collection[PayloadRef], ranks: int) -> None:
        """Delete the segments that hold none of these payloads from the logs of the ranks from ``ranks`` on: an earlier
        start of the run had these, and nobody writes there."""
        kept = {(rank_of(ref), ref[0]) for ref in alive}
        for folder in self._root.glob("rank-*"):
            rank = folder.name.removeprefix("rank-")
            if not rank.isdigit() or int(rank) < ranks:
                continue
            for number in _segments(folder):
                if (int(rank), number) not in kept:
                    _path(folder, number).unlink()
            with contextlib.suppress(OSError):  # something is left in it
                folder.rmdir()

    def close(self) -> None:
        """Close the segment that is written to; a later append begins a new one."""
        descriptor, self._descriptor, self._active = self._descriptor, -1, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _roll(self) -> None:
        self.close()
        number = self._next
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(_path(self._folder, number), flags, 0o644)
        self._active, self._next, self._end = number, number + 1, 0
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _folder_of(root: Path, rank: int) -> Path:
    return root / f"rank-{int(rank)}" if rank else root


def _path(folder: Path, segment: int) -> Path:
    return folder / f"payload-{int(segment):06d}.log"


def _segments(folder: Path) -> list[int]:
    stems = [path.stem.removeprefix("payload-") for path in folder.glob("payload-*.log")]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def _record(frames: Sequence[Any]) -> list[memoryview]:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ValueError(f"{len(frames)} frames, allowed 1 to {MAX_FRAMES}")
    views = [memoryview(frame).cast("B") for frame in frames]
    head = struct.pack(f"<I{len(views)}Q", len(views), *(view.nbytes for view in views))
    crc = zlib.crc32(head)
    for view in views:
        crc = zlib.crc32(view, crc)
    return [memoryview(struct.pack("<I", crc) + head), *views]


def _write_all(descriptor: int, buffers: Sequence[memoryview]) -> None:
    waiting = [view for view in buffers if view.nbytes]
    begin = 0
    while begin < len(waiting):
        written = os.writev(descriptor, waiting[begin : begin + _IOV_MAX])
        while begin < len(waiting) and written >= waiting[begin].nbytes:
            written -= waiting[begin].nbytes
            begin += 1
        if written:
            waiting[begin] = waiting[begin][written:]
