"""Embedded store: rows in one SQLite file in WAL mode, payloads in segment files next to it.

A commit is one transaction, after the payloads it refers to were written. It survives the death of
the process, and with ``durable`` a crash of the machine. Without a flush a small transaction takes
about 30 microseconds, less than a thread switch, so it runs on the event loop. Payloads, large
transactions and checkpoints, which may wait for the disk, run on the writer thread.

A full disk must stay drainable: pushes are refused while there is still space for the rows of pulls
and acknowledgements, and a ballast file is deleted when even those do not fit. Source:
docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
from isal import isal_zlib

from realhf.base import process_clock
from realhf.trajectory.records import (
    PAYLOAD_LOST,
    TABLES,
    GroupPlace,
    GroupRecord,
    LeaseRecord,
    Payload,
    PayloadRef,
    Record,
    RunRecord,
    table_and_key,
)
from realhf.trajectory.store.base import (
    Changes,
    OutcomeUnknown,
    PayloadLost,
    Snapshot,
    StoreFailure,
    TrajectoryStore,
    empty_snapshot,
)
from realhf.trajectory.store.segments import (
    SEGMENT_BYTES,
    SegmentFile,
    Segments,
    ref_of,
    sparse_files,
)

logger = logging.getLogger(__name__)
_INTEGER_KEYS = ("envs", "groups")
_INLINE_ROWS = 100
"""Maximum number of rows of a transaction that runs on the event loop."""
_INLINE_BYTES = 256 << 10
"""Maximum payload bytes that are written on the event loop."""
_CHECKPOINT_BYTES = 8 << 20
"""Size of the write-ahead log at which it is merged into the database."""
_LOGGED_BYTES_PER_ROW = 4096
"""Bytes that a row adds to the write-ahead log: one page of the database."""
_WAIT_FOR_CHECKPOINT_BYTES = 128 << 20
"""Size of the write-ahead log at which it is merged before the next commit."""
_FORMAT = 1
"""Version of the table format. Since version 1 every row starts with a checksum over its table
name, its key and its contents."""
_RESERVE_BYTES = 64 << 20
_RESERVE_SHARE = 16
"""Divisor of the disk size. Pushes are refused below _RESERVE_BYTES of free space, or below this
fraction of the disk if that is smaller."""
_BALLAST_BYTES = 16 << 20
_BALLAST_SHARE = 32
"""Divisor of the disk size. The ballast file has _BALLAST_BYTES, or this fraction of the disk if
that is smaller."""
_MAX_UNREADABLE = 20
"""Maximum number of unreadable groups; beyond it, the check when the store opens gives up."""
_LOOK_EVERY_S = 0.05
_LOOK_EVERY_BYTES = 4 << 20
"""Seconds, and bytes pushed, after which the free space is checked again."""
_CHECKED_BYTES = 64 << 20
"""Bytes of the newest payloads that are checked when the store opens; older ones are checked when
they are read."""


class SqliteStore(TrajectoryStore):
    """Store in one folder, locked by one process. ``durable``: every commit reaches the disk before
    it returns."""

    def __init__(
        self, folder: Path, *, durable: bool = False, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.name = f"sqlite:{folder}"
        self._folder = folder
        self._durable = durable
        self.files = self._segments = Segments(folder, segment_bytes)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trajectory-store")
        self._lock: int | None = None
        self._database: sqlite3.Connection | None = None
        self._logged = 0
        self._checkpoint: asyncio.Future[None] | None = None
        self._has_ballast = False
        self._loss = ""
        self._room = 0
        self._next_check_at = 0.0

    async def open(self) -> Snapshot:
        """Lock the folder and restore the data. Raises StoreFailure."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._has_ballast = self._ballast.exists()
            try:
                return await self._on_writer(self._restore)
            except (OSError, sqlite3.Error) as error:
                if not (_is_full(error) and await self._on_writer(self._make_room)):
                    raise
                return await self._on_writer(self._restore)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailure(f"{self.name}: {error}") from error

    async def reload(self) -> Snapshot:
        """Read all rows again."""
        try:
            snapshot = await self._on_writer(self._load)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailure(f"{self.name}: {error}") from error
        self._segments.recount(_referenced_payloads(snapshot))
        return snapshot

    async def stage(self, payloads: Sequence[bytes]) -> list[PayloadRef]:
        """Assign payloads to files. Raises StoreFailure if the disk would become too full for later
        commits."""
        self._refuse_when_full(sum(map(len, payloads)))
        return list(self._segments.stage(payloads))

    async def unstage(self, refs: Sequence[PayloadRef]) -> None:
        """Remove staged payloads from the files."""
        self._segments.unstage(ref for ref in refs if isinstance(ref, int))

    async def commit(self, changes: Changes) -> None:
        """Write the payloads, then the rows. Raises StoreFailure if nothing of the commit was
        stored, or OutcomeUnknown. Housekeeping after the rows are written cannot make the commit
        fail."""
        staged = self._segments.waiting()
        error = await self._attempt(staged, changes)
        if error is not None and _is_full(error) and await self._on_writer(self._make_room):
            error = await self._attempt(staged, changes)
        if error is not None:
            raise StoreFailure(f"{self.name}: {error}") from error
        self._segments.drop_written(staged)
        self._segments.mark_live(_new_payloads(changes))
        empty = self._segments.free(ref for ref in changes.freed if isinstance(ref, int))
        if empty:
            self._writer.submit(self._remove, empty)
        try:
            await self._merge_log()
        except (OSError, sqlite3.Error) as error:
            logger.error(
                "%s: the log of changes could not be merged, and grows until it can: %s",
                self.name,
                error,
            )

    async def _attempt(self, staged: dict[int, bytes], changes: Changes) -> Exception | None:
        """Write payloads and rows. Return None, or the error if nothing was stored. Raises
        OutcomeUnknown."""
        try:
            if staged and (self._durable or sum(map(len, staged.values())) > _INLINE_BYTES):
                await self._on_writer(self._segments.write, staged, self._durable)
            elif staged:
                self._segments.write(staged, self._durable)
        except OSError as error:
            return error
        try:
            if self._durable or len(changes.rows) > _INLINE_ROWS or changes.cleared:
                await self._on_writer(self._write, changes)
            else:
                self._write(changes)
        except (OSError, sqlite3.Error) as error:
            return None if await self._is_stored(changes, error) else error
        return None

    async def _is_stored(self, changes: Changes, error: Exception) -> bool:
        """Return whether a failed transaction was committed after all, according to the database.
        Raises OutcomeUnknown."""
        try:
            return await self._on_writer(self._is_committed, changes)
        except (OSError, sqlite3.Error) as unknown:
            raise OutcomeUnknown(
                f"{self.name}: {error}; then, looking what was kept: {unknown}"
            ) from unknown

    async def read(self, payloads: Sequence[Payload]) -> list[bytes]:
        """Return the bytes of payloads after checking their CRCs. Raises PayloadLost only for bytes
        that were read and differ from what was written, and StoreFailure if they cannot be read
        now."""
        return await asyncio.to_thread(self._read, payloads)

    async def compact(
        self, live: Iterable[Payload], closed_files: Mapping[int, SegmentFile]
    ) -> int:
        """Punch holes into the files, one file at a time so that commits can run in between."""
        freed = 0
        try:
            for number, file, gaps in await asyncio.to_thread(
                lambda: list(sparse_files(live, closed_files))
            ):
                freed += await self._on_writer(self._segments.punch_holes, number, file, gaps)
        except OSError as error:
            raise StoreFailure(f"{self.name}: {error}") from error
        return freed

    def take_loss(self) -> str:
        """Return a description of lost data, or "". Damaged rows of groups and leases are only
        logged; only a damaged run record counts as a loss."""
        loss = self._loss
        self._loss = ""
        return loss

    async def close(self) -> None:
        """Close the database and the files; release the folder's lock last."""
        await self._on_writer(self._close_database)
        await self._on_writer(self._drop_spare_ballast)
        await asyncio.to_thread(self._writer.shutdown)
        self._segments.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _on_writer(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._writer, function, *args)

    def _take_lock(self) -> None:
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 20, 0).decode(errors="replace").strip()
            os.close(self._lock)
            self._lock = None
            raise StoreFailure(f"{self.name} is in use by another server (pid {owner})") from None
        # The pid is written for people only, and a full disk must not prevent the start.
        with suppress(OSError):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    @property
    def _ballast(self) -> Path:
        return self._folder / "ballast"

    def _refuse_when_full(self, nbytes: int) -> None:
        """Raise StoreFailure for a push that would leave too little free space to drain the
        store."""
        self._room -= nbytes
        if self._room > 0 and process_clock.now() < self._next_check_at:
            return
        free, total = self._disk()
        reserve = min(_RESERVE_BYTES, total // _RESERVE_SHARE)
        self._room = min(_LOOK_EVERY_BYTES, free - self._segments.waiting_bytes - nbytes - reserve)
        self._next_check_at = process_clock.now() + _LOOK_EVERY_S
        self._segments.tight = self._room < 0
        if self._segments.tight:
            self._writer.submit(self._remove, self._segments.end_active())
            self._writer.submit(self._segments.delete_spares)
            raise StoreFailure(
                f"{self.name}: the disk has {free >> 20} MiB left, and {reserve >> 20} MiB are "
                f"kept for pulls and "
                "acknowledgements; pushes are refused until there is room"
            )
        if not self._has_ballast and free > 4 * reserve:
            self._has_ballast = True
            self._writer.submit(self._take_ballast, min(_BALLAST_BYTES, total // _BALLAST_SHARE))

    def _disk(self) -> tuple[int, int]:
        """Return (free bytes on the disk, size of the disk in bytes)."""
        try:
            stats = os.statvfs(self._folder)
        except OSError as error:
            raise StoreFailure(f"{self.name}: {error}") from error
        return stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize

    def _take_ballast(self, nbytes: int) -> None:
        """Create the ballast file, whose space is used to drain a full disk."""
        try:
            with self._ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            logger.warning("%s: no ballast of %d MiB: %s", self.name, nbytes >> 20, error)
            self._ballast.unlink(missing_ok=True)

    def _drop_spare_ballast(self) -> None:
        """Delete the ballast file if there is enough free space without it."""
        with suppress(OSError, StoreFailure):
            free, total = self._disk()
            if free > 4 * min(_RESERVE_BYTES, total // _RESERVE_SHARE):
                self._ballast.unlink(missing_ok=True)

    def _make_room(self) -> bool:
        """Delete the ballast and the spare files; return whether that freed anything."""
        had_ballast = self._ballast.exists()
        self._has_ballast = False
        self._ballast.unlink(missing_ok=True)
        freed_any = self._segments.delete_spares() or had_ballast
        if freed_any:
            logger.warning(
                "%s: the disk is full; what was kept in reserve is used to drain it", self.name
            )
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._run_checkpoint("TRUNCATE")
        return freed_any

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(
            self._folder / "state.sqlite", isolation_level=None, check_same_thread=False
        )
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}")
        database.execute("PRAGMA busy_timeout=5000")
        database.execute("PRAGMA wal_autocheckpoint=0")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > _FORMAT:
            database.close()
            raise StoreFailure(
                f"{self.name} has format {version}, this program knows up to {_FORMAT}; take a "
                f"newer one"
            )
        if version < _FORMAT:
            database.execute("BEGIN IMMEDIATE")
            for table in TABLES:
                if table in _INTEGER_KEYS:
                    columns = "(key INTEGER PRIMARY KEY, row BLOB NOT NULL)"
                else:
                    columns = "(key TEXT PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID"
                database.execute(f'CREATE TABLE IF NOT EXISTS "{table}" {columns}')
                rows = database.execute(
                    f'SELECT key, row FROM "{table}"'
                ).fetchall()  # rows of format 0, if there are any
                sealed = [(_seal(table, key, row), key) for key, row in rows]
                database.executemany(f'UPDATE "{table}" SET row = ? WHERE key = ?', sealed)
            database.execute(
                "CREATE TABLE IF NOT EXISTS damaged (name TEXT NOT NULL, key NOT NULL, row BLOB)"
            )
            database.execute(f"PRAGMA user_version={_FORMAT}")
            database.execute("COMMIT")
        return database

    def _load(self) -> Snapshot:
        """Read all rows. Damaged rows are moved to the table ``damaged`` for inspection."""
        self._close_database()
        self._database = self._connect()
        snapshot = empty_snapshot()
        damaged = list[tuple[str, Any, Any]]()
        for table, kind in TABLES.items():
            decoder = msgspec.msgpack.Decoder(kind)
            for key, row in self._database.execute(f'SELECT key, row FROM "{table}"'):
                record = _unseal(table, key, row, decoder)
                if record is None:
                    damaged.append((table, key, row))
                else:
                    snapshot[table].append(record)
        if damaged:
            counts = ", ".join(
                f"{table} {count}" for table, count in Counter(row[0] for row in damaged).items()
            )
            logger.error(
                "%s: damaged rows were set aside, in the table 'damaged': %s", self.name, counts
            )
            if any(table == "run" for table, _, _ in damaged):
                self._loss = "the record of the run is damaged, and was set aside"
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("INSERT INTO damaged VALUES (?, ?, ?)", damaged)
            for table, key, _ in damaged:
                self._database.execute(f'DELETE FROM "{table}" WHERE key IS ?', (key,))
            self._database.execute("COMMIT")
        return snapshot

    def _restore(self) -> Snapshot:
        snapshot = self._load()
        assert self._database is not None
        (set_aside,) = self._database.execute("SELECT count(*) FROM damaged").fetchone()
        self._segments.restore(list(_referenced_payloads(snapshot)), keep_unused=set_aside > 0)
        changes = _build_repairs(snapshot, self._find_torn(snapshot))
        if not changes:
            return snapshot
        self._write(changes)
        return self._load()

    def _find_torn(self, snapshot: Snapshot) -> set[int]:
        """Return the ids of groups whose payload differs from what was written. Only the newest
        payloads are read: after a power loss without ``durable`` they may not have reached the
        disk."""
        groups = sorted(
            (record for record in snapshot["groups"] if isinstance(record, GroupRecord)),
            key=lambda group: ref_of(group.payload),
            reverse=True,
        )
        torn = set()
        seen = 0
        unreadable = 0
        for group in groups:
            if not self._segments.contains(group.payload):
                torn.add(group.id)
            elif seen < _CHECKED_BYTES:
                seen += group.payload.nbytes
                try:
                    if isal_zlib.crc32(self._segments.read(group.payload)) != group.payload.crc:
                        torn.add(group.id)
                except OSError as error:
                    unreadable += 1
                    logger.error(
                        "%s: group %d cannot be read now, and stays: %s", self.name, group.id, error
                    )
                    if unreadable >= _MAX_UNREADABLE:
                        break
        if torn:
            logger.error(
                "%s: the payloads of %d groups are damaged; they go to quarantine",
                self.name,
                len(torn),
            )
        return torn

    async def _merge_log(self) -> None:
        """Merge the write-ahead log into the database once it has grown large enough, while later
        commits continue."""
        if self._logged < _CHECKPOINT_BYTES or (
            self._checkpoint is not None and not self._checkpoint.done()
        ):
            return
        size = (self._folder / "state.sqlite-wal").stat().st_size
        self._logged = 0
        if size > _WAIT_FOR_CHECKPOINT_BYTES:
            await self._on_writer(self._run_checkpoint, "TRUNCATE")
        else:
            self._checkpoint = asyncio.ensure_future(
                self._on_writer(self._run_checkpoint, "PASSIVE")
            )
            self._checkpoint.add_done_callback(self._on_checkpoint)

    def _on_checkpoint(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()):
            logger.error(
                "%s: the log of changes could not be merged, and grows until it can: %s",
                self.name,
                error,
            )

    def _remove(self, files: Sequence[SegmentFile]) -> None:
        try:
            self._segments.remove(files)
        except OSError as error:
            logger.error(
                "%s: files of acknowledged groups could not be deleted: %s", self.name, error
            )

    def _run_checkpoint(self, mode: str) -> None:
        with closing(
            sqlite3.connect(self._folder / "state.sqlite", isolation_level=None)
        ) as database:
            database.execute("PRAGMA busy_timeout=1000")
            database.execute(f"PRAGMA wal_checkpoint({mode})")

    def _write(self, changes: Changes) -> None:
        assert self._database is not None
        self._logged += _LOGGED_BYTES_PER_ROW * len(changes.rows)
        database = self._database
        puts: dict[str, list[tuple[Any, bytes]]] = {}
        deletes: dict[str, list[tuple[Any]]] = {}
        for (table, key), record in changes.rows.items():
            if record is None:
                deletes.setdefault(table, []).append((key,))
            else:
                puts.setdefault(table, []).append((key, _seal(table, key, _ENCODER.encode(record))))
        database.execute("BEGIN IMMEDIATE")
        try:
            for table in TABLES if changes.cleared else ():
                database.execute(f'DELETE FROM "{table}"')
            for table, keys in deletes.items():
                database.executemany(f'DELETE FROM "{table}" WHERE key = ?', keys)
            for table, rows in puts.items():
                database.executemany(f'INSERT OR REPLACE INTO "{table}" VALUES (?, ?)', rows)
            database.execute("COMMIT")
        except sqlite3.Error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def _is_committed(self, changes: Changes) -> bool:
        """Return whether all of these changes are in the database, as seen by a new connection."""
        self._close_database()
        self._database = self._connect()
        for (table, key), record in changes.rows.items():
            stored = self._database.execute(
                f'SELECT row FROM "{table}" WHERE key = ?', (key,)
            ).fetchone()
            wanted = None if record is None else (_seal(table, key, _ENCODER.encode(record)),)
            if stored != wanted:
                return False
        for table in TABLES if changes.cleared else ():
            (stored,) = self._database.execute(f'SELECT count(*) FROM "{table}"').fetchone()
            if stored != sum(
                record is not None and name == table for (name, _), record in changes.rows.items()
            ):
                return False
        return True

    def _read(self, payloads: Sequence[Payload]) -> list[bytes]:
        contents = []
        lost = []
        for payload in payloads:
            try:
                data = self._segments.bytes_waiting(ref_of(payload)) or self._segments.read(payload)
            except OSError as error:
                raise StoreFailure(f"{self.name}: a payload cannot be read now: {error}") from error
            contents.append(data)
            if isal_zlib.crc32(data) != payload.crc:
                lost.append(payload.ref)
        if lost:
            raise PayloadLost(self.name, lost)
        return contents

    def _close_database(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


_ENCODER = msgspec.msgpack.Encoder()
_CRC_BYTES = 4


def _seal(table: str, key: Any, row: bytes) -> bytes:
    """Prefix a row with a checksum of table, key and row, so that a damaged row, or a row stored
    under another key, is detected."""
    return (
        isal_zlib.crc32(row, isal_zlib.crc32(f"{table} {key}".encode())).to_bytes(
            _CRC_BYTES, "little"
        )
        + row
    )


def _unseal(table: str, key: Any, row: Any, decoder: msgspec.msgpack.Decoder[Any]) -> Record | None:
    """Return the record in a row; None if the row is damaged."""
    if not isinstance(row, bytes) or _seal(table, key, row[_CRC_BYTES:]) != row:
        return None
    try:
        record = decoder.decode(row[_CRC_BYTES:])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return record if table_and_key(record) == (table, key) else None


def _is_full(error: Exception) -> bool:
    """Return whether an error means that the disk is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def _build_repairs(snapshot: Snapshot, torn: set[int]) -> Changes:
    """Return the changes that make the remaining data servable after damage: groups with damaged
    payloads go to quarantine, and the other groups of their batches and bundles become single
    groups."""
    groups = {group.id: group for group in snapshot["groups"] if isinstance(group, GroupRecord)}
    changes = Changes()
    leased = set[int]()
    for lease in snapshot["leases"]:
        if isinstance(lease, LeaseRecord):
            if torn.isdisjoint(lease.groups) and groups.keys() >= set(lease.groups):
                leased.update(lease.groups)
            else:
                changes.rows["leases", lease.lease_id] = None
    whole = _whole_bundles(groups, torn)
    for group in groups.values():
        changed = group
        if group.id in torn:
            changed = msgspec.structs.replace(
                group, place=GroupPlace.QUARANTINE, bundle=None, reason=PAYLOAD_LOST
            )
        elif group.place is GroupPlace.LEASED and group.id not in leased:
            changed = msgspec.structs.replace(group, place=GroupPlace.QUEUE)
        elif (
            group.bundle is not None
            and group.place is GroupPlace.QUEUE
            and group.bundle not in whole
        ):
            changed = msgspec.structs.replace(group, bundle=None)
        if changed != group:
            changes.rows["groups", group.id] = changed
    return changes


def _whole_bundles(groups: Mapping[int, GroupRecord], torn: set[int]) -> set[tuple[int, int]]:
    """Return the bundles that are still complete."""
    queued = (
        group
        for group in groups.values()
        if group.place is GroupPlace.QUEUE and group.id not in torn
    )
    counts = Counter(group.bundle for group in queued if group.bundle is not None)
    return {bundle for bundle, count in counts.items() if count == bundle[1]}


def _referenced_payloads(snapshot: Snapshot) -> Iterable[Payload]:
    """Yield every referenced payload: those of all groups, and the latest example if its group is
    gone."""
    ids = set()
    for group in snapshot["groups"]:
        if isinstance(group, GroupRecord):
            ids.add(group.id)
            yield group.payload
    for run in snapshot["run"]:
        if isinstance(run, RunRecord) and run.latest is not None and run.latest.id not in ids:
            yield run.latest.payload


def _new_payloads(changes: Changes) -> Iterable[Payload]:
    """Yield the payloads that the written rows refer to."""
    for record in changes.rows.values():
        if isinstance(record, GroupRecord):
            yield record.payload
        elif isinstance(record, RunRecord) and record.latest is not None:
            yield record.latest.payload
