"""Implements the embedded store: rows in one SQLite file in WAL mode, payloads in segment files beside it.

A commit is one transaction, after the payloads it refers to were written. It survives the death of the process; with
``durable`` also that of the machine. Without a flush a small transaction takes some 30 microseconds, less than a switch
to another thread, so it runs on the event loop. Payloads, large transactions and checkpoints, which may wait for the
disk, go to the writer thread. Source: docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from isal import isal_zlib

from realhf.trajectory.base.records import TABLES, GroupRecord, LeaseRecord, Payload, PayloadRef, Place, RunRecord
from realhf.trajectory.store.base import Changes, Files, PayloadLost, Snapshot, StoreFailure, empty_snapshot
from realhf.trajectory.store.segments import SEGMENT_BYTES, Segments

logger = logging.getLogger(__name__)
_INTEGER_KEYS = ("envs", "groups")
_INLINE_ROWS = 100
"""Number of rows up to which a transaction runs on the event loop."""
_INLINE_BYTES = 256 << 10
"""Size of payloads up to which they are written on the event loop."""
_CHECKPOINT_BYTES = 8 << 20
"""Size of the log of changes from which it is merged into the database."""
_LOGGED_BYTES_PER_ROW = 4096
"""Bytes that a row adds to the log: one page of the database."""
_WAIT_FOR_CHECKPOINT_BYTES = 128 << 20
"""Size of the log of changes from which it is merged before the next commit."""
_CHECKED_BYTES = 64 << 20
"""How many bytes of payloads at the end of what was written are checked when the store opens; the others are checked
when they are read."""


class SqliteStore:
    """Keeps one folder, locked to one process. ``durable``: every commit reaches the disk before it returns."""

    shared = False
    reloads = True

    def __init__(self, folder: Path, *, durable: bool = False, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.name = f"sqlite:{folder}"
        self._folder = folder
        self._durable = durable
        self._segments = Segments(folder, segment_bytes)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trajectory-store")
        self._lock: int | None = None
        self._database: sqlite3.Connection | None = None
        self._logged = 0
        self._checkpoint: asyncio.Future[None] | None = None

    @property
    def files(self) -> Files:
        """See ``Store``."""
        return self._segments

    async def open(self) -> Snapshot:
        """Lock the folder and read everything back. Raises StoreFailure."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            return await self._on_writer(self._restore)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailure(f"{self.name}: {error}") from error

    async def reload(self) -> Snapshot:
        """See ``Store``."""
        try:
            snapshot = await self._on_writer(self._load)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailure(f"{self.name}: {error}") from error
        self._segments.recount(_payloads(snapshot))
        return snapshot

    async def stage(self, payloads: Sequence[bytes]) -> list[PayloadRef]:
        """See ``Store``."""
        return list(self._segments.stage(payloads))

    async def unstage(self, refs: Sequence[PayloadRef]) -> None:
        """See ``Store``."""
        self._segments.unstage(ref for ref in refs if isinstance(ref, int))

    async def commit(self, changes: Changes) -> None:
        """Write the payloads, then the rows. Raises StoreFailure, and then nothing of the commit is kept. After the
        rows comes housekeeping, whose failure does not fail the commit."""
        staged = self._segments.waiting()
        small = not self._durable and len(changes.rows) <= _INLINE_ROWS and not changes.cleared
        try:
            if staged and (self._durable or sum(map(len, staged.values())) > _INLINE_BYTES):
                await self._on_writer(self._segments.write, staged, self._durable)
            elif staged:
                self._segments.write(staged, self._durable)
            if small:
                self._write(changes)
            else:
                await self._on_writer(self._write, changes)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailure(f"{self.name}: {error}") from error
        self._segments.written(staged)
        self._segments.kept(_new_payloads(changes))
        empty = self._segments.free(ref for ref in changes.freed if isinstance(ref, int))
        if empty:
            self._writer.submit(self._remove, empty)
        try:
            await self._merge_log()
        except (OSError, sqlite3.Error) as error:
            logger.error("%s: the log of changes could not be merged, and grows until it can: %s", self.name, error)

    async def read(self, payloads: Sequence[Payload]) -> list[bytes]:
        """Return the bytes of payloads, checked. Raises PayloadLost."""
        return await asyncio.to_thread(self._read, payloads)

    def take_loss(self) -> str:
        """Return an empty text: the folder is locked to this process, so no other process can take anything away from
        it."""
        return ""

    async def begin(self) -> list[Changes]:
        """Raise AssertionError: one server has this store for itself."""
        raise AssertionError("one server has this store for itself")

    async def follow(self) -> list[Changes]:
        """Raise AssertionError: one server has this store for itself."""
        raise AssertionError("one server has this store for itself")

    async def abandon(self) -> None:
        """Raise AssertionError: one server has this store for itself."""
        raise AssertionError("one server has this store for itself")

    async def close(self) -> None:
        """See ``Store``. The lock of the folder is released last."""
        await self._on_writer(self._close_database)
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
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._folder / "state.sqlite", isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}")
        database.execute("PRAGMA busy_timeout=5000")
        database.execute("PRAGMA wal_autocheckpoint=0")
        for table in TABLES:
            key = "INTEGER PRIMARY KEY" if table in _INTEGER_KEYS else "TEXT PRIMARY KEY"
            database.execute(
                f'CREATE TABLE IF NOT EXISTS "{table}" (key {key}, row BLOB NOT NULL) WITHOUT ROWID'
                if key.startswith("TEXT")
                else f'CREATE TABLE IF NOT EXISTS "{table}" (key {key}, row BLOB NOT NULL)'
            )
        return database

    def _load(self) -> Snapshot:
        self._close_database()
        self._database = self._connect()
        snapshot = empty_snapshot()
        for table, kind in TABLES.items():
            decode = msgspec.msgpack.Decoder(kind).decode
            snapshot[table] = [decode(row) for (row,) in self._database.execute(f'SELECT row FROM "{table}"')]
        return snapshot

    def _restore(self) -> Snapshot:
        snapshot = self._load()
        self._segments.restore(_payloads(snapshot))
        return self._without_torn(snapshot)

    def _without_torn(self, snapshot: Snapshot) -> Snapshot:
        """Drop groups whose payload did not reach the disk; only the newest ones can be among them."""
        groups = sorted(
            (record for record in snapshot["groups"] if isinstance(record, GroupRecord)),
            key=lambda group: _position(group.payload),
            reverse=True,
        )
        torn, seen = set(), 0
        for group in groups:
            if not self._segments.holds(group.payload):
                torn.add(group.id)
            elif seen < _CHECKED_BYTES:
                seen += group.payload.nbytes
                if isal_zlib.crc32(self._segments.read(group.payload)) != group.payload.crc:
                    torn.add(group.id)
        if torn:
            logger.error("%s: the payloads of %d groups are torn, they are lost", self.name, len(torn))
            self._forget(torn, snapshot)
        return self._load() if torn else snapshot

    def _forget(self, torn: set[int], snapshot: Snapshot) -> None:
        """Delete torn groups; the other groups of their batches go back to the queue."""
        changes = Changes(rows={("groups", key): None for key in torn})
        for run in snapshot["run"]:
            if isinstance(run, RunRecord) and run.latest is not None and run.latest.id in torn:
                changes.rows["run", "run"] = msgspec.structs.replace(run, latest=None)
        groups = {group.id: group for group in snapshot["groups"] if isinstance(group, GroupRecord)}
        for lease in snapshot["leases"]:
            if isinstance(lease, LeaseRecord) and torn & set(lease.groups):
                changes.rows[("leases", lease.lease_id)] = None
                for key in set(lease.groups) - torn:
                    changes.rows[("groups", key)] = msgspec.structs.replace(groups[key], place=Place.QUEUE)
        self._write(changes)

    async def _merge_log(self) -> None:
        """Merge the log into the database now and then, beside the commits that follow."""
        if self._logged < _CHECKPOINT_BYTES or (self._checkpoint is not None and not self._checkpoint.done()):
            return
        size = (self._folder / "state.sqlite-wal").stat().st_size
        self._logged = 0
        if size > _WAIT_FOR_CHECKPOINT_BYTES:
            await self._on_writer(self._run_checkpoint, "TRUNCATE")
        else:
            self._checkpoint = asyncio.ensure_future(self._on_writer(self._run_checkpoint, "PASSIVE"))
            self._checkpoint.add_done_callback(self._checkpoint_ended)

    def _checkpoint_ended(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()):
            logger.error("%s: the log of changes could not be merged, and grows until it can: %s", self.name, error)

    def _remove(self, segments: Sequence[int]) -> None:
        try:
            self._segments.remove(segments)
        except OSError as error:
            logger.error("%s: files of acknowledged groups could not be deleted: %s", self.name, error)

    def _run_checkpoint(self, mode: str) -> None:
        with closing(sqlite3.connect(self._folder / "state.sqlite", isolation_level=None)) as database:
            database.execute("PRAGMA busy_timeout=1000")
            database.execute(f"PRAGMA wal_checkpoint({mode})")

    def _write(self, changes: Changes) -> None:
        assert self._database is not None
        self._logged += _LOGGED_BYTES_PER_ROW * len(changes.rows)
        database, encode = self._database, msgspec.msgpack.Encoder().encode
        puts: dict[str, list[tuple[Any, bytes]]] = {}
        deletes: dict[str, list[tuple[Any]]] = {}
        for (table, key), record in changes.rows.items():
            if record is None:
                deletes.setdefault(table, []).append((key,))
            else:
                puts.setdefault(table, []).append((key, encode(record)))
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

    def _read(self, payloads: Sequence[Payload]) -> list[bytes]:
        found, lost = [], []
        for payload in payloads:
            try:
                assert isinstance(payload.ref, int)
                data = self._segments.waiting_bytes(payload.ref) or self._segments.read(payload)
            except OSError as error:
                logger.error("%s: %s", self.name, error)
                data = b""
            found.append(data)
            if isal_zlib.crc32(data) != payload.crc:
                lost.append(payload.ref)
        if lost:
            raise PayloadLost(self.name, lost)
        return found

    def _close_database(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _payloads(snapshot: Snapshot) -> Iterable[Payload]:
    """Yield every payload that a record refers to: groups, and the latest example where its group is gone."""
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


def _position(payload: Payload) -> int:
    return payload.ref if isinstance(payload.ref, int) else 0
