"""What little is in use keeps no room of files that are mostly empty, and giving that back loses
nothing.

Source: docs/reference/trajectory.md 3.5, 3.11.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from realhf.trajectory.records import StateOptions
from realhf.trajectory.state import delivery, push, quarantine, registry, views
from realhf.trajectory.state.delivery import LeasedBatch, PullRequest
from realhf.trajectory.state.engine import StateEngine
from realhf.trajectory.state.maintenance import held_bytes
from realhf.trajectory.store import segments
from realhf.trajectory.store.base import Changes, StoreFailure
from realhf.trajectory.store.sqlite import SqliteStore
from tests.trajectory.conftest import ENV, REGISTRATION
from tests.trajectory.driver import incoming

SEGMENT = 64 << 10


def data_of(number: int) -> bytes:
    return b"%06d" % number * 1000


async def over(folder: Path, **options: Any) -> StateEngine:
    """An engine over small files, whose housekeeping is the test's."""
    engine = StateEngine(
        SqliteStore(folder, segment_bytes=SEGMENT), StateOptions(**options), tidy_every_s=1e6
    )
    await engine.open()
    await engine.write(registry.register, REGISTRATION | {"batch_size": 4}, False)
    return engine


async def put(engine: StateEngine, number: int, size: int = 4, env: int | None = None) -> None:
    data = data_of(number)
    group = msgspec.structs.replace(incoming(data, size), env_id=env)
    await engine.write(push.push, [group], await engine.store.stage([data]), False)


async def consume(engine: StateEngine, count: int) -> list[bytes]:
    """Payloads of batches that are acknowledged at once."""
    found = []
    for _ in range(count):
        batch = await engine.write(delivery.pull, PullRequest("t", anonymous=False))
        assert isinstance(batch, LeasedBatch)
        found += await engine.store.read([each.payload for each in batch.groups])
        await engine.write(delivery.ack, batch.lease_id)
    return found


def disk_bytes(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.glob("*.seg"))


@pytest.mark.slow
async def test_one_group_in_each_file_keeps_little_of_them(tmp_path):
    """Queued, buffered, in quarantine, leased and the latest example: each is found where it was,
    also after a restart."""
    engine = await over(tmp_path)
    await engine.write(delivery.pull, PullRequest("t", anonymous=False))
    await engine.write(registry.register_env, ENV)
    for number in range(1000):
        kept = number % 10 == 0
        early = number < 500
        await put(
            engine, number, 3 if kept and early else 5 if kept else 4, 0 if kept and early else None
        )
        if not kept:
            await consume(engine, 1)
    await put(engine, 5000)
    await put(engine, 5001)
    leased = await engine.write(delivery.pull, PullRequest("l", anonymous=False, explicit=True))
    assert isinstance(leased, LeasedBatch)
    await engine.write(delivery.mark_sent, leased)
    before = {
        key: (each.place, each.order, each.reason) for key, each in engine.state.groups.items()
    }
    assert disk_bytes(tmp_path) > 8 * held_bytes(engine.state)
    assert await engine.compact() > 6 * held_bytes(engine.state)
    assert disk_bytes(tmp_path) <= 2 * held_bytes(engine.state) + 3 * SEGMENT
    assert await engine.compact() == 0, "there is nothing to gain any more"
    await engine.close()
    again = await over(tmp_path)
    assert {
        key: (each.place, each.order, each.reason) for key, each in again.state.groups.items()
    } == before
    payloads = [each.payload for each in again.state.groups.values()]
    assert sorted(await again.store.read(payloads)) == [
        data_of(n) for n in (*range(0, 1000, 10), 5000, 5001)
    ]
    latest = await again.read(views.latest)
    assert latest is not None
    assert await again.store.read([latest.payload]) == [data_of(5001)]
    [lease] = again.state.leases.values()
    assert lease.groups == (leased.groups[0].id,)
    assert await consume(again, 1) == [data_of(5001)]
    await again.close()


@pytest.mark.nightly
@pytest.mark.slow
async def test_nothing_is_lost_or_reordered_while_room_is_given_back(tmp_path):
    """Pushes and pulls go on beside it, and bundles, stale groups and quarantine with them."""
    engine, rng = await over(tmp_path, max_staleness=3, stale_policy="last"), random.Random(5)
    order = list[bytes]()
    done = asyncio.Event()
    freed = list[int]()

    async def compacting() -> None:
        while not done.is_set():
            freed.append(await engine.compact())
            await asyncio.sleep(0)

    beside = asyncio.create_task(compacting())
    for number in range(1500):
        await put(engine, number, 4 if number % 50 else 5)
        if number % 50 and rng.random() < 0.97:
            order += await consume(engine, 1)
        if number % 200 == 10:
            await engine.write(delivery.pull, PullRequest("x", anonymous=False, explicit=True))
    while engine.state.queue.groups + len(engine.state.stale):
        order += await consume(engine, 1)
    done.set()
    await beside
    assert sum(map(bool, freed)) > 3
    leased = [
        engine.state.groups[key] for lease in engine.state.leases.values() for key in lease.groups
    ]
    rest = await engine.store.read([each.payload for each in leased])
    assert sorted(order + rest) == [data_of(number) for number in range(1500) if number % 50]
    isolated = [each.payload for each in engine.state.quarantine.values()]
    assert await engine.store.read(isolated) == [data_of(number) for number in range(0, 1500, 50)]
    await engine.close()


async def mostly_empty(folder: Path) -> StateEngine:
    """An engine whose files hold little that is needed, and one batch that was handed out."""
    engine = await over(folder)
    for number in range(100):
        await put(engine, number, 5 if number % 10 else 4)
    await engine.write(delivery.pull, PullRequest("t", anonymous=False, explicit=True))
    await engine.write(quarantine.clear)
    return engine


async def test_what_a_failed_round_acknowledged_is_not_given_back(tmp_path, monkeypatch):
    engine = await mostly_empty(tmp_path)

    def failing(self: SqliteStore, changes: Changes) -> None:
        raise OSError("no space left on device (set off by a test)")

    [lease] = engine.state.leases
    with monkeypatch.context() as failure:
        failure.setattr(SqliteStore, "_write", failing)
        results = await asyncio.gather(
            engine.write(delivery.ack, lease), engine.compact(), return_exceptions=True
        )
    assert [type(result) for result in results] == [StoreFailure, StoreFailure]
    engine._failure = None
    assert await engine.compact() > 0
    payloads = [each.payload for each in engine.state.groups.values()]
    assert sorted(await engine.store.read(payloads)) == [
        data_of(number) for number in range(0, 100, 10)
    ]
    await engine.close()


async def test_what_a_file_that_is_written_again_held_before_counts(tmp_path):
    """Large payloads do not fit beside small ones, which are kept: each file is begun anew over the
    last large one."""
    engine = await over(tmp_path)
    rest = b"r" * (SEGMENT - 2000)
    await engine.write(delivery.pull, PullRequest("t", anonymous=False))
    for number in range(40):
        small = b"%06d" % number * 500
        await engine.write(
            push.push, [incoming(small, 5)], await engine.store.stage([small]), False
        )
        await engine.write(push.push, [incoming(rest, 4)], await engine.store.stage([rest]), False)
        assert await consume(engine, 1) == [rest]
    assert disk_bytes(tmp_path) > 2 * held_bytes(engine.state) + 4 * SEGMENT
    assert await engine.compact() > 0
    assert disk_bytes(tmp_path) <= 2 * held_bytes(engine.state) + 4 * SEGMENT
    assert await engine.compact() == 0
    isolated = [each.payload for each in engine.state.quarantine.values()]
    assert await engine.store.read(isolated) == [b"%06d" % number * 500 for number in range(40)]
    await engine.close()


async def test_gaps_without_a_whole_block_are_not_asked_for(tmp_path, monkeypatch):
    """Between small payloads there are hundreds of thousands in a file, and each is a call on the
    writer's thread."""
    asked = list[tuple[int, int]]()
    real = segments._fallocate

    def counted(handle: int, mode: int, offset: int, length: int) -> int:
        asked.append((offset, length))
        return real(handle, mode, offset, length)

    monkeypatch.setattr(segments, "_fallocate", counted)
    engine = await over(tmp_path)
    data = [b"%08d" % number * 16 for number in range(3000)]
    groups = [
        incoming(each, 4 if number % 8 == 0 or number >= 2000 else 5)
        for number, each in enumerate(data)
    ]
    await engine.write(push.push, groups, await engine.store.stage(data), True)
    await engine.write(quarantine.clear)
    ended = engine.store.files.closed_files()
    freed = await engine.store.compact(
        [group.payload for group in engine.state.groups.values()], ended
    )
    assert freed == 1750 * 128
    assert asked == []
    payloads = [each.payload for each in engine.state.groups.values()]
    assert await engine.store.read(payloads) == [
        each for number, each in enumerate(data) if groups[number].size == 4
    ]
    await engine.close()


async def test_a_disk_without_holes_is_told_of_once(tmp_path, monkeypatch, caplog):
    def unknown(*_: int) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(segments, "_fallocate", unknown)
    engine = await mostly_empty(tmp_path)
    assert [await engine.compact() for _ in range(2)] == [0, 0]
    assert caplog.text.count("knows no holes") == 1
    payloads = [each.payload for each in engine.state.groups.values()]
    assert sorted(await engine.store.read(payloads)) == [
        data_of(number) for number in range(0, 100, 10)
    ]
    await engine.close()
