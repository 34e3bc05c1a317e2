"""Persistent state of the server: sessions, models, samplers, checkpoints and requests, in one
SQLite file.

A request is written before the client gets its future, and its result before the future completes.
So a server that was killed knows its pending requests and runs them again. Results are deleted some
time after the client has fetched them.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCHEMA = """
create table if not exists meta (name text primary key, value text not null);
create table if not exists sessions (id text primary key, owner text not null, created real not null,
    seen real not null, finished integer not null default 0, info text not null);
create table if not exists models (id text primary key, owner text not null, session text not null,
    created real not null, used real not null, options text not null, state_seq integer not null default -1,
    unloaded integer not null default 0);
create table if not exists samplers (id text primary key, owner text not null, session text not null,
    folder text not null, path text not null, created real not null, clones integer not null default 0);
create table if not exists checkpoints (path text primary key, owner text not null, model text not null,
    kind text not null, name text not null, created real not null, expires real, info text not null);
create table if not exists requests (id text primary key, owner text not null, kind text not null,
    target text not null, seq integer not null, body blob, state integer not null default 0, result blob,
    error text not null default '', theirs integer not null default 0, info text not null default '{}',
    created real not null, finished real, fetched real);
create index if not exists of_target on requests (target, seq);
create index if not exists of_state on requests (state);
"""
"""SQL that creates the tables of the current ``FORMAT``."""
FORMAT = "2"
"""Version of the schema."""
WAITING = 0
"""State of a pending request."""
FINISHED = 1
"""State of a request that succeeded."""
FAILED = 2
"""State of a request that failed."""
CHANGING = ("create_model", "forward_backward", "optim_step", "load_weights")
"""Kinds of requests that change a model. They are replayed to rebuild a lost model."""


@dataclass(frozen=True)
class RequestRow:
    """A request and its future."""

    id: str
    """Id of the request, ``<target>:<seq>``; also the id of its future."""
    owner: str
    """Digest of the client's API key."""
    kind: str
    """Kind of request, such as ``optim_step``."""
    target: str
    """Id of the model or sampler that the request is for."""
    seq: int
    """Sequence number among the requests of ``target``."""
    body: bytes
    """Body of the request; empty once it is no longer needed."""
    state: int
    """``WAITING``, ``FINISHED`` or ``FAILED``."""
    result: bytes
    """Body of the response, if this kind of request has one."""
    error: str
    """Error message; "" if the request did not fail."""
    is_client_error: bool
    """Whether the client is responsible for the error."""
    info: Mapping[str, Any]
    """Version and digest of the weights that computed the result, metrics, and details that depend
    on the kind of request."""


@dataclass(frozen=True)
class ModelRow:
    """A training client's model. Times are seconds since the epoch."""

    id: str
    """Id of the model, ``<session>:train:<number>``."""
    owner: str
    """Digest of the client's API key."""
    session: str
    """Id of its session."""
    created: float
    """Time of its creation."""
    used: float
    """Time of its last request."""
    options: Mapping[str, Any]
    """Options given at its creation: base model, rank, seed, which layers get adapters,
    metadata."""
    state_seq: int
    """Sequence number of the last request included in its saved state; -1 if no state was saved."""
    unloaded: bool
    """Whether it was permanently unloaded."""


@dataclass(frozen=True)
class SamplerRow:
    """A sampler, the sampling client's counterpart on the server."""

    id: str
    """Id of the sampler, ``<session>:sample:<number>``."""
    owner: str
    """Digest of the client's API key."""
    session: str
    """Id of its session."""
    folder: str
    """Folder of the sampler's weights; "" for the base model."""
    path: str
    """The client's ``tinker://`` path of the weights; "" for the base model."""
    created: float
    """Time of its creation, in seconds since the epoch."""


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint of saved weights. Times are seconds since the epoch."""

    path: str
    """The client's ``tinker://`` path."""
    owner: str
    """Digest of the client's API key."""
    model: str
    """Id of the model that saved it."""
    kind: str
    """``training``, ``sampler`` or ``external``."""
    name: str
    """Name from the client, or a generated one for an ephemeral checkpoint."""
    created: float
    """Time at which it was saved."""
    expires: float | None
    """Time of expiry; None: never."""
    info: Mapping[str, Any]
    """Folder, size in bytes, LoRA options, version and digest of the weights, metadata, and whether
    it is ephemeral."""


class TrainingStore:
    """Store in the file ``server.sqlite`` of a folder, open for one server at a time. All methods
    must be called on one thread. Raises ValueError if the file has another format, or another
    server uses the folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"--root {folder}: another server uses this folder") from None
        self._base = sqlite3.connect(
            folder / "server.sqlite", isolation_level=None, check_same_thread=False
        )
        self._base.execute("pragma journal_mode=wal")
        self._base.execute("pragma synchronous=normal")  # ``transaction`` raises it to full
        self._base.executescript(_SCHEMA)
        self._base.execute("insert or ignore into meta values ('format', ?)", (FORMAT,))
        file_format = self._base.execute("select value from meta where name='format'").fetchone()[0]
        if file_format != FORMAT:
            raise ValueError(
                f"{folder / 'server.sqlite'} is of format {file_format}, and this version reads "
                f"{FORMAT}"
            )

    def close(self) -> None:
        """Close the file."""
        self._base.close()
        self._lock.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Context manager that makes the writes in its block one durable transaction, which
        survives a power failure. Single writes outside a transaction, such as heartbeats, become
        durable with the next one."""
        self._base.execute("pragma synchronous=full")
        try:
            self._base.execute("begin immediate")
            try:
                yield
                self._base.execute("commit")
            except BaseException:
                # SQLite itself may have rolled back, such as on a full disk
                if self._base.in_transaction:
                    self._base.execute("rollback")
                raise
        finally:
            self._base.execute("pragma synchronous=normal")

    def get_or_set(self, name: str, value: str) -> str:
        """Return the value stored under a name; if there is none, store and return ``value``."""
        self._base.execute("insert or ignore into meta values (?, ?)", (name, value))
        return str(self._base.execute("select value from meta where name=?", (name,)).fetchone()[0])

    # ---- sessions

    def add_session(self, id: str, owner: str, info: Mapping[str, Any]) -> None:
        """Add a session."""
        now = time.time()
        self._base.execute(
            "insert into sessions values (?,?,?,?,0,?)", (id, owner, now, now, json.dumps(info))
        )

    def session(self, id: str) -> tuple[str, float, bool, dict[str, Any]] | None:
        """Return a session's owner, the time of its last heartbeat (seconds since the epoch),
        whether it has finished, and its info; None if there is no such session."""
        row = self._base.execute(
            "select owner, seen, finished, info from sessions where id=?", (id,)
        ).fetchone()
        return None if row is None else (row[0], row[1], bool(row[2]), json.loads(row[3]))

    def sessions(self, owner: str) -> list[str]:
        """Return the ids of an owner's sessions, the newest first."""
        rows = self._base.execute(
            "select id from sessions where owner=? order by created desc", (owner,)
        )
        return [row[0] for row in rows]

    def touch_session(self, id: str, *, finished: bool = False) -> None:
        """Record a heartbeat of a session, or with ``finished`` that it has finished."""
        self._base.execute(
            "update sessions set seen=?, finished=max(finished, ?) where id=?",
            (time.time(), finished, id),
        )

    # ---- models

    def add_model(self, id: str, owner: str, session: str, options: Mapping[str, Any]) -> None:
        """Add a model, or replace one whose creation request was never accepted."""
        now = time.time()
        self._base.execute(
            "insert or replace into models values (?,?,?,?,?,?,-1,0)",
            (id, owner, session, now, now, json.dumps(options)),
        )

    def model(self, id: str) -> ModelRow | None:
        """Return a model; None if there is no such model."""
        rows = self._select_models("id=?", (id,))
        return rows[0] if rows else None

    def models(self, owner: str | None = None) -> list[ModelRow]:
        """Return an owner's models (None: those of all owners), the newest first."""
        return (
            self._select_models("1=1", ())
            if owner is None
            else self._select_models("owner=?", (owner,))
        )

    def _select_models(self, where: str, values: Iterable[Any]) -> list[ModelRow]:
        rows = self._base.execute(
            f"select * from models where {where} order by created desc", tuple(values)
        )
        return [
            ModelRow(id, owner, session, created, used, json.loads(options), seq, bool(unloaded))
            for id, owner, session, created, used, options, seq, unloaded in rows
        ]

    def find_unused_models(self, before: float) -> list[str]:
        """Return the ids of the models that were last used before the time ``before`` and are not
        unloaded."""
        return [
            row[0]
            for row in self._base.execute(
                "select id from models where used<? and not unloaded", (before,)
            )
        ]

    def update_model(self, id: str, **fields: Any) -> None:
        """Set any of the columns ``used``, ``state_seq`` and ``unloaded``."""
        assert fields.keys() <= {"used", "state_seq", "unloaded"}, fields
        assignments = ", ".join(f"{name}=?" for name in fields)
        self._base.execute(f"update models set {assignments} where id=?", (*fields.values(), id))

    # ---- samplers and checkpoints

    def add_sampler(self, id: str, owner: str, session: str, folder: str, path: str) -> None:
        """Add a sampler; an existing one is not changed."""
        values = (id, owner, session, folder, path, time.time())
        self._base.execute("insert or ignore into samplers values (?,?,?,?,?,?,0)", values)

    def sampler(self, id: str) -> SamplerRow | None:
        """Return a sampler; None if there is no such sampler."""
        row = self._base.execute("select * from samplers where id=?", (id,)).fetchone()
        return None if row is None else SamplerRow(*row[:6])

    def samplers(self, session: str) -> list[SamplerRow]:
        """Return the samplers of a session, the newest first."""
        rows = self._base.execute(
            "select * from samplers where session=? order by created desc", (session,)
        )
        return [SamplerRow(*row[:6]) for row in rows]

    def next_client_number(self, sampler: str) -> int:
        """Return an unused client number for a further client of a sampler. The client that created
        the sampler has number 0."""
        self._base.execute("update samplers set clones=clones+1 where id=?", (sampler,))
        return int(
            self._base.execute("select clones from samplers where id=?", (sampler,)).fetchone()[0]
        )

    def put_checkpoint(self, row: CheckpointRow) -> None:
        """Add a checkpoint, or replace the one with the same path."""
        values = (
            *(
                getattr(row, name)
                for name in ("path", "owner", "model", "kind", "name", "created", "expires")
            ),
        )
        self._base.execute(
            "insert or replace into checkpoints values (?,?,?,?,?,?,?,?)",
            (*values, json.dumps(row.info)),
        )

    def checkpoints(
        self, *, owner: str | None = None, model: str | None = None
    ) -> list[CheckpointRow]:
        """Return checkpoints, the newest first: those of an owner, those of a model, or all."""
        rows = self._base.execute(
            "select * from checkpoints where (?1 is null or owner=?1) and (?2 is null or model=?2) "
            "order by created desc",
            (owner, model),
        )
        return [_parse_checkpoint(*row) for row in rows]

    def checkpoint(self, path: str) -> CheckpointRow | None:
        """Return the checkpoint with a ``tinker://`` path; None if there is none."""
        row = self._base.execute("select * from checkpoints where path=?", (path,)).fetchone()
        return None if row is None else _parse_checkpoint(*row)

    def saved_bytes(self, owner: str) -> int:
        """Return the total size in bytes of an owner's checkpoints."""
        row = self._base.execute(
            "select coalesce(sum(json_extract(info, '$.size_bytes')), 0) from checkpoints where "
            "owner=?",
            (owner,),
        ).fetchone()
        return int(row[0])

    def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint's row; its folder is kept."""
        self._base.execute("delete from checkpoints where path=?", (path,))

    # ---- requests

    def add_request(
        self, id: str, owner: str, kind: str, target: str, seq: int, body: bytes
    ) -> None:
        """Add a pending request."""
        self._base.execute(
            "insert into requests (id, owner, kind, target, seq, body, created) values "
            "(?,?,?,?,?,?,?)",
            (id, owner, kind, target, seq, body, time.time()),
        )

    def request(self, id: str) -> RequestRow | None:
        """Return a request without its body; None if there is no such request."""
        rows = self._select_requests("id=?", (id,), body="null")
        return rows[0] if rows else None

    def pending(self, target: str | None = None) -> list[RequestRow]:
        """Return a target's pending requests (None: all pending requests), ordered by target and
        sequence number."""
        return self._select_requests("state=0 and (?1 is null or target=?1)", (target,))

    def models_with_pending(self) -> list[str]:
        """Return the ids of the models that have pending requests."""
        rows = self._base.execute(
            "select distinct target from requests where state=0 and kind<>'sample'"
        )
        return [row[0] for row in rows]

    def history(self, model: str, after: int) -> list[RequestRow]:
        """Return a model's requests after the sequence number ``after``, in order."""
        return self._select_requests("target=? and seq>?", (model, after))

    def request_states(self, model: str, after: int) -> list[tuple[int, int]]:
        """Return the sequence number and state of a model's requests after the sequence number
        ``after``, in order."""
        cursor = self._base.execute(
            "select seq, state from requests where target=? and seq>? order by seq", (model, after)
        )
        return cursor.fetchall()

    def next_seq(self, target: str) -> int:
        """Return the sequence number after the highest one of a target's requests; 0 if there are
        none."""
        row = self._base.execute(
            "select max(seq) from requests where target=?", (target,)
        ).fetchone()
        return 0 if row[0] is None else int(row[0]) + 1

    def _select_requests(
        self, where: str, values: Iterable[Any], body: str = "body"
    ) -> list[RequestRow]:
        names = f"id, owner, kind, target, seq, {body}, state, result, error, theirs, info"
        rows = self._base.execute(
            f"select {names} from requests where {where} order by target, seq", tuple(values)
        )
        return [
            RequestRow(
                id,
                owner,
                kind,
                target,
                seq,
                body or b"",
                state,
                result or b"",
                error,
                bool(is_client_error),
                json.loads(info),
            )
            for id, owner, kind, target, seq, body, state, result, error, is_client_error, info in rows
        ]

    def finish(
        self,
        id: str,
        *,
        result: bytes = b"",
        error: str = "",
        is_client_error: bool = False,
        info: Mapping[str, Any],
    ) -> None:
        """Store the result or the error of a pending request. A request that has already ended is
        not changed. The body is kept for the kinds of requests that change a model, because they
        may have to be replayed."""
        state = FAILED if error else FINISHED
        marks = ",".join("?" * len(CHANGING))
        self._base.execute(
            "update requests set state=?, result=?, error=?, theirs=?, info=?, finished=?, "
            f"body=case when kind in ({marks}) then body end where id=? and state=0",
            (state, result, error, is_client_error, json.dumps(info), time.time(), *CHANGING, id),
        )

    def mark_fetched(self, id: str) -> None:
        """Record that the client has fetched the result of a request."""
        self._base.execute(
            "update requests set fetched=coalesce(fetched, ?) where id=?", (time.time(), id)
        )

    def drop_bodies(self, target: str, upto: int | None = None) -> None:
        """Delete the bodies of a target's requests up to the sequence number ``upto``, because
        their effects are in a saved state; None: of all its requests."""
        self._base.execute(
            "update requests set body=null where target=?1 and (?2 is null or seq<=?2) and body is "
            "not null",
            (target, upto),
        )

    def drop_results(self, *, fetched_before: float, finished_before: float) -> int:
        """Delete the results of requests that were fetched before ``fetched_before`` or ended
        before ``finished_before`` (seconds since the epoch); return the number of deleted results.
        The requests themselves are kept, because their sequence numbers remain in use."""
        cursor = self._base.execute(
            "update requests set result=null, info=json_set(info, '$.gone', 1) where state>0 and "
            "result is not null "
            "and (fetched<? or finished<?)",
            (fetched_before, finished_before),
        )
        return cursor.rowcount


def _parse_checkpoint(*row: Any) -> CheckpointRow:
    path, owner, model, kind, name, created, expires, info = row
    return CheckpointRow(path, owner, model, kind, name, created, expires, json.loads(info))
