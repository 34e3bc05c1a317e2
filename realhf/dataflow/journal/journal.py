"""Defines the records of the master's journal, and writes and reads its segments.

Steps are numbered from 0; ``Ckpt(s)`` is taken after step s, and a run without a checkpoint resumes from -1.

Files ``journal-<n>.log`` of frames ``len u32 | crc32 u32 | msgpack`` in little endian. A frame holds the records of
one ``append``, which therefore survive a crash together or not at all.

A process that is killed leaves the beginning of a frame at the very end. What else is not as it was written is damage,
and never taken for the end of the history: samples that were trained would be drawn again.
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

from realhf.base.files import DAMAGED, dangling, sync, unused_name, whole_file

DIED = "worker_died"


class Admit(msgspec.Struct, frozen=True, tag="admit", array_like=True):
    """Attempt ``attempt`` at a sample was given to ``worker`` at policy version ``version``. ``order`` counts
    admissions; ``item`` is all that is needed to play it again. Of the attempts before, ``failures`` failed, and in
    ``deaths`` the process died that played them."""

    id: str
    attempt: int
    version: int
    order: int
    worker: str
    item: dict[str, Any]
    failures: int = 0
    deaths: int = 0


class Accept(msgspec.Struct, frozen=True, tag="accept", array_like=True):
    """The sample is finished. ``ref``: where its payload lies, which says as well what rank of the trainer received it
    (``PayloadRef`` in ``realhf.api.calls``); ``meta``: the frames of its metadata."""

    id: str
    attempt: int
    ref: list[Any]
    meta: list[bytes]


class Reject(msgspec.Struct, frozen=True, tag="reject", array_like=True):
    """An attempt ended without a sample. ``final``: there will be no other attempt. ``outcome`` is ``DIED`` where the
    process died that played it."""

    id: str
    attempt: int
    outcome: str
    message: str
    final: bool


FLAT = "flat"
"""Why a sample is dropped that gives way to another one: it teaches nothing."""


class Drop(msgspec.Struct, frozen=True, tag="drop", array_like=True):
    """An accepted sample will never be trained."""

    id: str
    reason: str


class Consume(msgspec.Struct, frozen=True, tag="consume", array_like=True):
    """The samples of a step, in the order of its step batch."""

    ids: list[str]
    step: int


class Commit(msgspec.Struct, frozen=True, tag="commit", array_like=True):
    """Step ``step`` was trained; ``version`` is that of the weights it made."""

    step: int
    version: int


class Ckpt(msgspec.Struct, frozen=True, tag="ckpt", array_like=True):
    """A checkpoint after ``step`` is valid; ``ref`` names it."""

    step: int
    ref: str


class Resume(msgspec.Struct, frozen=True, tag="resume", array_like=True):
    """The run goes on from the checkpoint after ``step``: what later steps consumed is accepted again."""

    step: int


class Draw(msgspec.Struct, frozen=True, tag="draw", array_like=True):
    """State of the source of prompts after a draw, JSON-able. In one ``append`` with what was drawn."""

    state: dict[str, Any]


class End(msgspec.Struct, frozen=True, tag="end", array_like=True):
    """The run came to its end in order."""


class Totals(msgspec.Struct, frozen=True, tag="totals", array_like=True):
    """First record of a snapshot: what happened before it, in numbers. Steps up to ``step`` are final; the records
    of the same ``append`` say what is still open. ``admitted`` counts open samples too, ``consumed`` those of final
    steps alone; ``order`` is the next admission's; ``planned`` are step batches (step, ids) which a resumed run has yet
    to repeat; ``flat`` is that of ``JournalState``."""

    step: int
    admitted: int
    consumed: int
    rejected: int
    dropped: int
    order: int
    planned: list[tuple[int, list[str]]]
    flat: list[int] = []


Record: TypeAlias = Admit | Accept | Reject | Drop | Consume | Commit | Ckpt | Resume | Draw | End | Totals


_log = logging.getLogger(__name__)
_HEADER = struct.Struct("<II")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Record])
SEGMENT_BYTES = 16 << 20
ARCHIVE = "archive"
_SEGMENT = re.compile(r"journal-(\d+)\.log")
CLOSE_TIMEOUT_S = 30.0
SYNC_INTERVAL_S, SYNC_RECORDS = 0.05, 64


class JournalError(RuntimeError):
    """The journal cannot be read, or is not written any more."""


class JournalDamaged(JournalError):
    """Something is missing in the journal, or is not as it was written. Nothing was changed."""


class _Entry(NamedTuple):
    number: int
    frame: bytes
    begins_segment: bool


class _Waiter(NamedTuple):
    number: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class Journal:
    """Appends from one event loop; a thread of its own writes and syncs, several appends at a time: at once when it
    last did so ``SYNC_INTERVAL_S`` ago or when ``SYNC_RECORDS`` appends wait. Make it with ``open``.

    A failed write ends the journal: it is raised by every later call.
    """

    def __init__(self, folder: Path, segment: int, lock: int, archive: bool) -> None:
        self._folder = folder
        self._lock = lock
        self._archive = archive
        self._changed = threading.Condition()
        self._waiting: list[_Entry] = []
        self._waiters: list[_Waiter] = []
        self._synced_at = -SYNC_INTERVAL_S
        self._number = 0
        self._synced = 0
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
        """Everything that is there since the last snapshot, and the journal that goes on in a new segment.

        A frame at the end that was not written to its end is cut off, and kept in a file of its own; ``warn`` is told.
        ``archive``: segments that a snapshot replaces are moved into ``archive/``, for the audit, instead of being
        deleted. ``restart``: begin with these records, a snapshot, in place of what is there, which is put aside.
        Raises JournalDamaged, and JournalError where another process writes here or a file cannot be read now.
        """
        try:
            if folder.is_symlink() and not folder.exists():
                raise dangling(folder)
            folder.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(folder)
        except OSError as error:
            raise _unreadable(folder, error) from error
        try:
            if restart is not None:
                warn(f"what {folder} held is kept in {_set_aside(folder)}")
                journal = cls(folder, _next_number(folder), lock, archive)
                assert isinstance(restart[0], Totals)
                journal.checkpointed(restart[0].step, restart)
                return journal, list(restart)
            history = read_history(folder)
            if history.torn is not None:
                warn(_cut(*history.torn))
            _put_away(folder, history.replaced, archive)
            return cls(folder, _next_number(folder), lock, archive), history.records
        except OSError as error:
            os.close(lock)
            raise _unreadable(folder, error) from error
        except BaseException:
            os.close(lock)
            raise

    def append(self, *records: Record) -> int:
        """Queue the records as one frame. Returns the number that ``durable`` takes."""
        return self._queue(records, begins_segment=False)

    async def durable(self, number: int, timeout_s: float) -> None:
        """Return when the append with this number is on the disk. Raises JournalError if that failed or took
        longer than ``timeout_s``."""
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
                f"the disk of {self._folder} took longer than {timeout_s:g} s for a record (async_rl.journal_timeout_s)"
            ) from None

    def checkpointed(self, step: int, keep: Sequence[Record]) -> int:
        """Begin a new segment with ``keep``, ``JournalState.snapshot()`` after ``settle(step)``; earlier segments go
        once it is on the disk. Raises ValueError where ``keep`` is no snapshot of ``step``."""
        if not keep or not isinstance(keep[0], Totals) or keep[0].step != step:
            raise ValueError(f"a snapshot for step {step} begins with its Totals")
        return self._queue(keep, begins_segment=True)

    def close(self) -> None:
        """Write everything and end the thread. Raises JournalError if something was not written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise JournalError(f"the disk of {self._folder} took longer than {CLOSE_TIMEOUT_S:.0f} s")
        if self._lock >= 0:
            os.close(self._file)
            os.close(self._lock)
            self._lock = -1
        if self._failure is not None:
            raise JournalError(f"{self._folder} could not be written") from self._failure

    def _queue(self, records: Sequence[Record], *, begins_segment: bool) -> int:
        frame = _frame(records)
        with self._changed:
            self._check()
            self._number += 1
            self._waiting.append(_Entry(self._number, frame, begins_segment))
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
            while entries := self._next():
                self._write(entries)
                self._synced_at = time.monotonic()
                with self._changed:
                    self._synced = entries[-1].number
                    done = [waiter for waiter in self._waiters if waiter.number <= self._synced]
                    self._waiters = [waiter for waiter in self._waiters if waiter.number > self._synced]
                _wake(done, None)
        except BaseException as error:
            with self._changed:
                self._failure = error
                done, self._waiters = self._waiters, []
            _wake(done, JournalError(f"{self._folder} could not be written: {error}"))

    def _next(self) -> list[_Entry]:
        """What is to be written, after a while of collecting; empty at the end."""
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            while len(self._waiting) < SYNC_RECORDS and not self._closing:
                remaining = self._synced_at + SYNC_INTERVAL_S - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)
            entries, self._waiting = self._waiting, []
            return entries

    def _write(self, entries: Sequence[_Entry]) -> None:
        first = 0
        part: list[bytes] = []
        for entry in entries:
            if entry.begins_segment or self._size >= SEGMENT_BYTES:
                self._flush(part)
                self._rotate()
                part = []
                first = self._segment if entry.begins_segment else first
            part.append(entry.frame)
            self._size += len(entry.frame)
        self._flush(part)
        if first:
            _put_away(self._folder, [path for path in segments(self._folder) if _index(path) < first], self._archive)

    def _flush(self, frames: Sequence[bytes]) -> None:
        data = memoryview(b"".join(frames))
        while data:
            data = data[os.write(self._file, data) :]
        os.fdatasync(self._file)

    def _rotate(self) -> None:
        following = _create(self._folder, self._segment + 1)
        os.close(self._file)
        self._file = following
        self._segment += 1
        self._size = 0


def segments(folder: Path) -> list[Path]:
    """The segments in a folder in their order. Raises OSError where it cannot be read."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((folder / name for name in names if _SEGMENT.fullmatch(name)), key=_index)


class History(NamedTuple):
    """What the segments of a folder hold. ``records``: since the last snapshot; ``replaced``: segments before it;
    ``torn``: the segment whose end is no whole frame, and where that begins."""

    records: list[Record]
    replaced: list[Path]
    torn: tuple[Path, int] | None


def read_history(folder: Path) -> History:
    """Read the segments since the last snapshot. Changes nothing. Raises JournalDamaged where one is missing or has
    other damage than an end that was not written, JournalError for an unknown record, and OSError."""
    paths = segments(folder)
    parts: list[list[list[Record]]] = []
    torn: tuple[Path, int] | None = None
    first = len(paths)
    while first > 0:
        first -= 1
        path = paths[first]
        if first + 1 < len(paths) and _index(paths[first + 1]) != _index(path) + 1:
            raise JournalDamaged(f"{path.with_name(_name(_index(path) + 1))} is missing")
        frames, good = read_segment(path)
        size = path.stat().st_size
        if good < size:
            if any(parts) or torn is not None:
                raise JournalDamaged(f"{path} is damaged at byte {good}, and it is not the last segment")
            if (behind := _frame_behind(path, good)) is not None:
                raise JournalDamaged(f"{path} is damaged at byte {good}, and whole records follow at byte {behind}")
            torn = path, good
        parts.insert(0, frames)
        if frames and isinstance(frames[0][0], Totals):
            break
    if paths and not any(_begins(frames) for frames in parts[:1]) and _index(paths[first]) != 1:
        raise JournalDamaged(f"{paths[first]} does not begin with a snapshot, and what came before it is missing")
    records = [record for frames in parts for frame in frames for record in frame]
    return History(records, paths[:first], torn)


def _begins(frames: Sequence[Sequence[Record]]) -> bool:
    """Return whether the frames of a segment begin with a snapshot."""
    return bool(frames) and isinstance(frames[0][0], Totals)


_TAGS = "|".join(sorted(form.__struct_config__.tag for form in get_args(Record)))
_FRAME_BODY = re.compile(
    rf"(?:[\x90-\x9f]|\xdc..|\xdd....)[\x90-\x9f][\xa0-\xbf](?:{_TAGS})".encode("latin-1"), re.DOTALL
)
"""How the body of a frame begins: an array of records, each an array that begins with its tag."""


def _frame_behind(path: Path, offset: int) -> int | None:
    """Return where the first whole frame begins behind a bad one; None where there is none, as after an interrupted
    write."""
    data = path.read_bytes()
    for found in _FRAME_BODY.finditer(data, offset + 1):
        begin = found.start() - _HEADER.size
        if begin <= offset:
            continue
        size, checksum = _HEADER.unpack_from(data, begin)
        body = memoryview(data)[found.start() : found.start() + size]
        if size and len(body) == size and zlib.crc32(body) == checksum:
            return begin
    return None


def write_snapshot(path: Path, records: Sequence[Record]) -> None:
    """Write a snapshot as a file of one frame, whole and on the disk. Raises OSError."""
    with whole_file(path, synced=True) as partial:
        partial.write_bytes(_frame(records))


def read_segment(path: Path) -> tuple[list[list[Record]], int]:
    """The frames up to the first that is not whole, and where that one begins (the size, if all are)."""
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
            raise JournalError(f"{path} holds an unknown record at byte {offset}: {error}") from error
        offset += _HEADER.size + size
    return frames, offset


def _index(path: Path) -> int:
    return int(path.stem[8:])


def _name(number: int) -> str:
    return f"journal-{number:06d}.log"


def _next_number(folder: Path) -> int:
    """Return a number that no segment has had, also none of those that were put aside."""
    aside = [path for path in folder.iterdir() if DAMAGED in path.name and path.is_dir()]
    found = [path for place in (folder, folder / ARCHIVE, *aside) for path in segments(place)]
    return max(map(_index, found), default=0) + 1


def _frame(records: Sequence[Record]) -> bytes:
    body = _ENCODER.encode(records)
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


def _unreadable(folder: Path, error: OSError) -> JournalError:
    """Return the error about a file that cannot be read now, which says nothing of what it holds."""
    return JournalError(
        f"{error.filename or folder} cannot be read: {error.strerror or error}; nothing was changed. Run again when it "
        "can be read, or begin anew with recover_mode=disabled, which deletes what the run has"
    )


def _create(folder: Path, segment: int) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(folder / _name(segment), flags, 0o600)
    sync(folder)
    return handle


def _cut(path: Path, size: int) -> str:
    """Cut a segment off where its last frame begins that is not whole; its bytes are kept. Returns what is to be said
    of it."""
    data = path.read_bytes()[size:]
    kept = unused_name(path, f".cut-{size}")
    with whole_file(kept, synced=True) as partial:
        partial.write_bytes(data)
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())
    return (
        f"the last {len(data)} bytes of {path} are no whole record, as after an interrupted write; they are kept in "
        f"{kept.name}, and the run goes on without them"
    )


def _set_aside(folder: Path) -> Path:
    """Move the segments and the archive into a folder of their own, which is returned. Raises OSError."""
    aside = unused_name(folder / "journal", DAMAGED)
    aside.mkdir()
    for path in segments(folder):
        path.rename(aside / path.name)
    if (folder / ARCHIVE).exists():
        (folder / ARCHIVE).rename(aside / ARCHIVE)
    sync(folder)
    return aside


def _put_away(folder: Path, paths: Sequence[Path], archive: bool) -> None:
    """Delete segments, or move them into the archive."""
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
    """Resolve futures, one visit for each loop; a loop that is closed has nobody who waits."""
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
