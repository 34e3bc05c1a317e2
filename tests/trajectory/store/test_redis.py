"""Several servers over one Redis are one server: docs/reference/trajectory.md 3.11. Needs a real
redis-server."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Iterator

import pytest
import redis

from realhf.trajectory.records import RunRecord, StateOptions
from realhf.trajectory.state import delivery, push, registry, views
from realhf.trajectory.state.delivery import LeasedBatch, PullRequest
from realhf.trajectory.state.engine import PAUSE_AFTER_FAILURE_S, StateEngine
from realhf.trajectory.store.base import Changes, StateLost, StoreFailure
from realhf.trajectory.store.redis import RedisStore
from tests.trajectory.conftest import REGISTRATION
from tests.trajectory.cutting_relay import cutting_relay
from tests.trajectory.driver import incoming, opened, pushed
from tests.trajectory.redis_server import RedisServer

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    running = RedisServer(tmp_path_factory.mktemp("redis"))
    yield running
    running.stop()


@pytest.fixture
def address(server: RedisServer) -> str:
    with redis.Redis(port=server.port) as client:
        client.flushall()
    return server.url


def run_of(epoch: int) -> Changes:
    return Changes(rows={("run", "run"): RunRecord(epoch=epoch)})


async def test_what_one_commits_the_other_follows(address):
    one = RedisStore(address)
    two = RedisStore(address)
    for store in (one, two):
        assert not any((await store.open()).values())
    assert await one.begin() == []
    await one.commit(run_of(1))
    assert await two.follow() == [run_of(1)]
    assert await two.follow() == []
    assert await two.begin() == []
    await two.commit(
        Changes(rows={("run", "run"): RunRecord(epoch=2), ("closed", "x"): None}, cleared=True)
    )
    [seen] = await one.begin()
    assert seen.cleared
    await one.abandon()
    assert (await RedisStore(address).open())["run"] == [RunRecord(epoch=2)]
    for store in (one, two):
        await store.close()


async def test_prefixes_keep_runs_apart(address):
    one = RedisStore(address + "?prefix=a")
    two = RedisStore(address + "?prefix=b")
    await one.open()
    await one.begin()
    await one.commit(run_of(1))
    assert not (await two.open())["run"]
    with pytest.raises(ValueError, match="unknown option"):
        RedisStore(address + "?nonsense=1")
    with redis.Redis(port=int(address.rpartition(":")[2])) as client:
        client.hset("a:t:run", "run", b"nonsense")
    with pytest.raises(StoreFailure, match="a row is damaged, or another version wrote it"):
        await RedisStore(address + "?prefix=a").open()
    for store in (one, two):
        await store.close()


async def test_a_lost_lock_writes_nothing(address):
    slow = RedisStore(address)
    other = RedisStore(address)
    await slow.open()
    await other.open()
    await slow.begin()
    with redis.Redis.from_url(address) as client:
        client.delete("realhf:lock")
    await other.begin()
    with pytest.raises(StateLost):
        await slow.commit(run_of(7))
    await other.commit(run_of(1))
    assert (await slow.reload())["run"] == [RunRecord(epoch=1)]
    for store in (slow, other):
        await store.close()


async def test_a_dead_holder_of_the_lock_is_waited_out(address):
    dead = RedisStore(address)
    alive = RedisStore(address)
    await dead.open()
    await alive.open()
    await dead.begin()
    await dead.close()
    assert await alive.begin() == []
    await alive.commit(run_of(1))
    await alive.close()


async def test_who_was_away_too_long_must_load_anew(address):
    one = RedisStore(address)
    late = RedisStore(address)
    await one.open()
    await late.open()
    for epoch in range(5):
        await one.begin()
        await one.commit(run_of(epoch))
    with redis.Redis.from_url(address) as client:
        client.xtrim("realhf:log", maxlen=2, approximate=False)
    for step in (late.follow, late.begin):
        with pytest.raises(StateLost):
            await step()
    await late.reload()
    assert await late.begin() == []
    await late.abandon()
    for store in (one, late):
        await store.close()


async def test_payloads_stay_after_their_commit_and_go_when_freed(address):
    store = RedisStore(address)
    engine = await opened(store, registered=False)
    [orphan], [kept] = await store.stage([b"orphan"]), await pushed(engine, b"kept")
    with redis.Redis.from_url(address) as client:
        assert client.ttl(f"realhf:p:{kept}") == -1
        assert 0 < client.ttl(f"realhf:p:{orphan}") <= 600
        [record] = engine.state.groups.values()
        assert await store.read([record.payload]) == [b"kept"]
        await engine.write(registry.reset)
        assert not client.exists(f"realhf:p:{kept}")
    with pytest.raises(StoreFailure, match="missing"):
        await store.read([record.payload])
    await engine.close()


async def test_a_payload_that_vanished_before_its_commit_is_not_acknowledged(address):
    store = RedisStore(address)
    engine = await opened(store, registered=False)
    groups = [incoming()] * 2
    refs = await store.stage([b"x", b"x"])
    with redis.Redis.from_url(address) as client:
        client.delete(f"realhf:p:{refs[1]}")
    with pytest.raises(StoreFailure, match="no longer there"):
        await engine.write(push.push, groups, refs, True)
    await asyncio.sleep(0.6)
    assert (await engine.read(views.status))["queue_size"] == 0
    await engine.close()


async def test_a_payload_stays_when_its_group_is_leased_in_the_round_of_its_push(address):
    """Else it expires while the trainer holds it."""
    engine = await opened(RedisStore(address), registered=False)
    await engine.write(registry.register, REGISTRATION | {"batch_size": 4}, False)
    groups = [incoming()] * 2
    request = PullRequest("t", anonymous=False)
    refs = await engine.store.stage([b"x", b"x"])
    _, batch = await asyncio.gather(
        engine.write(push.push, groups, refs, True), engine.write(delivery.pull, request)
    )
    assert isinstance(batch, LeasedBatch)
    refs += await engine.store.stage([b"x", b"x"])
    with redis.Redis.from_url(address) as client:
        assert [client.ttl(f"realhf:p:{ref}") for ref in refs[:2]] == [-1, -1]
        client.delete(f"realhf:p:{refs[2]}")
    results = await asyncio.gather(
        engine.write(push.push, groups, refs[2:], True),
        engine.write(delivery.pull, request),
        return_exceptions=True,
    )
    assert all(isinstance(result, StoreFailure) for result in results), (
        "not acknowledged without its payload"
    )
    await engine.close()


class Cut:
    """Stands between a store and Redis, and breaks the connection after a commit went through,
    before its reply."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.armed = False

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up, down = await asyncio.open_connection("127.0.0.1", self._port)
        while data := await reader.read(1 << 20):
            down.write(data)
            reply = await up.read(1 << 20)
            if (
                self.armed
                and b"EVALSHA" in data
                and b":version" in data
                and b"wandb" not in reply
                and b"cut" in data
            ):
                self.armed = False
                break
            writer.write(reply)
        writer.close()
        down.close()


async def test_a_commit_whose_reply_was_lost_counts_once(server, address):
    relay = Cut(server.port)
    engine = await opened(RedisStore(await relay.start()), registered=False)
    await engine.write(registry.register, REGISTRATION | {"wandb_group": "cut"}, False)
    relay.armed = True
    await pushed(engine, b"x")
    assert not relay.armed, "the reply was cut off"
    assert (await engine.read(views.status))["queue_size"] == 1
    other = await opened(RedisStore(address), registered=False)
    assert other.state.tables == engine.state.tables
    for each in (engine, other):
        await each.close()


@pytest.mark.nightly
@pytest.mark.slow
async def test_two_servers_interleaved_are_one(address):
    """Random pushes, pulls and acks on two engines: nothing lost, nothing twice, equal states."""
    engines = [
        StateEngine(RedisStore(address), StateOptions(), tidy_every_s=0.05) for _ in range(2)
    ]
    for engine in engines:
        await engine.open()
    rng = random.Random(3)
    pushed = 0
    delivered = []
    await engines[0].write(registry.register, REGISTRATION, False)

    async def producer(name: int) -> None:
        nonlocal pushed
        for number in range(40):
            engine = rng.choice(engines)
            groups = [incoming()] * rng.randint(1, 3)
            refs = await engine.store.stage([group.data for group in groups])
            await engine.write(push.push, groups, refs, True, f"{name}-{number}", "f")
            second = await engine.store.stage([group.data for group in groups])
            again, _ = await rng.choice(engines).write(
                push.push, groups, second, True, f"{name}-{number}", "f"
            )
            assert again["groups_processed"] == len(groups)
            pushed += len(groups)

    async def trainer(name: str) -> None:
        while True:
            engine = rng.choice(engines)
            batch = await engine.write(
                delivery.pull, PullRequest(name, anonymous=False, explicit=True)
            )
            if not isinstance(batch, LeasedBatch):
                if done.is_set():
                    return
                await asyncio.sleep(0.005)
                continue
            await engine.write(delivery.mark_sent, batch)
            await rng.choice(engines).write(delivery.ack, batch.lease_id)
            delivered.extend(group.id for group in batch.groups)

    done = asyncio.Event()
    trainers = [asyncio.create_task(trainer(name)) for name in "ab"]
    await asyncio.gather(*(producer(name) for name in range(4)))
    done.set()
    await asyncio.gather(*trainers)
    assert len(delivered) == len(set(delivered)) == pushed - pushed % 2
    views_of = [
        [await engine.read(view) for view in (views.status, views.info)] for engine in engines
    ]
    assert views_of[0] == views_of[1]
    assert views_of[0][0]["current_step"] == len(delivered) // 2
    assert engines[0].state.tables == engines[1].state.tables
    for engine in engines:
        await engine.close()


async def test_redis_away_is_a_clear_failure_and_passes(server, address):
    engine = await opened(RedisStore(address))
    server.stop()
    try:
        with pytest.raises(StoreFailure, match=r"redis://127\.0\.0\.1"):
            await engine.write(registry.set_policy_version, 3)
        with pytest.raises(StoreFailure):
            await engine.read(views.status)
    finally:
        server.start()
    await asyncio.sleep(0.6)
    assert (await engine.read(views.info))["batch_size"] == 8
    await engine.write(registry.set_policy_version, 3)
    assert engine.state.run.policy_version == 3
    await engine.close()


async def test_nothing_listens():
    with pytest.raises(StoreFailure, match=r"redis://127\.0\.0\.1:1"):
        await RedisStore("redis://127.0.0.1:1").open()


async def test_servers_whose_clocks_differ_keep_each_others_leases(address, monkeypatch):
    """70 seconds apart used to be enough to take a batch out of a trainer's hands."""
    one = await opened(RedisStore(address), lease_timeout_s=60)
    await pushed(one, b"x", b"x", size=8)
    batch = await one.write(delivery.pull, PullRequest("a", anonymous=False))
    await one.write(delivery.mark_sent, batch)
    real = time.time
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: real() + 70)
        two = await opened(RedisStore(address), registered=False, lease_timeout_s=60)
        other = await two.write(delivery.pull, PullRequest("b", anonymous=False))
    assert isinstance(other, LeasedBatch)
    assert (other.step, other.redelivered) == (1, False)
    for engine in (one, two):
        await engine.close()


async def test_a_redis_without_memory_can_be_drained(address):
    """Pulls and acknowledgements write a little before they free much: they were refused with the
    pushes, and a server that was started again did not come up."""
    with redis.Redis(port=int(address.rpartition(":")[2])) as client:
        engine = await opened(RedisStore(address))
        await pushed(engine, b"x", size=8)
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreFailure, match="maxmemory"):
                await engine.store.stage([b"x"])
            await engine.close()
            engine = await opened(RedisStore(address), registered=False)
            batch = await engine.write(delivery.pull, PullRequest("a", anonymous=False))
            assert isinstance(batch, LeasedBatch)
            await engine.write(delivery.ack, batch.lease_id)
            assert not engine.state.groups
        finally:
            client.config_set("maxmemory", 0)
        await engine.store.stage([b"x"])
        await engine.close()


async def test_after_a_failover_the_new_master_is_found(address, server, tmp_path):
    """The old master lives on as a replica, and its connections with it: everything was refused for
    ever."""
    heir = RedisServer(tmp_path)
    with (
        redis.Redis(port=server.port) as old,
        redis.Redis(port=heir.port) as new,
        cutting_relay(server.url) as relay,
    ):
        engine = await opened(RedisStore(f"redis://{relay.url.removeprefix('http://')}"))
        old.config_set("repl-diskless-sync-delay", 0)
        new.replicaof("127.0.0.1", server.port)  # type: ignore[no-untyped-call]
        while (
            new.info("replication")["master_link_status"] != "up"
            or new.get("realhf:version") != b"1"
        ):
            await asyncio.sleep(0.05)
        new.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]
        old.replicaof("127.0.0.1", heir.port)  # type: ignore[no-untyped-call]
        try:
            with pytest.raises(StoreFailure, match="replica"):
                await engine.write(views.status)
            relay.port = heir.port
            await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
            await engine.write(registry.set_policy_version, 7)
            assert (engine.state.run.registered, engine.state.run.policy_version) == (True, 7)
            await engine.close()
        finally:
            old.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]
            heir.stop()
