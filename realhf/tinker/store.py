"""Sessions, models, samplers, checkpoints and requests in one SQLite file.

A request is committed before its future is returned, and its result before any client gets it. So a server that was
killed knows its unfinished requests, and runs them again. Results that a client has fetched are deleted some time
later."""

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
FORMAT = "2"
"""Version of the schema."""
WAITING, FINISHED, FAILED = 0, 1, 2
"""States of a request."""
CHANGING = ("create_model", "forward_backward", "optim_step", "load_weights")
"""Kinds of requests that change a model, and run again to restore it."""


@dataclass(frozen=True)
class Request:
    """One promise. ``body`` is what was asked, empty where it is not needed (any more); ``info`` says of a finished one
    what the weights were and the statistics."""

    id: str
    owner: str
    kind: str
    target: str
    seq: int
    body: bytes
    state: int
    result: bytes
    error: str
    theirs: bool
    info: Mapping[str, Any]


@dataclass(frozen=True)
class ModelRow:
    """One training client's model. ``options`` is how it was made; everything up to ``state_seq`` is in the state that
    is kept in a folder of that number (-1: none)."""

    id: str
    owner: str
    session: str
    created: float
    used: float
    options: Mapping[str, Any]
    state_seq: int
    unloaded: bool


@dataclass(frozen=True)
class SamplerRow:
    """Somebody samples with the weights of ``folder`` ("": the base); ``path`` is their address for the client."""

    id: str
    owner: str
    session: str
    folder: str
    path: str
    created: float


@dataclass(frozen=True)
class CheckpointRow:
    """Saved weights: ``kind`` is ``training``, ``sampler`` or ``external``; ``expires`` is a time, or None."""

    path: str
    owner: str
    model: str
    kind: str
    name: str
    created: float
    expires: float | None
    info: Mapping[str, Any]


class Store:
    """Opens the file ``server.sqlite`` of a folder, for one server at a time. All methods belong to one thread. Raises
    ValueError for a file of another version, and for a folder that is in use."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"--root {folder}: another server uses this folder") from None
        self._base = sqlite3.connect(folder / "server.sqlite", isolation_level=None, check_same_thread=False)
        self._base.execute("pragma journal_mode=wal")
        self._base.execute("pragma synchronous=normal")  # but for promises, see ``together``
        self._base.executescript(_SCHEMA)
        self._base.execute("insert or ignore into meta values ('format', ?)", (FORMAT,))
        found = self._base.execute("select value from meta where name='format'").fetchone()[0]
        if found != FORMAT:
            raise ValueError(f"{folder / 'server.sqlite'} is of format {found}, and this version reads {FORMAT}")

    def close(self) -> None:
        """Close the file."""
        self._base.close()
        self._lock.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write everything inside, or nothing. It is on the disk afterwards, also where power fails; what is written
        outside, signs of life, is there with the next of these."""
        self._base.execute("pragma synchronous=full")
        try:
            self._base.execute("begin immediate")
            try:
                yield
                self._base.execute("commit")
            except BaseException:
                if self._base.in_transaction:  # a full disk may have rolled back by itself
                    self._base.execute("rollback")
                raise
        finally:
            self._base.execute("pragma synchronous=normal")

    def once(self, name: str, value: str) -> str:
        """Return what is written under a name; the first time, ``value``."""
        self._base.execute("insert or ignore into meta values (?, ?)", (name, value))
        return str(self._base.execute("select value from meta where name=?", (name,)).fetchone()[0])

    # ---- sessions

    def add_session(self, id: str, owner: str, info: Mapping[str, Any]) -> None:
        """Write a session down."""
        now = time.time()
        self._base.execute("insert into sessions values (?,?,?,?,0,?)", (id, owner, now, now, json.dumps(info)))

    def session(self, id: str) -> tuple[str, float, bool, dict[str, Any]] | None:
        """Return owner, when it was seen last, whether it was finished, and what was said of it."""
        row = self._base.execute("select owner, seen, finished, info from sessions where id=?", (id,)).fetchone()
        return None if row is None else (row[0], row[1], bool(row[2]), json.loads(row[3]))

    def sessions(self, owner: str) -> list[str]:
        """Return the sessions of an owner, the newest first."""
        rows = self._base.execute("select id from sessions where owner=? order by created desc", (owner,))
        return [row[0] for row in rows]

    def see_session(self, id: str, *, finished: bool = False) -> None:
        """Note that somebody is there, or has ended it."""
        self._base.execute(
            "update sessions set seen=?, finished=max(finished, ?) where id=?", (time.time(), finished, id)
        )

    # ---- models

    def add_model(self, id: str, owner: str, session: str, options: Mapping[str, Any]) -> None:
        """Write a model down, in place of one that was never promised."""
        now = time.time()
        self._base.execute(
            "insert or replace into models values (?,?,?,?,?,?,-1,0)",
            (id, owner, session, now, now, json.dumps(options)),
        )

    def model(self, id: str) -> ModelRow | None:
        """Return a model."""
        found = self._models("id=?", (id,))
        return found[0] if found else None

    def models(self, owner: str | None = None) -> list[ModelRow]:
        """Return the models of an owner (None: of all), the newest first."""
        return self._models("1=1", ()) if owner is None else self._models("owner=?", (owner,))

    def _models(self, where: str, values: Iterable[Any]) -> list[ModelRow]:
        rows = self._base.execute(f"select * from models where {where} order by created desc", tuple(values))
        return [
            ModelRow(id, owner, session, created, used, json.loads(options), seq, bool(unloaded))
            for id, owner, session, created, used, options, seq, unloaded in rows
        ]

    def unused_models(self, before: float) -> list[str]:
        """Return the models that nobody has used since then, and that were not unloaded."""
        return [row[0] for row in self._base.execute("select id from models where used<? and not unloaded", (before,))]

    def change_model(self, id: str, **fields: Any) -> None:
        """Change some of ``used``, ``state_seq`` and ``unloaded``."""
        assert fields.keys() <= {"used", "state_seq", "unloaded"}, fields
        said = ", ".join(f"{name}=?" for name in fields)
        self._base.execute(f"update models set {said} where id=?", (*fields.values(), id))

    # ---- samplers and checkpoints

    def add_sampler(self, id: str, owner: str, session: str, folder: str, path: str) -> None:
        """Write a sampler down; one that there is already stays."""
        values = (id, owner, session, folder, path, time.time())
        self._base.execute("insert or ignore into samplers values (?,?,?,?,?,?,0)", values)

    def sampler(self, id: str) -> SamplerRow | None:
        """Return a sampler."""
        row = self._base.execute("select * from samplers where id=?", (id,)).fetchone()
        return None if row is None else SamplerRow(*row[:6])

    def samplers(self, session: str) -> list[SamplerRow]:
        """Return the samplers of a session, the newest first."""
        rows = self._base.execute("select * from samplers where session=? order by created desc", (session,))
        return [SamplerRow(*row[:6]) for row in rows]

    def new_clone(self, sampler: str) -> int:
        """Return a number that no other client of this sampler has; the first one is 0."""
        self._base.execute("update samplers set clones=clones+1 where id=?", (sampler,))
        return int(self._base.execute("select clones from samplers where id=?", (sampler,)).fetchone()[0])

    def put_checkpoint(self, row: CheckpointRow) -> None:
        """Write a checkpoint down, in place of one of the same path."""
        values = (*(getattr(row, name) for name in ("path", "owner", "model", "kind", "name", "created", "expires")),)
        self._base.execute(
            "insert or replace into checkpoints values (?,?,?,?,?,?,?,?)", (*values, json.dumps(row.info))
        )

    def checkpoints(self, *, owner: str | None = None, model: str | None = None) -> list[CheckpointRow]:
        """Return checkpoints, the newest first."""
        rows = self._base.execute(
            "select * from checkpoints where (?1 is null or owner=?1) and (?2 is null or model=?2) "
            "order by created desc",
            (owner, model),
        )
        return [_checkpoint(*row) for row in rows]

    def checkpoint(self, path: str) -> CheckpointRow | None:
        """Return one checkpoint."""
        row = self._base.execute("select * from checkpoints where path=?", (path,)).fetchone()
        return None if row is None else _checkpoint(*row)

    def saved_bytes(self, owner: str) -> int:
        """Return how large the checkpoints of an owner are."""
        row = self._base.execute(
            "select coalesce(sum(json_extract(info, '$.size_bytes')), 0) from checkpoints where owner=?", (owner,)
        ).fetchone()
        return int(row[0])

    def drop_checkpoint(self, path: str) -> None:
        """Forget a checkpoint."""
        self._base.execute("delete from checkpoints where path=?", (path,))

    # ---- requests

    def add_request(self, id: str, owner: str, kind: str, target: str, seq: int, body: bytes) -> None:
        """Write a request down before it is promised."""
        self._base.execute(
            "insert into requests (id, owner, kind, target, seq, body, created) values (?,?,?,?,?,?,?)",
            (id, owner, kind, target, seq, body, time.time()),
        )

    def request(self, id: str) -> Request | None:
        """Return a request, without its body."""
        found = self._requests("id=?", (id,), body="null")
        return found[0] if found else None

    def unfinished(self, target: str | None = None) -> list[Request]:
        """Return what is owed, of all targets or of one, by targets and numbers."""
        return self._requests("state=0 and (?1 is null or target=?1)", (target,))

    def owed_models(self) -> list[str]:
        """Return the models that have requests which are owed."""
        rows = self._base.execute("select distinct target from requests where state=0 and kind<>'sample'")
        return [row[0] for row in rows]

    def history(self, model: str, after: int) -> list[Request]:
        """Return the requests of a model behind a sequence number, in their order."""
        return self._requests("target=? and seq>?", (model, after))

    def standing(self, model: str, after: int) -> list[tuple[int, int]]:
        """Return number and state of the requests of a model behind a sequence number, in their order."""
        found = self._base.execute(
            "select seq, state from requests where target=? and seq>? order by seq", (model, after)
        )
        return found.fetchall()

    def next_seq(self, target: str) -> int:
        """Return the number behind the highest one of a model's requests."""
        row = self._base.execute("select max(seq) from requests where target=?", (target,)).fetchone()
        return 0 if row[0] is None else int(row[0]) + 1

    def _requests(self, where: str, values: Iterable[Any], body: str = "body") -> list[Request]:
        names = f"id, owner, kind, target, seq, {body}, state, result, error, theirs, info"
        rows = self._base.execute(f"select {names} from requests where {where} order by target, seq", tuple(values))
        return [
            Request(
                id, owner, kind, target, seq, body or b"", state, result or b"", error, bool(theirs), json.loads(info)
            )
            for id, owner, kind, target, seq, body, state, result, error, theirs, info in rows
        ]

    def finish(
        self, id: str, *, result: bytes = b"", error: str = "", theirs: bool = False, info: Mapping[str, Any]
    ) -> None:
        """Write down what came of a request. What was asked is kept of one that changed a model, which may have to be
        made again. A request that has ended already keeps what it had."""
        state = FAILED if error else FINISHED
        marks = ",".join("?" * len(CHANGING))
        self._base.execute(
            "update requests set state=?, result=?, error=?, theirs=?, info=?, finished=?, "
            f"body=case when kind in ({marks}) then body end where id=? and state=0",
            (state, result, error, theirs, json.dumps(info), time.time(), *CHANGING, id),
        )

    def fetched(self, id: str) -> None:
        """Note that somebody has got the result."""
        self._base.execute("update requests set fetched=coalesce(fetched, ?) where id=?", (time.time(), id))

    def drop_bodies(self, target: str, upto: int | None = None) -> None:
        """Forget what was asked, up to a sequence number, which is in a state that is kept; None: all."""
        self._base.execute(
            "update requests set body=null where target=?1 and (?2 is null or seq<=?2) and body is not null",
            (target, upto),
        )

    def forget_results(self, *, fetched_before: float, finished_before: float) -> int:
        """Forget the results of requests that were fetched, or have ended, before these times; return how many. The
        requests themselves stay: their numbers are taken."""
        found = self._base.execute(
            "update requests set result=null, info=json_set(info, '$.gone', 1) where state>0 and result is not null "
            "and (fetched<? or finished<?)",
            (fetched_before, finished_before),
        )
        return found.rowcount


def _checkpoint(*row: Any) -> CheckpointRow:
    path, owner, model, kind, name, created, expires, info = row
    return CheckpointRow(path, owner, model, kind, name, created, expires, json.loads(info))
