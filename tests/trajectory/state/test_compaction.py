"""What little is in use keeps no files that are mostly empty, and moving it loses nothing.

Source: docs/reference/trajectory.md 3.5, 3.11.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from realhf.trajectory.records import StateOptions
from realhf.trajectory.state import delivery, maintenance, push, registry, views
from realhf.trajectory.state.delivery import Batch, PullRequest
from realhf.trajectory.state.engine import Engine
from realhf.trajectory.state.maintenance import Compactor, held_bytes
from realhf.trajectory.store.base import Changes, PayloadLost, StoreFailure
from realhf.trajectory.store.sqlite import SqliteStore
from tests.trajectory.conftest import ENV, REGISTRATION, running_server, start
from tests.trajectory.driver import incoming
from tests.trajectory.groups import group

SEGMENT = 4000


def data_of(number: int) -> bytes:
    return b"%06d" % number * 20


async def over(folder: Path, **options: Any) -> Engine:
    """An engine over small files, whose housekeeping is the test's."""
    engine = Engine(SqliteStore(folder, segment_bytes=SEGMENT), StateOptions(**options), tidy_every_s=1e6)
    await engine.open()
    await engine.write(registry.register, REGISTRATION | {"batch_size": 4}, False)
    return engine


async def put(engine: Engine, number: int, size: int = 4, env: int | None = None) -> None:
    data = data_of(number)
    group = msgspec.structs.replace(incoming(data, size), env_id=env)
    await engine.write(push.push, [group], await engine.store.stage([data]), False)


async def consume(engine: Engine, count: int) -> list[bytes]:
    """Payloads of batches that are acknowledged at once."""
    found = []
    for _ in range(count):
        batch = await engine.write(delivery.pull, PullRequest("t", anonymous=False))
        assert isinstance(batch, Batch)
        found += await read_where_it_is(engine, batch)
        await engine.write(delivery.ack, batch.lease_id)
    return found


async def read_where_it_is(engine: Engine, batch: Batch) -> list[bytes]:
    """Payloads of a batch; those that are moved while they are read lie elsewhere then, as a server knows, too."""
    places = [each.payload for each in batch.groups]
    while True:
        try:
            return await engine.store.read(places)
        except PayloadLost:
            before, places = places, [each.payload for each in await engine.read(delivery.present_groups, batch)]
            assert places != before, "lost, not moved"


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.seg"))


async def settled(engine: Engine) -> None:
    """Files that nobody needs are deleted beside the commits."""
    assert isinstance(engine.store, SqliteStore)
    await engine.store.commit(Changes())
    await asyncio.get_running_loop().run_in_executor(engine.store._writer, lambda: None)


@pytest.mark.slow
async def test_one_group_in_each_file_keeps_none_of_them(tmp_path: Path):
    """Queued, buffered, in quarantine, leased and the latest example: each is found where it was, also after a
    restart."""
    engine = await over(tmp_path)
    await engine.write(delivery.pull, PullRequest("t", anonymous=False))
    await engine.write(registry.register_env, ENV)
    for number in range(1000):
        kept, early = number % 100 == 0, number < 500
        await put(engine, number, 3 if kept and early else 5 if kept else 4, 0 if kept and early else None)
        if not kept:
            await consume(engine, 1)
    await put(engine, 5000)
    await put(engine, 5001)
    leased = await engine.write(delivery.pull, PullRequest("l", anonymous=False, explicit=True))
    assert isinstance(leased, Batch)
    await engine.write(delivery.mark_sent, leased)
    before = {key: (each.place, each.order, each.reason) for key, each in engine.state.groups.items()}
    assert disk_bytes(tmp_path) > 10 * held_bytes(engine.state)
    assert await Compactor(engine).run() >= 9
    await settled(engine)
    assert disk_bytes(tmp_path) <= 2 * held_bytes(engine.state) + 3 * SEGMENT
    assert await Compactor(engine).run() == 0, "there is nothing to gain any more"
    await engine.close()
    again = await over(tmp_path)
    assert {key: (each.place, each.order, each.reason) for key, each in again.state.groups.items()} == before
    payloads = [each.payload for each in again.state.groups.values()]
    assert sorted(await again.store.read(payloads)) == [data_of(n) for n in (*range(0, 1000, 100), 5000, 5001)]
    latest = await again.read(views.latest)
    assert latest is not None
    assert await again.store.read([latest.payload]) == [data_of(5001)]
    [lease] = again.state.leases.values()
    [present] = await again.read(delivery.present_groups, leased)
    assert lease.groups == (present.id,)
    assert await consume(again, 1) == [data_of(5001)]
    await again.close()


@pytest.mark.slow
async def test_nothing_is_lost_or_reordered_while_payloads_move(tmp_path: Path):
    """Pushes and pulls go on beside it, and bundles, stale groups and quarantine with them."""
    engine, rng = await over(tmp_path, max_staleness=3, stale_policy="last"), random.Random(5)
    compactor, order, done = Compactor(engine), [], asyncio.Event()

    async def compact() -> None:
        while not done.is_set():
            moved.append(await compactor.run())
            await asyncio.sleep(0)

    moved: list[int] = []
    compacting = asyncio.create_task(compact())
    held: list[str] = []
    for number in range(1500):
        await put(engine, number, 4 if number % 50 else 5)
        if number % 50 and rng.random() < 0.97:
            order += await consume(engine, 1)
        if number % 200 == 10:
            batch = await engine.write(delivery.pull, PullRequest("x", anonymous=False, explicit=True))
            held += [batch.lease_id] if isinstance(batch, Batch) else []
    while engine.state.queue.groups + len(engine.state.stale):
        order += await consume(engine, 1)
    done.set()
    await compacting
    assert sum(moved) > 20
    leased = [engine.state.groups[key] for lease in engine.state.leases.values() for key in lease.groups]
    rest = await engine.store.read([each.payload for each in leased])
    assert sorted(order + rest) == [data_of(number) for number in range(1500) if number % 50]
    isolated = [each.payload for each in engine.state.quarantine.values()]
    assert await engine.store.read(isolated) == [data_of(number) for number in range(0, 1500, 50)]
    await engine.close()


async def test_a_group_that_goes_while_it_is_moved_leaves_nothing(tmp_path: Path):
    engine = await over(tmp_path)
    await put(engine, 1)
    [[key, old]] = [(each.id, each.payload.ref) for each in engine.state.groups.values()]
    [new] = await engine.store.stage([data_of(1)])
    await put(engine, 2)
    assert await consume(engine, 1) == [data_of(1)]
    assert await engine.write(maintenance.move_payloads, [(key, old, new)]) == 0
    await put(engine, 3)
    assert await consume(engine, 2) == [data_of(2), data_of(3)]
    await engine.close()


async def test_a_store_that_fails_while_payloads_move_keeps_the_old_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = await over(tmp_path)
    for number in range(400):
        await put(engine, number, 5 if number % 100 == 0 else 4)
        if number % 100:
            await consume(engine, 1)
    write = SqliteStore._write

    def failing(self: SqliteStore, changes: Changes) -> None:
        raise OSError("no space left on device (set off by a test)")

    monkeypatch.setattr(SqliteStore, "_write", failing)
    with pytest.raises(StoreFailure):
        await Compactor(engine).run()
    monkeypatch.setattr(SqliteStore, "_write", write)
    engine._failure = None
    await engine.write(maintenance.tidy)
    payloads = [each.payload for each in engine.state.groups.values()]
    assert await engine.store.read(payloads) == [data_of(number) for number in range(0, 400, 100)]
    assert await Compactor(engine).run() >= 3
    await settled(engine)
    assert disk_bytes(tmp_path) <= 2 * held_bytes(engine.state) + 3 * SEGMENT
    await engine.close()


def test_a_batch_whose_payloads_moved_after_it_was_formed_is_delivered(tmp_path: Path):
    """The move falls between the lease and the read, which then finds the old file gone."""
    moved: list[int] = []

    class StoreThatMovesFirst(SqliteStore):
        """Before the first read of a batch, everything is moved."""

        async def read(self, payloads: Any) -> list[bytes]:
            if not moved:
                moved.append(1)
                engine = engines[0]
                groups = [*engine.state.groups.values()]
                data = await super().read([each.payload for each in groups])
                refs = await self.stage(data)
                moves = [(each.id, each.payload.ref, ref) for each, ref in zip(groups, refs, strict=True)]
                assert await engine.write(maintenance.move_payloads, moves) == len(moves)
                await settled(engine)
                for path in tmp_path.glob("*.seg"):
                    if path.stem == "00000001":
                        path.write_bytes(bytes(path.stat().st_size))
            return await super().read(payloads)

    engines: list[Engine] = []
    opening = Engine.open

    async def noticed(self: Engine) -> None:
        engines.append(self)
        await opening(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "realhf.trajectory.http.service.open_store",
            lambda url, durable: StoreThatMovesFirst(tmp_path, segment_bytes=100),
        )
        patch.setattr(Engine, "open", noticed)
        with running_server() as url, httpx.Client(base_url=url) as api:
            start(api)
            groups = [group(4, 30, seed=seed) for seed in range(2)]
            for each in groups:
                api.post("/scored_data", json=each)
            batch = api.get("/batch").json()["batch"]
            assert [item["tokens"] for item in batch] == [each["tokens"] for each in groups]
            assert api.get("/quarantine").json()["total"] == 0
            assert api.get("/latest_example").json()["tokens"] == groups[1]["tokens"]
    assert moved
