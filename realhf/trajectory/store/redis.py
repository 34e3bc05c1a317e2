"""Store shared by several servers: tables, payloads and a log of changes in one Redis.

A round takes a lock with a fencing token, reads the log entries that it has not seen, and commits
rows and its own log entry in one script that checks the token. A server that lost the lock writes
nothing. How much survives if Redis crashes depends on the configuration of Redis (append-only
file); a server that keeps running notices what is missing. Unique numbers are never counted in
Redis, because Redis may lose the count. Source: docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import uuid
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import msgspec
from isal import isal_zlib
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from realhf.base import process_clock
from realhf.trajectory.records import TABLES, GroupRecord, Payload, PayloadRef, RunRecord
from realhf.trajectory.store.base import (
    Changes,
    Key,
    OutcomeUnknown,
    PayloadLost,
    Snapshot,
    StateLost,
    StoreFailure,
    TrajectoryStore,
)

LOCK_MS = 3000
"""Milliseconds after which the write lock expires if its server hangs."""
LOCK_DEADLINE_S = 10.0
"""Seconds that a round waits for the write lock."""
LOG_LENGTH = 10_000
"""Number of commits kept in the log. A server that lags further behind reloads everything."""
STAGED_EXPIRE_S = 600
"""Seconds after which a staged payload without a commit expires."""
_REF_BITS = 24
"""Bits of the counter in a payload number, below a random prefix of 38 bits per server."""
_STAGE_ATTEMPTS = 3
"""Attempts to stage payloads; each uses new payload numbers, in case a number is already taken."""
_BROKEN = (RedisConnectionError, RedisTimeoutError, OSError, RuntimeError)
"""Errors that mean a broken connection. uvloop reports a connection that was closed by the peer as
a RuntimeError, and the client passes that on."""
_FAILED = (RedisError, *_BROKEN)

# When Redis is out of memory, it refuses a script whose first write may allocate memory. This first
# write allocates none, so pulls and acknowledgements, which free memory, still work.
_ALLOW_WHEN_FULL = "redis.call('PERSIST', KEYS[2])"
# Returns, atomically: the id of this Redis' data (created by the first server), version and token
# of the last commit, the entry of commit ARGV[2], and the rows of the tables. Not a MULTI
# transaction, because Redis without free memory queues no commands.
_LOAD = f"""
{_ALLOW_WHEN_FULL}
redis.call('SET', KEYS[5], ARGV[1], 'NX')
local known = redis.call('XRANGE', KEYS[3], ARGV[2] .. '-0', '+', 'COUNT', 1)
local tables = {{}}
for i = 6, #KEYS do tables[i - 5] = redis.call('HVALS', KEYS[i]) end
return {{redis.call('GET', KEYS[5]), redis.call('GET', KEYS[2]), redis.call('GET', KEYS[4]), known, tables}}
"""
# Returns the log after commit ARGV[1], the token of that commit, and the time of Redis, which all
# servers use because their own clocks may differ.
_FOLLOW = """
local known = redis.call('XRANGE', KEYS[3], ARGV[1] .. '-0', ARGV[1] .. '-0')
local by = known[1] and known[1][2][2] or ''
local log = redis.call('XRANGE', KEYS[3], string.format('%d-0', ARGV[1] + 1), '+')
return {redis.call('TIME'), redis.call('GET', KEYS[2]) or '0', redis.call('GET', KEYS[4]) or '', by, log}
"""
# Returns the same values, after taking the lock. ARGV[2] is the token, ARGV[3] its expiry in
# milliseconds.
_BEGIN = f"""
{_ALLOW_WHEN_FULL}
if not redis.call('SET', KEYS[1], ARGV[2], 'NX', 'PX', ARGV[3]) then return false end
{_FOLLOW}"""
# Commits under the lock: checks that new payloads exist and persists them, writes and deletes rows,
# deletes payloads, appends the log entry, and releases the lock. ARGV: token, log entry, prefix,
# log length, cleared, then counted lists of new refs, (table, key, row), (table, key), freed refs.
# Returns 0 when the lock was lost and -1 when a payload has expired; then nothing is written.
_COMMIT = (
    f"if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end {_ALLOW_WHEN_FULL}"
    + """
local prefix, at = ARGV[3], 6
for i = 1, tonumber(ARGV[6]) do
  if redis.call('EXISTS', prefix .. ':p:' .. ARGV[6 + i]) == 0 then
    redis.call('DEL', KEYS[1])
    return -1
  end
end
local function list(width, each)
  local n = tonumber(ARGV[at]); at = at + 1
  for _ = 1, n do each(); at = at + width end
end
if ARGV[5] == '1' then
  for _, table in ipairs({'run', 'envs', 'groups', 'leases', 'closed', 'replays'}) do
    redis.call('UNLINK', prefix .. ':t:' .. table)
  end
end
list(1, function() redis.call('PERSIST', prefix .. ':p:' .. ARGV[at]) end)
list(3, function() redis.call('HSET', prefix .. ':t:' .. ARGV[at], ARGV[at + 1], ARGV[at + 2]) end)
list(2, function() redis.call('HDEL', prefix .. ':t:' .. ARGV[at], ARGV[at + 1]) end)
list(1, function() redis.call('UNLINK', prefix .. ':p:' .. ARGV[at]) end)
local version = redis.call('INCR', KEYS[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], version .. '-0', 't', ARGV[1], 'c', ARGV[2])
redis.call('SET', KEYS[4], ARGV[1])
redis.call('DEL', KEYS[1])
return version
"""
)
# Releases the lock if it is still ours, and returns the log entries among which our commit may be.
_SETTLE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return redis.call('XRANGE', KEYS[3], ARGV[2], '+')
"""


class LogEntry(msgspec.Struct, array_like=True):
    """One commit in the log of changes."""

    cleared: bool
    """Whether all tables were emptied before the rows were written."""
    rows: list[tuple[str, Key, bytes | None]]
    """(table, key, encoded record or None for a deleted row)."""


class RedisStore(TrajectoryStore):
    """Store for several servers in the Redis at ``url``; ``?prefix=name`` separates runs."""

    shared = True

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self._prefix = query.pop("prefix", ["realhf"])[0]
        if query:
            raise ValueError(f"unknown option {next(iter(query))!r}; known is prefix")
        self._url = urlunsplit(parts._replace(query=""))
        self.name = f"{parts.scheme}://{parts.hostname or parts.path}:{parts.port or 6379}"
        # No automatic retries: a repeated commit would find the lock gone and be reported as lost
        # although it was made.
        self._redis: Redis = Redis.from_url(
            self._url, socket_timeout=5, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0)
        )
        self._keys = [f"{self._prefix}:{name}" for name in ("lock", "version", "log", "last")]
        self._scripts = {
            script: self._redis.register_script(script)
            for script in (_FOLLOW, _BEGIN, _COMMIT, _SETTLE)
        }
        self._version = 0
        self._now = 0.0
        self._token = b""
        self._last = b""
        self._refs = _new_refs()
        self._staged: set[PayloadRef] = set()
        self._data_id = b""
        self._loss = ""
        self._decoders = {table: msgspec.msgpack.Decoder(kind) for table, kind in TABLES.items()}

    async def open(self) -> Snapshot:
        """Return everything that was committed."""
        return await self.reload()

    async def reload(self) -> Snapshot:
        """Read everything atomically, and detect whether Redis has lost data since the last
        read."""
        keys = [*self._keys, f"{self._prefix}:born", *map(self._table, TABLES)]
        try:
            born, version, last, known_loss, tables = await self._redis.eval(
                _LOAD, len(keys), *keys, uuid.uuid4().hex, self._version
            )
        except _FAILED as error:
            raise await self._convert_error(error) from error
        version = int(version or 0)
        last = last or b""
        self._loss = self._loss or self._find_loss(born, version, last, known_loss)
        self._data_id = born
        self._version = version
        self._last = last
        try:
            return {
                table: [self._decoders[table].decode(row) for row in rows]
                for table, rows in zip(TABLES, tables, strict=True)
            }
        except msgspec.MsgspecError as error:
            raise StoreFailure(
                f"{self.name}: a row is damaged, or another version wrote it; take that one, or "
                f"?prefix=... ({error})"
            ) from error

    def now(self) -> float:
        """Return the time of Redis at the last ``begin`` or ``follow``; it never decreases."""
        return self._now

    def take_loss(self) -> str:
        """Return a description of what Redis lost, or ""; each loss is returned only once."""
        loss = self._loss
        self._loss = ""
        return loss

    def _find_loss(self, born: bytes, version: int, last: bytes, known: Sequence[Any]) -> str:
        """Return a description of commits that this server knows and that Redis has lost, or "".
        ``known``: log entries from the last known commit on, if Redis still has them."""
        if not self._data_id:
            return ""
        if born != self._data_id:
            return "Redis came back without its data"
        if version < self._version:
            return f"Redis went back from commit {self._version} to {version}"
        if version == self._version:
            same = last == self._last
        else:
            name, fields = known[0] if known else (b"", [])
            same = _number(name) != self._version or _fields(fields)[b"t"] == self._last
        return (
            ""
            if same
            else f"Redis went back behind commit {self._version}, and others took its number"
        )

    async def stage(self, payloads: Sequence[bytes]) -> list[PayloadRef]:
        """Write payloads that expire unless they are committed. A number that any server has used
        is never overwritten."""
        for _ in range(_STAGE_ATTEMPTS):
            refs = [next(self._refs) for _ in payloads]
            try:
                async with self._redis.pipeline(transaction=False) as together:
                    for ref, payload in zip(refs, payloads, strict=True):
                        together.set(self._payload(ref), payload, ex=STAGED_EXPIRE_S, nx=True)
                    if all(await together.execute()):
                        self._staged.update(refs)
                        return [*refs]
            except _FAILED as error:
                raise await self._convert_error(error) from error
            self._refs = _new_refs()
        raise StoreFailure(f"{self.name}: no free payload numbers in {_STAGE_ATTEMPTS} attempts")

    async def unstage(self, refs: Sequence[PayloadRef]) -> None:
        """Do nothing: staged payloads expire."""
        self._staged.difference_update(refs)

    async def read(self, payloads: Sequence[Payload]) -> list[bytes]:
        """Return the payloads after checking their CRCs. Raises PayloadLost for one that is missing
        or damaged."""
        try:
            values = (
                await self._redis.mget([self._payload(payload.ref) for payload in payloads])
                if payloads
                else []
            )
        except _FAILED as error:
            raise self._failure(error) from error
        whole = [data if isinstance(data, bytes) else b"" for data in values]
        lost = [
            payload.ref
            for payload, data in zip(payloads, whole, strict=True)
            if isal_zlib.crc32(data) != payload.crc
        ]
        if lost:
            raise PayloadLost(self.name, lost)
        return whole

    async def begin(self) -> list[Changes]:
        """Take the lock with a new fencing token; return the changes since the last call."""
        deadline = process_clock.now() + LOCK_DEADLINE_S
        self._token = uuid.uuid4().hex.encode()
        while True:
            answer = await self._run(_BEGIN, self._version, self._token, LOCK_MS)
            if answer:
                try:
                    return self._parse_log(*answer)
                except StateLost:
                    await self.abandon()
                    raise
            if process_clock.now() > deadline:
                raise StoreFailure(
                    f"{self.name}: another server held the write lock for {LOCK_DEADLINE_S:.0f} s"
                )
            await asyncio.sleep(random.uniform(0.0005, 0.003))

    async def follow(self) -> list[Changes]:
        """Return the changes that the log contains since the last call."""
        return self._parse_log(*await self._run(_FOLLOW, self._version))

    async def abandon(self) -> None:
        """Release the lock."""
        await self._run(_SETTLE, self._token, "+")

    async def commit(self, changes: Changes) -> None:
        """Commit in one script, which checks that this server still holds the lock.

        The script gets four lists, each preceded by its length: the payloads to keep, the rows to
        write, the rows to delete and the payloads to free. It returns the new version, 0 if the
        lock has expired, or a negative number if a payload is missing.
        """
        rows = [
            (table, key, None if record is None else msgspec.msgpack.encode(record))
            for (table, key), record in changes.rows.items()
        ]
        entry = msgspec.msgpack.encode(LogEntry(changes.cleared, rows))
        puts = [(table, key, row) for table, key, row in rows if row is not None]
        deletes = [(table, key) for table, key, row in rows if row is None]
        new = self._staged.intersection(_payload_refs(changes))
        lists: list[Any] = []
        for items in ([(ref,) for ref in new], puts, deletes, [(ref,) for ref in changes.freed]):
            lists += [len(items), *(value for item in items for value in item)]
        cleared = int(changes.cleared)
        try:
            version = await self._run(
                _COMMIT, self._token, entry, self._prefix, LOG_LENGTH, cleared, *lists
            )
        except _ReplyLost:
            version = await self._settle()
        if version < 0:
            raise StoreFailure(f"{self.name}: a payload of this push is no longer there")
        if not version:
            raise StateLost(f"{self.name}: the write lock expired before the commit")
        self._version = version
        self._last = self._token
        self._staged -= new
        self._staged.difference_update(changes.freed)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _settle(self) -> int:
        """Return the version of a commit during which the connection broke, or 0 if it was not
        made. The lock is released, so the commit cannot be made afterwards. Raises OutcomeUnknown
        while Redis cannot be reached."""
        try:
            entries = await self._run(_SETTLE, self._token, f"{self._version + 1}-0", repeat=True)
        except StoreFailure as error:
            raise OutcomeUnknown(f"{error}; whether the commit was made is not known") from error
        for name, fields in entries:
            if _fields(fields)[b"t"] == self._token:
                return int(name.partition(b"-")[0])
        return 0

    async def _run(self, script: str, *args: Any, repeat: bool = False) -> Any:
        """Run one script and return its result. Raises StoreFailure, or _ReplyLost if a commit was
        sent and its reply was lost."""
        for attempt in range(4):
            try:
                return await self._scripts[script](keys=self._keys, args=args)
            except _BROKEN as error:
                if script is _COMMIT:
                    raise _ReplyLost from error
                if not repeat or attempt == 3:
                    raise self._failure(error) from error
                await asyncio.sleep(0.2 * 2**attempt)
            except NoScriptError as error:
                raise StateLost(f"{self.name} was restarted: {error}") from error
            except RedisError as error:
                raise await self._convert_error(error) from error
        raise AssertionError("unreachable")

    def _parse_log(
        self, at: Sequence[bytes], version: bytes, last: bytes, by: bytes, entries: Sequence[Any]
    ) -> list[Changes]:
        """Return the changes in the log entries after the last known commit. Raises StateLost if
        entries are missing, or if Redis lost commits and other servers reused their numbers.
        ``by``: the token that the log has for the last known commit."""
        self._now = max(self._now, int(at[0]) + int(at[1]) / 1e6)
        if self._version and by != self._last:
            raise StateLost(
                f"{self.name}: commit {self._version} is no longer in the log, or is another one"
            )
        changes = []
        for name, fields in entries:
            number = _number(name)
            if number != self._version + 1:
                raise StateLost(
                    f"{self.name}: commits after {self._version} are no longer in the log"
                )
            read = _fields(fields)
            entry = msgspec.msgpack.decode(read[b"c"], type=LogEntry)
            rows = {
                (table, key): None if row is None else self._decoders[table].decode(row)
                for table, key, row in entry.rows
            }
            changes.append(Changes(rows=rows, cleared=entry.cleared))
            self._version = number
            self._last = read[b"t"]
        if (self._version, self._last) != (int(version), last):
            raise StateLost(
                f"{self.name} is at version {int(version)}, this server at {self._version} or at "
                f"another "
                "one of that number"
            )
        return changes

    def _table(self, table: str) -> str:
        return f"{self._prefix}:t:{table}"

    def _payload(self, ref: PayloadRef) -> str:
        return f"{self._prefix}:p:{ref}"

    async def _convert_error(self, error: Exception) -> StoreFailure:
        """Return the StoreFailure for an error. If Redis has become a replica, also close its
        connections, because the address may lead to the new master."""
        if isinstance(error, ReadOnlyError) or "READONLY" in str(error):
            await self._redis.connection_pool.disconnect()
            return StoreFailure(
                f"{self.name}: it is a replica now; the next attempt reconnects ({error})"
            )
        return self._failure(error)

    def _failure(self, error: Exception) -> StoreFailure:
        return StoreFailure(f"{self.name}: {error}")


def _payload_refs(changes: Changes) -> Iterator[PayloadRef]:
    """Yield the payloads that the rows refer to."""
    for record in changes.rows.values():
        if isinstance(record, GroupRecord):
            yield record.payload.ref
        elif isinstance(record, RunRecord) and record.latest is not None:
            yield record.latest.payload.ref


def _new_refs() -> Iterator[int]:
    """Yield payload numbers that are not used by another server or by an earlier process of this
    one."""
    return itertools.count(secrets.randbits(62 - _REF_BITS) << _REF_BITS)


def _number(name: bytes) -> int:
    """Return the commit number in the name of a log entry; -1 if there is no entry."""
    return int(bytes(name).partition(b"-")[0] or -1)


class _ReplyLost(Exception):
    """Raised if a commit was sent and no reply arrived."""


def _fields(pairs: Any) -> dict[bytes, bytes]:
    return dict(zip(pairs[::2], pairs[1::2], strict=True)) if isinstance(pairs, list) else pairs
