"""Write-ahead log of finished samples, which are kept until a checkpoint covers their training.

Each rank of the trainer writes its own log: rank 0 directly in the folder, other ranks in the
subfolders ``rank-<r>``. Every rank can read the logs of all ranks, also of ranks that existed only
when the run was started with more of them.

Segments ``payload-<n>.log`` contain records ``crc32 u32 | frames u32 | size u64 per frame |
frames``, little-endian; the checksum covers everything after it. A record is valid once ``append``
has returned a reference to it. After a restart the log begins a new segment, so an incomplete
record at the end of an older one is harmless. See docs/reference/dataflow.md 9, Journal.
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

from realhf.api.calls import PayloadRef, payload_rank
from realhf.base.files import convert_disk_errors

SEGMENT_BYTES = 64 << 20
"""Default segment size, in bytes; when it is reached, a new segment begins."""
MAX_FRAMES = 1 << 16
"""Maximum number of frames in a record."""
_IOV_MAX = 1024
"""Maximum number of buffers in one writev call (Linux)."""


class PayloadDamaged(ValueError):
    """A reference does not point to a valid record."""


class PayloadLog:
    """Log of one rank's samples, which can also read the logs of other ranks. Not thread-safe.

    Args:
        folder: Folder with the logs of all ranks.
        rank: Rank of this trainer process.
        segment_bytes: Segment size in bytes; when it is reached, a new segment begins.

    Raises OSError if the rank's folder cannot be created or read.
    """

    def __init__(self, folder: Path, *, rank: int = 0, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._root = folder
        self._rank = rank
        self._segment_bytes = segment_bytes
        self._folder = _rank_folder(folder, rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._next = max(self.segments(), default=-1) + 1
        self._active = -1
        self._descriptor = -1
        self._end = 0

    @property
    def folder(self) -> Path:
        """Folder with the logs of all ranks."""
        return self._root

    @property
    def active(self) -> int:
        """Number of the segment that is being written; -1 before the first append."""
        return self._active

    def segments(self) -> list[int]:
        """Return the numbers of this rank's segments, in ascending order."""
        return _list_segments(self._folder)

    def append(self, items: Sequence[Sequence[Any]]) -> list[PayloadRef]:
        """Write one record per item, make all of them durable with one sync, and return their
        references.

        An item is a sequence of frames (buffers). If an OSError is raised, none of the records is
        valid, and the next call begins a new segment.
        """
        if not items:
            return []
        if self._descriptor < 0 or self._end >= self._segment_bytes:
            self._start_segment()
        refs: list[PayloadRef] = []
        buffers: list[Any] = []
        end = self._end
        for frames in items:
            record = _build_record(frames)
            nbytes = sum(part.nbytes for part in record)
            refs.append([self._active, end, nbytes, *([self._rank] if self._rank else [])])
            buffers += record
            end += nbytes
        try:
            with convert_disk_errors(self._folder):
                _write_all(self._descriptor, buffers)
                os.fdatasync(self._descriptor)
        except BaseException:
            self.close()
            raise
        self._end = end
        return refs

    def read(self, ref: Sequence[int]) -> list[bytearray]:
        """Return the frames of a record written by any rank, in writable memory.

        Raises PayloadDamaged if the record is missing or damaged, and OSError if it cannot be read
        for another reason, e.g. too many open files.
        """
        segment, offset, nbytes = ref[:3]
        try:
            with open(
                _segment_path(_rank_folder(self._root, payload_rank(ref)), segment), "rb"
            ) as file:
                file.seek(offset)
                raw = memoryview(file.read(nbytes))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EINVAL):
                raise  # The record may be intact.
            raise PayloadDamaged(f"payload {list(ref)} cannot be read: {error}") from None
        if raw.nbytes != nbytes or nbytes < 8:
            raise PayloadDamaged(f"payload {list(ref)}: {raw.nbytes} of {nbytes} bytes are there")
        crc, count = struct.unpack_from("<II", raw)
        if zlib.crc32(raw[4:]) != crc or count > MAX_FRAMES or 8 + 8 * count > nbytes:
            raise PayloadDamaged(f"payload {list(ref)}: the checksum is wrong")
        sizes = struct.unpack_from(f"<{count}Q", raw, 8)
        frames: list[bytearray] = []
        begin = 8 + 8 * count
        for size in sizes:
            frames.append(bytearray(raw[begin : begin + size]))
            begin += size
        if begin != nbytes:
            raise PayloadDamaged(
                f"payload {list(ref)}: its frames have {begin} bytes, it has {nbytes}"
            )
        return frames

    def keep_only(self, segments: Collection[int]) -> list[int]:
        """Delete this rank's segments except ``segments`` and the one being written. Return the
        numbers of the deleted segments."""
        deleted = [n for n in self.segments() if n not in segments and n != self._active]
        for number in deleted:
            _segment_path(self._folder, number).unlink()
        return deleted

    def sweep(self, alive: Collection[PayloadRef], ranks: int) -> None:
        """Delete segments of former ranks that contain no payload in ``alive``. Former ranks are
        those numbered ``ranks`` and above.

        They belong to an earlier start of the run with more ranks, so no process writes to them.
        """
        live_segments = {(payload_rank(ref), ref[0]) for ref in alive}
        for folder in self._root.glob("rank-*"):
            rank = folder.name.removeprefix("rank-")
            if not rank.isdigit() or int(rank) < ranks:
                continue
            for number in _list_segments(folder):
                if (int(rank), number) not in live_segments:
                    _segment_path(folder, number).unlink()
            with contextlib.suppress(OSError):  # The folder is not empty.
                folder.rmdir()

    def close(self) -> None:
        """Close the segment that is being written. A later append begins a new one."""
        descriptor = self._descriptor
        self._descriptor = -1
        self._active = -1
        if descriptor >= 0:
            os.close(descriptor)

    def _start_segment(self) -> None:
        """Begin a new segment, and make its directory entry durable."""
        self.close()
        number = self._next
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(_segment_path(self._folder, number), flags, 0o644)
        self._active = number
        self._next = number + 1
        self._end = 0
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _rank_folder(root: Path, rank: int) -> Path:
    """Return the folder of a rank's log."""
    return root / f"rank-{int(rank)}" if rank else root


def _segment_path(folder: Path, segment: int) -> Path:
    """Return the path of a segment."""
    return folder / f"payload-{int(segment):06d}.log"


def _list_segments(folder: Path) -> list[int]:
    """Return the numbers of the segments in a folder, in ascending order."""
    stems = [path.stem.removeprefix("payload-") for path in folder.glob("payload-*.log")]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def _build_record(frames: Sequence[Any]) -> list[memoryview]:
    """Return the buffers of a record with these frames. Raises ValueError for no or too many
    frames."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ValueError(f"{len(frames)} frames, allowed 1 to {MAX_FRAMES}")
    views = [memoryview(frame).cast("B") for frame in frames]
    head = struct.pack(f"<I{len(views)}Q", len(views), *(view.nbytes for view in views))
    crc = zlib.crc32(head)
    for view in views:
        crc = zlib.crc32(view, crc)
    return [memoryview(struct.pack("<I", crc) + head), *views]


def _write_all(descriptor: int, buffers: Sequence[memoryview]) -> None:
    """Write all buffers, repeating writev calls that wrote only some of their data."""
    pending = [view for view in buffers if view.nbytes]
    begin = 0
    while begin < len(pending):
        written = os.writev(descriptor, pending[begin : begin + _IOV_MAX])
        while begin < len(pending) and written >= pending[begin].nbytes:
            written -= pending[begin].nbytes
            begin += 1
        if written:
            pending[begin] = pending[begin][written:]
