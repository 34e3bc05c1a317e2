"""Keeps payloads in append-only files of bounded size; a file is deleted when no record refers to anything in it.

One group in a mix buffer or in quarantine would keep a whole file. So files that are mostly empty give the room of what
nobody needs back to the disk, as holes: no payload ever moves. A reference is ``segment << 40 | offset``. Source:
docs/reference/trajectory.md 3.11.
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
"""Size from which a new file is begun."""
_OFFSET_BITS = 40
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_MAX_BUFFERS = 512
"""Number of payloads in one write at most; the system limits the buffers of one call."""
_SLACK_FILES = 2
"""Number of files that may be mostly empty before compaction is worth it."""
_SPARE_FILES = 1
"""Number of emptied files that are kept and written again instead of new ones, because their pages are there
already. With the file that is being written they make up the slack."""


class _Handle:
    """Holds a descriptor, which is closed when nobody uses it any more: a read may outlive its file."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


@dataclass(eq=False)
class SegmentFile:
    """Describes one file. ``taken``: its bytes but for those that were given back; ``room``: how many it had when it
    was begun, being an emptied one; ``live`` and ``staged`` count the references of each kind."""

    path: Path
    size: int = 0
    taken: int = 0
    room: int = 0
    live: int = 0
    staged: int = 0
    handle: _Handle | None = None

    @property
    def on_disk(self) -> int:
        """Count the bytes that it takes on the disk."""
        return max(self.taken, self.room)


class Segments:
    """Appends on one thread, reads on any. ``stage`` assigns offsets at once; bytes wait in memory until ``write``.

    A reference is *staged* until a commit keeps it, frees it, or its owner gives it up (``unstage``); *live* as long as
    a committed record holds it. A file is deleted when it has neither. Live references are counted from the records
    themselves after every failure (``recount``), so that a wrong count cannot delete a file in use. Only the event loop
    changes the tables; writers and readers look a file up, and hold on to its handle while they use it.
    """

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._limit = segment_bytes
        self._files: dict[int, SegmentFile] = {}
        self._staged: set[int] = set()
        self._waiting: dict[int, bytes] = {}
        self.waiting_bytes = 0
        """Size of the payloads that are staged and not written."""
        self.tight = False
        """Whether there is so little room that no file may be mostly empty."""
        self._spare: deque[tuple[Path, _Handle]] = deque()
        self._kept_below = 0
        """Number of the first file of which room is given back; rows that were set aside may refer to earlier ones."""
        self._knows_holes = True
        self._new_names = False
        self._active = 0

    def restore(self, payloads: Sequence[Payload], *, keep_unused: bool) -> None:
        """Count what is referred to, open those files, and delete the others unless ``keep_unused``; writing continues
        in a new segment. Raises OSError only where the folder itself cannot be read."""
        found = {int(path.stem): path for path in self._folder.glob("*.seg") if path.stem.isdigit()}
        for number, path in found.items():
            about = path.stat()
            self._files[number] = SegmentFile(
                path, about.st_size, min(about.st_size, 512 * about.st_blocks or about.st_size)
            )
        self.recount(payloads)
        unused = [number for number, file in self._files.items() if not file.live]
        gone = [self._files.pop(number).path for number in unused]
        for path in (*(() if keep_unused else gone), *self._folder.glob("*.spare")):
            path.unlink(missing_ok=True)
        for file in self._files.values():
            try:  # now, while there are descriptors: a read should not need one
                file.handle = _Handle(file.path)
            except OSError as error:
                logger.error("%s cannot be opened now, and is left as it is: %s", file.path, error)
        self._active = max([self._active, *found, *map(_number_of, payloads)])  # a number is never used again
        self._begin_file()
        self._kept_below = self._active if keep_unused else 0

    def recount(self, payloads: Iterable[Payload]) -> None:
        """Count the live references from what was committed. Staged payloads among them were kept after all."""
        for file in self._files.values():
            file.live = 0
        for payload in payloads:
            self._settle(ref_of(payload))
            if file := self._files.get(_number_of(payload)):
                file.live += 1

    def holds(self, payload: Payload) -> bool:
        """Return whether the payload lies within its file, as it was at the start; one in a torn tail does not."""
        file = self._files.get(_number_of(payload))
        return file is not None and file.size >= (ref_of(payload) & _OFFSET_MASK) + payload.nbytes

    def stage(self, payloads: Sequence[bytes]) -> list[int]:
        """Assign references to payloads, which the next ``write`` puts there."""
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
        """Write staged payloads, each to its own place. Raises OSError; the next try writes to the same places."""
        written = set()
        for ref, payloads in _runs(staged):
            if file := self._files.get(ref >> _OFFSET_BITS):  # else all in it was given up meanwhile
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
            self._new_names = False  # only after the flush: after a failure the next try has to flush

    def written(self, staged: dict[int, bytes]) -> None:
        """Drop these payloads from memory, because they are written."""
        for ref in staged:
            self._no_longer_waits(ref)

    def bytes_waiting(self, ref: int) -> bytes | None:
        """Return the bytes of a payload that waits to be written, or None."""
        return self._waiting.get(ref)

    def kept(self, payloads: Iterable[Payload]) -> None:
        """Take note that a commit holds these payloads; those that were staged are live from now on."""
        for payload in payloads:
            if self._settle(ref_of(payload)):
                self._files[_number_of(payload)].live += 1

    def unstage(self, refs: Iterable[int]) -> None:
        """Give up staged payloads that no record will refer to. Those that are no longer staged belong to a record and
        stay."""
        for ref in refs:
            if self._settle(ref):
                self._no_longer_waits(ref)

    def read(self, payload: Payload) -> bytes:
        """Read one payload from its file; less where the file ends, and nothing where it was given up. Raises OSError
        where it cannot be read at present. Writers do not wait for the disk meanwhile."""
        file, offset = self._files.get(_number_of(payload)), ref_of(payload) & _OFFSET_MASK
        if file is None:
            return b""
        handle = file.handle
        if handle is None:  # it could not be opened at the start, or goes at this moment
            try:
                file.handle = handle = _Handle(file.path)
            except FileNotFoundError:
                return b""
        pieces, missing = [], payload.nbytes
        while missing and (piece := os.pread(handle.number, missing, offset)):
            pieces.append(piece)
            offset, missing = offset + len(piece), missing - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def free(self, refs: Iterable[int]) -> list[SegmentFile]:
        """Drop references that no record holds any more. Returns the files without any reference left, for
        ``remove``."""
        for ref in refs:
            if self._settle(ref):
                self._no_longer_waits(ref)
            elif file := self._files.get(ref >> _OFFSET_BITS):
                file.live -= 1
        empty = [
            number
            for number, file in self._files.items()
            if number != self._active and file.live <= 0 and file.staged <= 0
        ]
        return [self._files.pop(number) for number in empty]

    def end_active(self) -> list[SegmentFile]:
        """Continue in a new file, so that the present one can go or be compacted. Returns the files without any
        reference, for ``remove``."""
        if self._files[self._active].size:
            self._begin_file()
        return self.free(())

    def wasteful(self, held_bytes: int) -> bool:
        """Return whether the files take more than twice what is in use, and a few files beyond that."""
        taken = sum(file.on_disk for number, file in self._files.items() if number >= self._kept_below)
        return self._knows_holes and taken > 2 * held_bytes + (0 if self.tight else _SLACK_FILES * self._limit)

    def ended(self) -> dict[int, SegmentFile]:
        """Return the files that may have holes: nothing is written to them any more, and no commit is under way."""
        return {
            number: file
            for number, file in self._files.items()
            if number >= self._kept_below and number != self._active and not file.staged
        }

    def give_back(self, number: int, file: SegmentFile, gaps: Sequence[tuple[int, int]]) -> int:
        """Give parts of a file, each (offset, length), back to the disk; return by how many bytes that is less than
        before. Call it on the thread of ``remove``. Raises OSError."""
        if self._files.get(number) is not file or file.handle is None or not self._knows_holes:
            return 0  # it goes, or is written anew
        for offset, length in gaps:
            start, end = -(-offset // _BLOCK_BYTES) * _BLOCK_BYTES, (offset + length) // _BLOCK_BYTES * _BLOCK_BYTES
            if start < end and _fallocate(file.handle.number, _PUNCH_HOLE | _KEEP_SIZE, start, end - start):
                code = ctypes.get_errno()
                if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise OSError(code, os.strerror(code), str(file.path))
                logger.warning("%s: this disk knows no holes, so files go only when they are empty", self._folder)
                self._knows_holes = False
                return 0
        before, end = file.on_disk, max(file.size, file.room)
        file.taken, file.room = end - sum(length for _, length in gaps), 0
        return before - file.taken

    def remove(self, files: Sequence[SegmentFile]) -> None:
        """Put files aside to be written again, or delete them. That takes a while, so call it off the event loop."""
        for file in files:
            handle, file.handle = file.handle, None
            # One that a single large payload filled is more than was promised to be taken.
            if handle and len(self._spare) < _SPARE_FILES and os.fstat(handle.number).st_size <= self._limit:
                self._spare.append((file.path.rename(file.path.with_suffix(".spare")), handle))
            else:
                file.path.unlink(missing_ok=True)

    def give_up_spares(self) -> bool:
        """Delete the files that were put aside; return whether there were any."""
        found = False
        with suppress(IndexError):
            while True:
                self._spare.pop()[0].unlink(missing_ok=True)
                found = True
        return found

    def close(self) -> None:
        """Close all files."""
        self._spare.clear()
        for file in self._files.values():
            file.handle = None

    def _settle(self, ref: int) -> bool:
        """End the staging of a reference; return whether it was staged."""
        if ref not in self._staged:
            return False
        self._staged.remove(ref)
        self._files[ref >> _OFFSET_BITS].staged -= 1
        return True

    def _no_longer_waits(self, ref: int) -> None:
        self.waiting_bytes -= len(self._waiting.pop(ref, b""))

    def _begin_file(self) -> SegmentFile:
        self._active += 1
        file = self._files[self._active] = SegmentFile(self._folder / f"{self._active:08d}.seg")
        return file

    def _new_file(self, file: SegmentFile) -> _Handle:
        """Make a file to write to, of a spare one if there is any. Who still reads what was there gets the new bytes,
        which the checksum of the payload tells."""
        self._new_names = True
        with suppress(IndexError):
            spare, handle = self._spare.pop()
            spare.rename(file.path)
            file.room = os.fstat(handle.number).st_size
            return handle
        return _Handle(file.path, os.O_CREAT)


_PUNCH_HOLE, _KEEP_SIZE = 2, 1
"""``FALLOC_FL_PUNCH_HOLE`` and ``FALLOC_FL_KEEP_SIZE`` of ``linux/falloc.h``."""
_BLOCK_BYTES = 4096
"""Only whole blocks go back to the disk. Between many small payloads lie so many gaps that hold none that to ask for
them, each a call, would keep commits waiting for seconds."""


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return library


def _fallocate(handle: int, mode: int, offset: int, length: int) -> int:
    return _libc().fallocate(handle, mode, offset, length)


def sparse_files(
    live: Iterable[Payload], ended: Mapping[int, SegmentFile]
) -> Iterator[tuple[int, SegmentFile, list[tuple[int, int]]]]:
    """Yield the files of which no more than half is in use, with the gaps between what is ``live``."""
    places: dict[int, list[tuple[int, int]]] = {}
    for payload in live:
        places.setdefault(_number_of(payload), []).append((ref_of(payload) & _OFFSET_MASK, payload.nbytes))
    for number, used in places.items():
        file = ended.get(number)
        if file is None or sum(nbytes for _, nbytes in used) > file.on_disk // 2:
            continue
        gaps, at = [], 0
        for offset, nbytes in (*sorted(used), (max(file.size, file.room), 0)):
            if offset > at:
                gaps.append((at, offset - at))
            at = offset + nbytes
        yield number, file, gaps


def _number_of(payload: Payload) -> int:
    return ref_of(payload) >> _OFFSET_BITS


def ref_of(payload: Payload) -> int:
    """Return where a payload lies."""
    assert isinstance(payload.ref, int)
    return payload.ref


def _runs(staged: Mapping[int, bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Yield runs of payloads that lie side by side in one file, with the reference of the first. A payload that was
    given up leaves a gap, which no single write may cross."""
    first, after, run = 0, -1, []
    for ref, payload in staged.items():
        if ref != after or len(run) >= _MAX_BUFFERS:
            if run:
                yield first, run
            first, run = ref, []
        run.append(payload)
        after = ref + len(payload)
    if run:
        yield first, run


def _write_all(handle: int, offset: int, buffers: list[bytes]) -> None:
    """Write all buffers, one after the other from ``offset`` on, however often the system writes less."""
    remaining = [memoryview(buffer) for buffer in buffers if buffer]
    while remaining:
        written = os.pwritev(handle, remaining, offset)
        offset += written
        while remaining and written >= len(remaining[0]):
            written -= len(remaining.pop(0))
        if written:
            remaining[0] = remaining[0][written:]
