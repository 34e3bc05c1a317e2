"""Keeps payloads in append-only files of bounded size; a file is deleted when no record refers to anything in it.

A reference is ``segment << 40 | offset``. Source: docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


class PlaceGone(LookupError):
    """Is raised for a payload whose file was given up: the payload has moved, or nobody needs it any more."""


class Segments:
    """Appends on one thread, reads on any. ``stage`` assigns offsets at once; bytes wait in memory until ``write``.

    A reference is *staged* until a commit keeps it, frees it, or its owner gives it up (``unstage``); *live* as long as
    a committed record holds it. A file is deleted when it has neither. Live references are counted from the records
    themselves after every failure (``recount``), so that a wrong count cannot delete a file in use.
    """

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._limit = segment_bytes
        self._live: Counter[int] = Counter()
        self._staged: set[int] = set()
        self._n_staged: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._readers: Counter[int] = Counter()
        self._retired: set[int] = set()
        self._waiting: dict[int, bytes] = {}
        self.waiting_bytes = 0
        """Size of the payloads that are staged and not written."""
        self.tight = False
        """Whether there is so little room that no file may be mostly empty."""
        self._files = threading.Lock()
        self._spare: list[tuple[Path, int]] = []
        self._new_names = False
        self._active = 0
        self._end = 0

    def restore(self, payloads: Sequence[Payload], *, keep_unused: bool) -> None:
        """Count what is referred to, open those files, and delete the others unless ``keep_unused``; writing continues
        in a new segment. Raises OSError only where the folder itself cannot be read."""
        self.recount(payloads)
        found = {int(path.stem): path for path in self._folder.glob("*.seg") if path.stem.isdigit()}
        unused = [path for segment, path in found.items() if not self._live[segment] and not keep_unused]
        for path in (*unused, *self._folder.glob("*.spare")):
            path.unlink(missing_ok=True)
        for segment in [segment for segment in found if self._live[segment]]:
            try:  # now, while there are descriptors: a read should not need one
                self._handles[segment] = os.open(found[segment], os.O_RDWR | os.O_CLOEXEC)
                self._sizes[segment] = os.fstat(self._handles[segment]).st_size
            except OSError as error:
                logger.error("%s cannot be opened now, and is left as it is: %s", found[segment], error)
                places = [(*self._locate(payload), payload.nbytes) for payload in payloads]
                self._sizes[segment] = max(offset + nbytes for held, offset, nbytes in places if held == segment)
        self._active, self._end = max([self._active, *found, *self._live]) + 1, 0  # a number is never used again
        self._sizes[self._active] = 0

    def recount(self, payloads: Iterable[Payload]) -> None:
        """Count the live references from what was committed. Staged payloads among them were kept after all."""
        self._live = Counter()
        for payload in payloads:
            self._live[self._locate(payload)[0]] += 1
            self._settle(self._ref(payload))

    def holds(self, payload: Payload) -> bool:
        """Return whether the payload lies within its file, as it was at the start; one in a torn tail does not."""
        segment, offset = self._locate(payload)
        return self._sizes.get(segment, 0) >= offset + payload.nbytes

    def stage(self, payloads: Sequence[bytes]) -> list[int]:
        """Assign references to payloads, which the next ``write`` puts there."""
        refs = []
        for payload in payloads:
            if self._end and self._end + len(payload) > self._limit:
                self._active, self._end = self._active + 1, 0
            ref = self._active << _OFFSET_BITS | self._end
            self._waiting[ref] = payload
            self.waiting_bytes += len(payload)
            self._end += len(payload)
            self._sizes[self._active] = self._end
            self._staged.add(ref)
            self._n_staged[self._active] += 1
            refs.append(ref)
        return refs

    def waiting(self) -> dict[int, bytes]:
        """Return the payloads that are staged and not written, in order."""
        return dict(self._waiting)

    def write(self, staged: dict[int, bytes], durable: bool) -> None:
        """Write staged payloads, each to its own place. Raises OSError; the next try writes to the same places."""
        written = set()
        for ref, payloads in _runs(staged):
            segment, offset = ref >> _OFFSET_BITS, ref & _OFFSET_MASK
            handle = self._handle(segment)
            _write_all(handle, offset, payloads)
            written.add(handle)
        if durable:
            for handle in written:
                os.fdatasync(handle)
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

    def _no_longer_waits(self, ref: int) -> None:
        self.waiting_bytes -= len(self._waiting.pop(ref, b""))

    def kept(self, payloads: Iterable[Payload]) -> None:
        """Take note that a commit holds these payloads; those that were staged are live from now on."""
        for payload in payloads:
            if self._settle(self._ref(payload)):
                self._live[self._locate(payload)[0]] += 1

    def unstage(self, refs: Iterable[int]) -> None:
        """Give up staged payloads that no record will refer to. Those that are no longer staged belong to a record and
        stay."""
        for ref in refs:
            if self._settle(ref):
                self._no_longer_waits(ref)

    def _settle(self, ref: int) -> bool:
        """End the staging of a reference; return whether it was staged."""
        if ref not in self._staged:
            return False
        self._staged.remove(ref)
        self._n_staged[ref >> _OFFSET_BITS] -= 1
        return True

    def read(self, payload: Payload) -> bytes:
        """Read one payload from its file; less where the file ends. Raises PlaceGone, and OSError where it cannot be
        read at present. Writers do not wait for the disk meanwhile."""
        segment, offset = self._locate(payload)
        pieces, missing = [], payload.nbytes
        with self._shared_handle(segment) as handle:
            while missing and (piece := os.pread(handle, missing, offset)):
                pieces.append(piece)
                offset, missing = offset + len(piece), missing - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @contextmanager
    def _shared_handle(self, segment: int) -> Iterator[int]:
        """Lend the handle of a file; it stays open until its last reader is done, though the file may go meanwhile."""
        with self._files:
            handle = self._handles.get(segment)
            if handle is not None:
                self._readers[handle] += 1
        if handle is None:
            handle = self._opened_for_reading(segment)
        try:
            yield handle
        finally:
            with self._files:
                self._readers[handle] -= 1
                if not self._readers[handle]:
                    del self._readers[handle]
                    if handle in self._retired:
                        self._retired.remove(handle)
                        os.close(handle)

    def _opened_for_reading(self, segment: int) -> int:
        """Open a file that could not be opened at the start; return its handle, lent."""
        if segment not in self._sizes:
            raise PlaceGone(segment)
        opened = os.open(self._path(segment), os.O_RDWR | os.O_CLOEXEC)
        with self._files:
            if segment not in self._sizes:
                os.close(opened)
                raise PlaceGone(segment)
            handle = self._handles.setdefault(segment, opened)
            if handle != opened:
                os.close(opened)
            self._readers[handle] += 1
            return handle

    def free(self, refs: Iterable[int]) -> list[int]:
        """Drop references that no record holds any more. Returns the files without any reference left, for
        ``remove``."""
        for ref in refs:
            if self._settle(ref):
                self._no_longer_waits(ref)
            else:
                self._live[ref >> _OFFSET_BITS] -= 1
        empty = [
            segment
            for segment in self._sizes
            if segment != self._active and self._live[segment] <= 0 and self._n_staged[segment] <= 0
        ]
        for segment in empty:
            del self._sizes[segment]
            del self._live[segment], self._n_staged[segment]
        return empty

    def end_active(self) -> list[int]:
        """Continue in a new file, so that the present one can go or be compacted. Returns the files without any
        reference, for ``remove``."""
        if self._end:
            self._active, self._end = self._active + 1, 0
            self._sizes[self._active] = 0
        return self.free(())

    def wasteful(self, held_bytes: int) -> bool:
        """Return whether the files take more than twice what is in use, and a few files beyond that."""
        return sum(self._sizes.values()) > 2 * held_bytes + (0 if self.tight else _SLACK_FILES * self._limit)

    def file_of(self, payload: Payload) -> int:
        """Return the number of the file that holds a payload."""
        return self._locate(payload)[0]

    def sparse(self, used: Mapping[int, int]) -> list[int]:
        """Return files of which no more than half is in use, the emptiest first, except the one that is being
        written."""
        candidates = (
            segment
            for segment, size in self._sizes.items()
            if segment != self._active and 0 < used.get(segment, 0) <= size // 2
        )
        return sorted(candidates, key=lambda segment: used[segment])

    def remove(self, segments: Sequence[int]) -> None:
        """Put files aside to be written again, or delete them. That takes a while, so call it off the event loop."""
        for segment in segments:
            path = self._path(segment)
            with self._files:
                handle = self._handles.pop(segment, None)
                if handle is not None and self._may_wait(handle):
                    self._spare.append((path.rename(path.with_suffix(".spare")), handle))
                    continue
                if handle is not None:
                    self._retire(handle)
            path.unlink(missing_ok=True)

    def give_up_spares(self) -> bool:
        """Delete the files that were put aside; return whether there were any."""
        with self._files:
            spare, self._spare = self._spare, []
        for path, handle in spare:
            os.close(handle)
            path.unlink(missing_ok=True)
        return bool(spare)

    def close(self) -> None:
        """Close all files."""
        with self._files:
            for handle in (*self._handles.values(), *(handle for _, handle in self._spare)):
                self._retire(handle)
            self._handles.clear()
            self._spare.clear()

    def _may_wait(self, handle: int) -> bool:
        """Return whether an emptied file may be kept to be written again; one that a single large payload filled is
        more than was promised to be taken."""
        if self._readers[handle] or len(self._spare) >= _SPARE_FILES:
            return False
        return os.fstat(handle).st_size <= self._limit

    def _retire(self, handle: int) -> None:
        """Close a handle now, or when its last reader is done."""
        if self._readers[handle]:
            self._retired.add(handle)
        else:
            del self._readers[handle]
            os.close(handle)

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}.seg"

    def _handle(self, segment: int) -> int:
        with self._files:
            handle = self._handles.get(segment)
            if handle is not None:
                return handle
            self._new_names = True
            if self._spare and not self._path(segment).exists():
                path, handle = self._spare.pop()
                path.rename(self._path(segment))
            else:
                handle = os.open(self._path(segment), os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
            self._handles[segment] = handle
            return handle

    def _locate(self, payload: Payload) -> tuple[int, int]:
        ref = self._ref(payload)
        return ref >> _OFFSET_BITS, ref & _OFFSET_MASK

    @staticmethod
    def _ref(payload: Payload) -> int:
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
