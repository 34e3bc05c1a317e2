"""The master's journal of samples: its records, its writer and its reader.

Steps are numbered from 0. ``Ckpt(s)`` is recorded for a checkpoint after step s; a run without a
checkpoint resumes from step -1.

The journal is a sequence of files ``journal-<n>.log`` (segments) of frames ``len u32 | crc32 u32 |
msgpack`` in little endian. A frame holds the records of one ``append``, which therefore survive a
crash together or not at all.

A killed process may leave an incomplete frame at the very end of the last segment. Any other
deviation is damage and is never taken for the end of the history, because samples that were trained
would then be drawn again.

``Journal.wait_until_durable``
  produces: the guarantee that an append is on disk;
  waits for: the writer's thread, which syncs several appends at a time;
  unblocked by: the sync, a failed write (JournalError), or the timeout.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args

import msgspec

from realhf.base.files import DAMAGED, atomic_file, dangling_link_error, sync, unused_name

DIED = "worker_died"
"""``Reject.outcome`` of an attempt during which the process playing it died."""


# The records are stored as arrays that begin with the tag: the order of the fields is part of the
# file format, and a new field must be the last one and have a default.
class Admit(msgspec.Struct, frozen=True, tag="admit", array_like=True):
    """Record: a sample was leased to a rollout worker."""

    id: str
    """Id of the sample."""
    attempt: int
    """Number of the attempt, from 0."""
    version: int
    """Policy version at admission."""
    order: int
    """Number of the sample in the order of first admissions."""
    worker: str
    """Rollout worker's incarnation (name and pid)."""
    item: dict[str, Any]
    """The source item, with everything needed to play the sample again."""
    failures: int = 0
    """Number of earlier attempts that failed."""
    deaths: int = 0
    """Number of earlier attempts during which the process playing them died."""


class Accept(msgspec.Struct, frozen=True, tag="accept", array_like=True):
    """Record: a finished sample was accepted."""

    id: str
    """Id of the sample."""
    attempt: int
    """Number of the accepted attempt."""
    ref: list[Any]
    """Location of the sample's payload (``PayloadRef`` in ``realhf.api.calls``), including the rank
    that received it."""
    meta: list[bytes]
    """Encoded frames of the sample's metadata."""


class Reject(msgspec.Struct, frozen=True, tag="reject", array_like=True):
    """Record: an attempt ended without a sample."""

    id: str
    """Id of the sample."""
    attempt: int
    """Number of the attempt."""
    outcome: str
    """Kind of the failure; ``DIED`` if the process playing it died."""
    message: str
    """Error message."""
    final: bool
    """Whether the sample is given up, not only this attempt."""


FLAT = "flat"
"""``Drop.reason`` of a sample without learning signal, which is replaced by another one."""


class Drop(msgspec.Struct, frozen=True, tag="drop", array_like=True):
    """Record: an accepted sample will never be trained."""

    id: str
    """Id of the sample."""
    reason: str
    """Reason: ``FLAT``, "stale" or "payload_lost"."""


class Consume(msgspec.Struct, frozen=True, tag="consume", array_like=True):
    """Record: a step was trained on these samples."""

    ids: list[str]
    """The samples, in the order of the step batch."""
    step: int
    """The step."""


class Commit(msgspec.Struct, frozen=True, tag="commit", array_like=True):
    """Record: a step was trained."""

    step: int
    """The step."""
    version: int
    """Version of the weights after the step."""


class Ckpt(msgspec.Struct, frozen=True, tag="ckpt", array_like=True):
    """Record: a checkpoint has become valid."""

    step: int
    """The last step included in the checkpoint."""
    ref: str
    """Name of the checkpoint's folder."""


class Resume(msgspec.Struct, frozen=True, tag="resume", array_like=True):
    """Record: the run was resumed. The samples that later steps had consumed are accepted again."""

    step: int
    """The last step included in the checkpoint; -1 for a start without one."""


class Draw(msgspec.Struct, frozen=True, tag="draw", array_like=True):
    """Record: the source's state after a draw. It is in the same ``append`` as the admission of the
    draw's first sample."""

    state: dict[str, Any]
    """State of the sample queue, as JSON types."""


class End(msgspec.Struct, frozen=True, tag="end", array_like=True):
    """Record: the run ended normally."""


class Totals(msgspec.Struct, frozen=True, tag="totals", array_like=True):
    """First record of a snapshot: totals of everything before it. The other records of the same
    ``append`` describe the open samples."""

    step: int
    """The last final step."""
    admitted: int
    """Samples admitted, including open ones."""
    consumed: int
    """Samples consumed by final steps."""
    rejected: int
    """Samples that were given up."""
    dropped: int
    """Samples dropped."""
    order: int
    """Number of the next admission."""
    planned: list[tuple[int, list[str]]]
    """Step batches (step, ids) that a resumed run has yet to repeat."""
    flat: list[int] = []
    """``JournalState.flat``."""


Record: TypeAlias = (
    Admit | Accept | Reject | Drop | Consume | Commit | Ckpt | Resume | Draw | End | Totals
)


_log = logging.getLogger(__name__)
_HEADER = struct.Struct("<II")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Record])
SEGMENT_BYTES = 16 << 20
"""Size in bytes at which a new segment is started."""
ARCHIVE = "archive"
"""Folder, within the journal's folder, for segments that a snapshot has replaced."""
_SEGMENT = re.compile(r"journal-(\d+)\.log")
CLOSE_TIMEOUT_S = 30.0
"""Seconds that the writer gets to finish when the journal is closed."""
# The writer syncs at once if the last sync is SYNC_INTERVAL_S seconds old or SYNC_RECORDS appends
# wait.
SYNC_INTERVAL_S = 0.05
SYNC_RECORDS = 64


class JournalError(RuntimeError):
    """Error: the journal cannot be read or written."""


class JournalDamaged(JournalError):
    """Error: a part of the journal is missing or altered. Nothing was changed on disk."""


class _QueuedFrame(NamedTuple):
    """Frame that waits to be written."""

    number: int
    """Number of the append."""
    frame: bytes
    """The encoded frame."""
    begins_segment: bool
    """Whether the frame is a snapshot, with which a new segment begins."""


class _Waiter(NamedTuple):
    """Caller of ``wait_until_durable``."""

    number: int
    """Number of the append that the caller waits for."""
    loop: asyncio.AbstractEventLoop
    """The caller's event loop."""
    future: asyncio.Future[None]
    """Resolved in that loop when the append is on disk."""


class Journal:
    """Writer of the journal. Create it with ``open``.

    ``append`` is called in one event loop. A thread writes and syncs, several appends at a time: at
    once if its last sync was ``SYNC_INTERVAL_S`` ago or if ``SYNC_RECORDS`` appends wait. After a
    failed write every call raises.
    """

    def __init__(self, folder: Path, segment: int, lock: int, archive: bool) -> None:
        self._folder = folder
        self._lock = lock
        self._archive = archive
        self._changed = threading.Condition()
        """Condition that guards all fields shared by the event loop and the writer's thread."""
        self._waiting: list[_QueuedFrame] = []
        self._waiters: list[_Waiter] = []
        self._synced_at = -SYNC_INTERVAL_S
        self._number = 0
        """Number of the last append."""
        self._synced = 0
        """Number of the last append that is on disk."""
        self._closing = False
        self._failure: BaseException | None = None
        self._segment = segment
        self._size = 0
        self._file = _create(folder, segment)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        archive: bool = False,
        restart: Sequence[Record] | None = None,
        warn: Callable[[str], None] = _log.warning,
    ) -> tuple[Journal, list[Record]]:
        """Open the journal in ``folder``; return it and the records since the last snapshot.

        New records go into a new segment. An incomplete frame at the end is cut off and kept in a
        separate file, which is reported through ``warn``.

        Args:
            archive: Whether segments that a snapshot replaces are moved into ``archive/`` for the
                audit instead of being deleted.
            restart: Snapshot to start with instead of the existing segments, which are set aside.

        Raises JournalDamaged, and JournalError if another process writes to the journal or a file
        cannot be read at the moment.
        """
        try:
            if folder.is_symlink() and not folder.exists():
                raise dangling_link_error(folder)
            folder.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(folder)
        except OSError as error:
            raise _unreadable(folder, error) from error
        try:
            if restart is not None:
                warn(f"the contents of {folder} were moved to {_set_aside(folder)}")
                journal = cls(folder, _next_number(folder), lock, archive)
                assert isinstance(restart[0], Totals)
                journal.start_segment(restart[0].step, restart)
                return journal, list(restart)
            history = read_history(folder)
            if history.torn is not None:
                warn(_cut_torn_frame(*history.torn))
            _remove_segments(folder, history.replaced, archive)
            return cls(folder, _next_number(folder), lock, archive), history.records
        except OSError as error:
            os.close(lock)
            raise _unreadable(folder, error) from error
        except BaseException:
            os.close(lock)
            raise

    def append(self, *records: Record) -> int:
        """Queue the records as one frame. Returns the number of the append, for
        ``wait_until_durable``."""
        return self._queue(records, begins_segment=False)

    async def wait_until_durable(self, number: int, timeout_s: float) -> None:
        """Wait until the append with this number is on disk.

        Raises JournalError if a write failed or the disk takes longer than ``timeout_s`` seconds.
        """
        with self._changed:
            self._check(closed_ok=True)
            if number <= self._synced:
                return
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self._waiters.append(_Waiter(number, loop, future))
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise JournalError(
                f"the disk of {self._folder} took longer than {timeout_s:g} s for a record "
                f"(async_rl.journal_timeout_s)"
            ) from None

    def start_segment(self, step: int, keep: Sequence[Record]) -> int:
        """Start a new segment with the snapshot ``keep``. Earlier segments are removed once it is
        on disk.

        ``keep`` is the result of ``JournalState.snapshot()`` after ``settle(step)``. Returns the
        number of the append. Raises ValueError if ``keep`` is not a snapshot of ``step``.
        """
        if not keep or not isinstance(keep[0], Totals) or keep[0].step != step:
            raise ValueError(f"a snapshot for step {step} begins with its Totals")
        return self._queue(keep, begins_segment=True)

    def close(self) -> None:
        """Write all queued records and end the thread. Raises JournalError if a record was not
        written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise JournalError(
                f"the disk of {self._folder} took longer than {CLOSE_TIMEOUT_S:.0f} s"
            )
        if self._lock >= 0:
            os.close(self._file)
            os.close(self._lock)
            self._lock = -1
        if self._failure is not None:
            raise JournalError(f"{self._folder} could not be written") from self._failure

    def _queue(self, records: Sequence[Record], *, begins_segment: bool) -> int:
        frame = _encode_frame(records)
        with self._changed:
            self._check()
            self._number += 1
            self._waiting.append(_QueuedFrame(self._number, frame, begins_segment))
            if len(self._waiting) in (1, SYNC_RECORDS):
                self._changed.notify_all()
            return self._number

    def _check(self, closed_ok: bool = False) -> None:
        if self._failure is not None:
            raise JournalError(f"{self._folder} could not be written") from self._failure
        if self._closing and not closed_ok:
            raise JournalError(f"the journal in {self._folder} is closed")

    # ---- the writer's thread

    def _run(self) -> None:
        try:
            while entries := self._take_entries():
                self._write(entries)
                self._synced_at = time.monotonic()
                with self._changed:
                    self._synced = entries[-1].number
                    done = [waiter for waiter in self._waiters if waiter.number <= self._synced]
                    self._waiters = [
                        waiter for waiter in self._waiters if waiter.number > self._synced
                    ]
                _wake(done, None)
        except BaseException as error:
            with self._changed:
                self._failure = error
                done = self._waiters
                self._waiters = []
            _wake(done, JournalError(f"{self._folder} could not be written: {error}"))

    def _take_entries(self) -> list[_QueuedFrame]:
        """Wait for queued frames and collect them until it is time to sync; return [] when the
        journal is closed."""
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            while len(self._waiting) < SYNC_RECORDS and not self._closing:
                remaining = self._synced_at + SYNC_INTERVAL_S - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)
            entries = self._waiting
            self._waiting = []
            return entries

    def _write(self, entries: Sequence[_QueuedFrame]) -> None:
        first_needed = 0
        part: list[bytes] = []
        for entry in entries:
            if entry.begins_segment or self._size >= SEGMENT_BYTES:
                self._flush(part)
                self._rotate()
                part = []
                first_needed = self._segment if entry.begins_segment else first_needed
            part.append(entry.frame)
            self._size += len(entry.frame)
        self._flush(part)
        if first_needed:  # only after the snapshot is on the disk
            replaced = [
                path for path in segments(self._folder) if _segment_number(path) < first_needed
            ]
            _remove_segments(self._folder, replaced, self._archive)

    def _flush(self, frames: Sequence[bytes]) -> None:
        data = memoryview(b"".join(frames))
        while data:
            data = data[os.write(self._file, data) :]
        os.fdatasync(self._file)

    def _rotate(self) -> None:
        new_file = _create(self._folder, self._segment + 1)
        os.close(self._file)
        self._file = new_file
        self._segment += 1
        self._size = 0


def segments(folder: Path) -> list[Path]:
    """Return the segments in a folder, in order; [] if it does not exist. Raises OSError if it
    cannot be read."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(
        (folder / name for name in names if _SEGMENT.fullmatch(name)), key=_segment_number
    )


class History(NamedTuple):
    """The contents of the segments in a folder."""

    records: list[Record]
    """Records since the last snapshot, beginning with the snapshot itself."""
    replaced: list[Path]
    """Segments before the last snapshot."""
    torn: tuple[Path, int] | None
    """The segment that ends with an incomplete frame, and that frame's offset in bytes; None if
    there is none."""


def read_history(folder: Path) -> History:
    """Read the segments since the last snapshot, newest first. Changes nothing on disk.

    Raises JournalDamaged if a segment is missing or has damage other than an incomplete frame at
    the end, JournalError for an unknown record, and OSError.
    """
    paths = segments(folder)
    parts: list[list[list[Record]]] = []
    torn: tuple[Path, int] | None = None
    first = len(paths)
    while first > 0:
        first -= 1
        path = paths[first]
        if (
            first + 1 < len(paths)
            and _segment_number(paths[first + 1]) != _segment_number(path) + 1
        ):
            raise JournalDamaged(
                f"{path.with_name(_segment_name(_segment_number(path) + 1))} is missing"
            )
        frames, good = read_segment(path)
        size = path.stat().st_size
        if good < size:
            if any(parts) or torn is not None:
                raise JournalDamaged(
                    f"{path} is damaged at byte {good}, and it is not the last segment"
                )
            if (next_frame := _find_frame(path, good)) is not None:
                raise JournalDamaged(
                    f"{path} is damaged at byte {good}, and intact records follow at byte "
                    f"{next_frame}"
                )
            torn = (path, good)
        parts.insert(0, frames)
        if _begins_with_snapshot(frames):
            break
    if (
        paths
        and not any(_begins_with_snapshot(frames) for frames in parts[:1])
        and _segment_number(paths[first]) != 1
    ):
        raise JournalDamaged(
            f"{paths[first]} does not begin with a snapshot, and the records before it are missing"
        )
    records = [record for frames in parts for frame in frames for record in frame]
    return History(records, paths[:first], torn)


def _begins_with_snapshot(frames: Sequence[Sequence[Record]]) -> bool:
    return bool(frames) and isinstance(frames[0][0], Totals)


_TAGS = "|".join(sorted(form.__struct_config__.tag for form in get_args(Record)))
_FRAME_BODY = re.compile(
    rf"(?:[\x90-\x9f]|\xdc..|\xdd....)[\x90-\x9f][\xa0-\xbf](?:{_TAGS})".encode("latin-1"),
    re.DOTALL,
)
"""Pattern of the start of a frame's body in msgpack: an array of records, each of which is an array
that begins with its tag."""


def _find_frame(path: Path, offset: int) -> int | None:
    """Return the offset in bytes of the first intact frame after the damaged one at ``offset``;
    None if there is none, as after an interrupted write."""
    data = path.read_bytes()
    for match in _FRAME_BODY.finditer(data, offset + 1):
        begin = match.start() - _HEADER.size
        if begin <= offset:
            continue
        size, checksum = _HEADER.unpack_from(data, begin)
        body = memoryview(data)[match.start() : match.start() + size]
        if size and len(body) == size and zlib.crc32(body) == checksum:
            return begin
    return None


def write_snapshot(path: Path, records: Sequence[Record]) -> None:
    """Write a snapshot as a file with one frame, atomically, and sync it. Raises OSError."""
    with atomic_file(path, synced=True) as partial:
        partial.write_bytes(_encode_frame(records))


def read_segment(path: Path) -> tuple[list[list[Record]], int]:
    """Return the frames before the first damaged or incomplete one, and that one's offset in bytes
    (the file's size if all are intact). Raises JournalError for an unknown record."""
    data = path.read_bytes()
    frames: list[list[Record]] = []
    offset = 0
    while offset + _HEADER.size <= len(data):
        size, checksum = _HEADER.unpack_from(data, offset)
        body = memoryview(data)[offset + _HEADER.size : offset + _HEADER.size + size]
        if size == 0 or len(body) < size or zlib.crc32(body) != checksum:
            break
        try:
            frames.append(_DECODER.decode(body))
        except msgspec.MsgspecError as error:
            raise JournalError(f"{path} has an unknown record at byte {offset}: {error}") from error
        offset += _HEADER.size + size
    return frames, offset


def _segment_number(path: Path) -> int:
    return int(path.stem[8:])


def _segment_name(number: int) -> str:
    return f"journal-{number:06d}.log"


def _next_number(folder: Path) -> int:
    """Return a number that no segment has had, including archived segments and those that were set
    aside."""
    aside = [path for path in folder.iterdir() if DAMAGED in path.name and path.is_dir()]
    all_segments = [
        path for place in (folder, folder / ARCHIVE, *aside) for path in segments(place)
    ]
    return max(map(_segment_number, all_segments), default=0) + 1


def _encode_frame(records: Sequence[Record]) -> bytes:
    body = _ENCODER.encode(records)
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


def _unreadable(folder: Path, error: OSError) -> JournalError:
    """Return the error for a file that cannot be read at the moment, so that its contents are
    unknown."""
    return JournalError(
        f"{error.filename or folder} cannot be read: {error.strerror or error}; nothing was "
        f"changed. Run again when it "
        "can be read, or start over with recover_mode=disabled, which deletes the files of the run"
    )


def _create(folder: Path, segment: int) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(folder / _segment_name(segment), flags, 0o600)
    sync(folder)
    return handle


def _cut_torn_frame(path: Path, size: int) -> str:
    """Truncate a segment to ``size`` bytes and save the removed bytes, an incomplete frame, in
    another file. Returns a warning about it."""
    data = path.read_bytes()[size:]
    kept = unused_name(path, f".cut-{size}")
    with atomic_file(kept, synced=True) as partial:
        partial.write_bytes(data)
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())
    return (
        f"the last {len(data)} bytes of {path} are an incomplete record, as after an "
        "interrupted write; "
        f"they are kept in "
        f"{kept.name}, and the run continues without them"
    )


def _set_aside(folder: Path) -> Path:
    """Move the segments and the archive into a new folder, and return that folder. Raises
    OSError."""
    aside = unused_name(folder / "journal", DAMAGED)
    aside.mkdir()
    for path in segments(folder):
        path.rename(aside / path.name)
    if (folder / ARCHIVE).exists():
        (folder / ARCHIVE).rename(aside / ARCHIVE)
    sync(folder)
    return aside


def _remove_segments(folder: Path, paths: Sequence[Path], archive: bool) -> None:
    """Delete segments or, with ``archive``, move them into the archive."""
    if archive and paths:
        (folder / ARCHIVE).mkdir(exist_ok=True)
    for path in paths:
        if archive:
            path.rename(folder / ARCHIVE / path.name)
        else:
            path.unlink(missing_ok=True)


def _take_lock(folder: Path) -> int:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise JournalError(f"another process writes the journal in {folder}") from error
    return handle


def _wake(waiters: Sequence[_Waiter], error: BaseException | None) -> None:
    """Resolve the waiters' futures with one call into each event loop. Closed loops are skipped."""
    for loop in {waiter.loop for waiter in waiters}:
        futures = [waiter.future for waiter in waiters if waiter.loop is loop]
        try:
            loop.call_soon_threadsafe(_resolve, futures, error)
        except RuntimeError:
            continue


def _resolve(futures: Sequence[asyncio.Future[None]], error: BaseException | None) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None) if error is None else future.set_exception(error)
