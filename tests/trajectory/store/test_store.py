"""The stores that one server has for itself: what was committed comes back, whatever happens.

Source: docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from isal import isal_zlib

from realhf.trajectory.records import (
    Encoding,
    EnvRecord,
    GroupPlace,
    GroupRecord,
    LeaseRecord,
    Payload,
    RunRecord,
)
from realhf.trajectory.store.base import Changes, PayloadLost, StoreFailure
from realhf.trajectory.store.open import MemoryStore, open_store
from realhf.trajectory.store.sqlite import SqliteStore
from tests.trajectory.driver import data, opened, opening, put


@pytest.fixture
def limit_file_size() -> Iterator[Any]:
    """Files cannot grow beyond a number of bytes while this is set; writes fail as on a full
    disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)


def ids(snapshot: dict[str, list[Any]]) -> list[int]:
    return sorted(group.id for group in snapshot["groups"])


def aside(snapshot: dict[str, list[Any]]) -> list[tuple[int, str]]:
    """Ids and reasons of the groups in quarantine."""
    return sorted(
        (group.id, group.reason)
        for group in snapshot["groups"]
        if group.place is GroupPlace.QUARANTINE
    )


@pytest.mark.parametrize("durable", [False, True])
async def test_everything_committed_comes_back(tmp_path, durable):
    store = SqliteStore(tmp_path, durable=durable)
    assert all(not records for records in (await store.open()).values())
    groups = await put(store, range(5))
    rows: dict[Any, Any] = {
        ("run", "run"): RunRecord(epoch=3, registered=True, wandb_group="\u00fc", latest=groups[0]),
        ("envs", 0): EnvRecord(0, "a", "a_0", 10, 1.0, 4, None, True, 5.0),
        ("leases", "x"): LeaseRecord("x", "t", 7, (1, 2), 1.0, 2.0),
        ("groups", 3): None,
    }
    await store.commit(Changes(rows=rows))
    await store.close()
    store = SqliteStore(tmp_path)
    snapshot = await store.open()
    assert ids(snapshot) == [0, 1, 2, 4]
    assert snapshot["run"] == [rows[("run", "run")]]
    assert snapshot["envs"] == [rows[("envs", 0)]]
    assert snapshot["leases"] == [rows[("leases", "x")]]
    kept = sorted(snapshot["groups"], key=lambda group: group.id)
    assert await store.read([group.payload for group in kept]) == [
        data(number) for number in (0, 1, 2, 4)
    ]
    await store.commit(Changes(rows={("run", "run"): RunRecord(epoch=4)}, cleared=True))
    await store.close()
    store = SqliteStore(tmp_path)
    assert ids(await store.open()) == []
    await store.close()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_payload_can_be_read_before_and_after_its_commit(tmp_path, kind):
    store = await opening(MemoryStore() if kind == "memory" else SqliteStore(tmp_path))
    [ref] = await store.stage([data(1)])
    payload = Payload(ref, 1000, Encoding.JSON, 7, isal_zlib.crc32(data(1)))
    assert await store.read([payload]) == [data(1)]
    await store.commit(Changes(rows={("run", "run"): RunRecord()}))
    assert await store.read([payload]) == [data(1)]
    await store.close()


async def files(folder: Path, count: int) -> None:
    """Wait until so many segment files are left: they are deleted beside the commits."""
    deadline = asyncio.get_running_loop().time() + 10
    while len(list(folder.glob("*.seg"))) != count:
        assert asyncio.get_running_loop().time() < deadline, sorted(folder.glob("*.seg"))
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_the_log_of_changes_does_not_grow_for_ever(tmp_path):
    store = await opening(SqliteStore(tmp_path))
    for number in range(12_000):
        await store.commit(
            Changes(
                rows={("run", "run"): RunRecord(epoch=number), ("closed", f"x{number % 50}"): None}
            )
        )
    assert (tmp_path / "state.sqlite-wal").stat().st_size < 60 << 20
    await store.close()
    again = SqliteStore(tmp_path)
    assert (await again.open())["run"] == [RunRecord(epoch=11_999)]
    await again.close()


async def test_files_go_when_everything_in_them_was_given_up(tmp_path):
    store = await opening(SqliteStore(tmp_path, segment_bytes=3000))
    groups = await put(store, range(10))
    assert len(list(tmp_path.glob("*.seg"))) == 4
    gone = groups[:3] + groups[4:6]
    freed = [group.payload.ref for group in gone]
    await store.commit(Changes(rows={("groups", group.id): None for group in gone}, freed=freed))
    await files(tmp_path, 3)
    await store.commit(Changes(rows={("groups", 3): None}, freed=[groups[3].payload.ref]))
    await files(tmp_path, 2)
    assert await store.read([groups[6].payload]) == [data(6)]
    await store.close()
    (tmp_path / "00000099.seg").write_bytes(b"left over")
    store = SqliteStore(tmp_path)
    assert ids(await store.open()) == [6, 7, 8, 9]
    assert not (tmp_path / "00000099.seg").exists()
    await put(store, [10])
    assert (tmp_path / "00000100.seg").exists(), "never a name that was used"
    await store.close()


async def test_a_folder_has_one_server(tmp_path):
    store = await opening(SqliteStore(tmp_path))
    with pytest.raises(StoreFailure, match=f"in use by another server .pid {os.getpid()}"):
        await SqliteStore(tmp_path).open()
    await store.close()
    again = await opening(SqliteStore(tmp_path))
    await again.close()


async def test_a_torn_or_damaged_tail_goes_to_quarantine_and_the_rest_is_served(tmp_path):
    store = await opening(SqliteStore(tmp_path))
    groups = await put(store, range(10))
    leased = GroupRecord(1, 1, GroupPlace.LEASED, None, 4, groups[1].payload, 0, 1.5)
    lease = LeaseRecord("x", "t", 0, (1, 9), 1.0, 2.0)
    await store.commit(Changes(rows={("leases", "x"): lease, ("groups", 1): leased}))
    await store.close()
    [segment] = tmp_path.glob("*.seg")
    with open(segment, "r+b") as file:
        file.truncate(9500)
        file.seek(8010)
        file.write(b"?")
    store = SqliteStore(tmp_path)
    snapshot = await store.open()
    assert aside(snapshot) == [(8, "payload_lost"), (9, "payload_lost")], (
        "9 is cut off, 8 is damaged"
    )
    assert snapshot["leases"] == []
    rest = [group for group in snapshot["groups"] if group.id < 8]
    assert all(group.place is GroupPlace.QUEUE for group in rest), (
        "the other group of the lost batch"
    )
    await store.close()
    again = SqliteStore(tmp_path)
    assert aside(await again.open()) == aside(snapshot)
    await again.close()


async def test_a_full_disk_refuses_and_recovers(tmp_path, limit_file_size):
    store = await opening(SqliteStore(tmp_path))
    await put(store, range(5))
    limit_file_size(40_000)
    refs = await store.stage([data(7, 60_000)])
    with pytest.raises(StoreFailure):
        await store.commit(Changes(rows={("run", "run"): RunRecord(epoch=9)}))
    await store.unstage(refs)
    snapshot = await store.reload()
    assert (ids(snapshot), snapshot["run"]) == (list(range(5)), [])
    limit_file_size(1 << 30)
    [late] = await put(store, [6], size=60_000)
    assert await store.read([late.payload]) == [data(6, 60_000)]
    await store.close()
    store = SqliteStore(tmp_path)
    assert ids(await store.open()) == [0, 1, 2, 3, 4, 6]
    await store.close()


WRITER = """
import asyncio, sys
from pathlib import Path
from realhf.trajectory.store.sqlite import SqliteStore
from tests.trajectory.driver import put

async def main():
    store = SqliteStore(Path(sys.argv[1]), segment_bytes=200_000)
    known = await store.open()
    start = 1 + max((group.id for group in known["groups"]), default=-1)
    for number in range(start, 10**6, 4):
        await put(store, range(number, number + 4), size=20_000)
        print(number + 3, flush=True)

asyncio.run(main())
"""


@pytest.mark.nightly
@pytest.mark.slow
async def test_kill_9_while_committing_loses_nothing_that_was_committed(tmp_path):
    for round_ in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(round_ * 7 + 1):
                acknowledged = int(writer.stdout.readline())
            writer.kill()
            acknowledged = int(([acknowledged, *map(int, writer.stdout.read().split())])[-1])
        store = SqliteStore(tmp_path)
        snapshot = await store.open()
        found = ids(snapshot)
        assert found == list(range(len(found))), "whole commits only, in order"
        assert len(found) % 4 == 0
        assert len(found) > acknowledged
        for group in snapshot["groups"]:
            assert await store.read([group.payload]) == [data(group.id, 20_000)]
        await store.close()


async def test_concurrent_staging_and_committing(tmp_path):
    store = await opening(SqliteStore(tmp_path, segment_bytes=5000))
    batches = [list(range(start, start + 3)) for start in range(0, 90, 3)]
    groups = [
        group
        for batch in await asyncio.gather(*(put(store, batch) for batch in batches))
        for group in batch
    ]
    assert await store.read([group.payload for group in groups]) == [
        data(group.id) for group in groups
    ]
    await store.close()


@pytest.mark.parametrize("url", ["", "sqlite:", "nonsense", "mysql://x", "/some/folder"])
def test_addresses_of_no_known_form(url):
    with pytest.raises(ValueError, match="--store"):
        open_store(url)


def test_addresses(tmp_path):
    assert isinstance(open_store("memory"), MemoryStore)
    assert open_store(f"sqlite:{tmp_path}").name == f"sqlite:{tmp_path}"


async def test_emptied_files_are_written_again_and_never_mistaken(tmp_path):
    store = await opening(SqliteStore(tmp_path, segment_bytes=3000))
    groups = await put(store, range(12))
    freed = [group.payload.ref for group in groups[:9]]
    await store.commit(
        Changes(rows={("groups", group.id): None for group in groups[:9]}, freed=freed)
    )
    await files(tmp_path, 1)
    later = await put(store, range(20, 24), size=900)
    assert await store.read([group.payload for group in later]) == [
        data(number, 900) for number in range(20, 24)
    ]
    with pytest.raises(StoreFailure):
        await store.read([groups[0].payload])
    assert len(list(tmp_path.glob("*.spare"))) <= 1
    await store.close()
    again = SqliteStore(tmp_path)
    assert ids(await again.open()) == [9, 10, 11, *range(20, 24)]
    assert not list(tmp_path.glob("*.spare"))
    await again.close()


async def test_a_file_that_one_large_payload_filled_is_not_kept_to_be_written_again(tmp_path):
    """A body may have many times the size of a file; what is kept for later has the size of one."""
    store = await opening(SqliteStore(tmp_path, segment_bytes=3000))
    [large] = await put(store, [1], size=30_000)
    await put(store, [2])
    await store.commit(Changes(rows={("groups", large.id): None}, freed=[large.payload.ref]))
    await files(tmp_path, 1)
    assert not list(tmp_path.glob("*.spare"))
    await store.close()


async def test_damaged_rows_are_set_aside_and_everything_else_is_served(tmp_path):
    """One flipped bit used to stop the start, or to make another record of the row."""
    store = await opening(SqliteStore(tmp_path))
    groups = await put(store, range(60))
    leased = [
        GroupRecord(n, n, GroupPlace.LEASED, None, 4, groups[n].payload, 0, 1.5) for n in range(4)
    ]
    rows: dict[Any, Any] = {("groups", group.id): group for group in leased}
    rows |= {
        ("leases", name): LeaseRecord(name, "t", 0, ids, 1.0, 2.0)
        for name, ids in (("x", (0, 1)), ("y", (2, 3)))
    }
    rows["envs", 0] = EnvRecord(0, "a", "a_0", 10, 1.0, 4, None, True, 5.0)
    await store.commit(Changes(rows=rows))
    await store.close()
    rng = random.Random(3)
    flipped = [1, *range(10, 60, 2)]
    with closing(sqlite3.connect(tmp_path / "state.sqlite")) as database:
        for key in flipped:
            (row,) = database.execute("SELECT row FROM groups WHERE key = ?", (key,)).fetchone()
            changed = bytearray(row)
            changed[rng.randrange(len(row))] ^= 1 << rng.randrange(8)
            database.execute("UPDATE groups SET row = ? WHERE key = ?", (bytes(changed), key))
        database.execute("UPDATE envs SET key = 9")  # a whole row, under a key that is not its own
        database.commit()
    for _ in range(2):
        store = SqliteStore(tmp_path, segment_bytes=3000)
        snapshot = await store.open()
        assert not store.files.is_wasteful(0), (
            "nothing is given back that a row set aside may refer to"
        )
        assert ids(snapshot) == [number for number in range(60) if number not in flipped]
        assert snapshot["envs"] == []
        assert [lease.lease_id for lease in snapshot["leases"]] == ["y"]
        places = {group.id: group.place for group in snapshot["groups"]}
        assert [places[number] for number in (0, 2, 3)] == [
            GroupPlace.QUEUE,
            GroupPlace.LEASED,
            GroupPlace.LEASED,
        ]
        assert list(tmp_path.glob("*.seg")), "their payloads are kept, too"
        await store.close()
    with closing(sqlite3.connect(tmp_path / "state.sqlite")) as database:
        assert database.execute("SELECT count(*) FROM damaged").fetchone() == (len(flipped) + 1,)


async def test_a_damaged_record_of_the_run_begins_a_new_epoch(tmp_path):
    engine = await opened(SqliteStore(tmp_path))
    await engine.close()
    with closing(sqlite3.connect(tmp_path / "state.sqlite")) as database:
        database.execute("UPDATE run SET row = x'00'")
        database.commit()
    engine = await opened(SqliteStore(tmp_path), registered=False)
    assert not engine.state.run.registered
    assert engine.state.run.epoch > 1, "clients of the old one notice"
    await engine.close()


async def test_folders_of_other_formats(tmp_path):
    """One without checksums is taken over, one of a newer program is left alone."""
    store = await opening(SqliteStore(tmp_path))
    await put(store, range(3))
    await store.close()
    with closing(sqlite3.connect(tmp_path / "state.sqlite")) as database:
        database.execute("UPDATE groups SET row = substr(row, 5)")
        database.execute("PRAGMA user_version = 0")
        database.commit()
    store = SqliteStore(tmp_path)
    assert ids(await store.open()) == [0, 1, 2]
    await store.close()
    with closing(sqlite3.connect(tmp_path / "state.sqlite")) as database:
        database.execute("PRAGMA user_version = 2")
    with pytest.raises(StoreFailure, match="format 2"):
        await SqliteStore(tmp_path).open()


async def test_what_cannot_be_read_now_is_not_lost(tmp_path, monkeypatch):
    """Neither while the server runs nor when it starts."""
    store = await opening(SqliteStore(tmp_path))
    await put(store, range(3))
    real = os.pread

    def broken(handle: int, nbytes: int, offset: int) -> bytes:
        raise OSError(errno.EIO, "input/output error (set off by a test)")

    for _ in range(2):
        monkeypatch.setattr(os, "pread", broken)
        await store.close()
        store = SqliteStore(tmp_path)
        groups = (await store.open())["groups"]
        with pytest.raises(StoreFailure, match="cannot be read now") as failure:
            await store.read([group.payload for group in groups])
        assert not isinstance(failure.value, PayloadLost)
        monkeypatch.setattr(os, "pread", real)
        assert await store.read([group.payload for group in groups]) == [
            data(number) for number in range(3)
        ]
        assert aside({"groups": groups}) == []
    await store.close()


async def test_a_file_that_somebody_deleted_takes_only_its_own_groups_along(tmp_path):
    store = await opening(SqliteStore(tmp_path, segment_bytes=3000))
    await put(store, range(9))
    await store.close()
    first, _, last = sorted(tmp_path.glob("*.seg"))
    for path in (first, last):
        path.unlink()
    store = SqliteStore(tmp_path, segment_bytes=3000)
    snapshot = await store.open()
    assert aside(snapshot) == [(number, "payload_lost") for number in (0, 1, 2, 6, 7, 8)]
    later = await put(store, range(10, 12))
    refs = {group.payload.ref for group in later}
    assert refs.isdisjoint(group.payload.ref for group in snapshot["groups"]), (
        "its places are not used again"
    )
    await store.close()


async def test_the_rest_of_a_broken_set_stands_alone(tmp_path):
    """A set of which a group was damaged could never be complete again, and stayed queued for
    ever."""
    engine = await opened(SqliteStore(tmp_path))
    groups = await put(engine.store, range(1, 7))
    rows: dict[Any, Any] = {}
    for group, size, first in zip(groups, (4, 4, 3, 5, 8, 8), (1, 1, 3, 3, 5, 5), strict=True):
        rows["groups", group.id] = msgspec.structs.replace(group, size=size, bundle=(first, 2))
    await engine.store.commit(Changes(rows=rows))
    await engine.close()
    with closing(sqlite3.connect(tmp_path / "state.sqlite")) as database:
        database.execute("UPDATE groups SET row = x'00' WHERE key IN (1, 3)")
        database.commit()
    engine = await opened(SqliteStore(tmp_path), registered=False)
    found = {group.id: (group.place, group.bundle) for group in engine.state.groups.values()}
    assert found == {
        2: (GroupPlace.QUEUE, None),
        4: (GroupPlace.QUARANTINE, None),  # 5 does not divide 8
        5: (GroupPlace.QUEUE, (5, 2)),
        6: (GroupPlace.QUEUE, (5, 2)),
    }
    await engine.close()


async def test_a_folder_that_could_not_be_flushed_is_flushed_by_the_next_commit(
    tmp_path, monkeypatch
):
    """``durable``: nothing is acknowledged whose file could lose its name with the power. The first
    flush of the folder fails, and with it the commit; the second one must not believe that the new
    file's name is on the disk already."""
    flushed: list[bool] = []
    real = os.fsync

    def fail_on_the_first_folder(handle: int) -> None:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            return real(handle)
        flushed.append(bool(flushed))
        if not flushed[-1]:
            raise OSError("input/output error (set off by a test)")
        real(handle)

    store = await opening(SqliteStore(tmp_path, durable=True))
    monkeypatch.setattr(os, "fsync", fail_on_the_first_folder)
    for number in range(3):
        if number == 0:
            with pytest.raises(StoreFailure):
                await put(store, [number])
        await put(store, [number])
    assert flushed == [False, True], (
        "again after the failure, and not for names that have been flushed"
    )
    await store.close()
