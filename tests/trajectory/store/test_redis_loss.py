"""A Redis that forgot is noticed: nothing acknowledged afterwards is lost, and a new epoch says
that something was.

Needs a real redis-server. Source: docs/reference/trajectory.md 3.2, 3.11."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from realhf.trajectory.records import RunRecord
from realhf.trajectory.state import registry, views
from realhf.trajectory.state.engine import StateEngine
from realhf.trajectory.store.base import Changes, StoreFailure
from realhf.trajectory.store.redis import RedisStore
from realhf.web.refusal import Refusal
from tests.trajectory.driver import opened, pushed
from tests.trajectory.redis_server import RedisServer

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis without persistence."""
    server = RedisServer(tmp_path, persistent=False)
    yield server
    server.stop()


async def answered(engine: StateEngine, view: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """What a server says once it has found its Redis again."""
    while True:
        try:
            return await engine.read(view)
        except StoreFailure:
            await asyncio.sleep(0.1)


async def push_many(engine: StateEngine, first: int, count: int) -> None:
    """Push groups whose payloads tell their numbers."""
    data = [b"payload %d" % number for number in range(first, first + count)]
    while True:
        try:
            await pushed(engine, *data)
            return
        except StoreFailure:
            await asyncio.sleep(0.1)


async def test_what_is_acknowledged_after_a_restart_without_data_is_kept(forgetful, caplog):
    engine = await opened(RedisStore(forgetful.url))
    idle = await opened(RedisStore(forgetful.url), registered=False)
    await push_many(engine, 0, 3)
    assert (await idle.read(views.status))["queue_size"] == 3
    before = engine.state.run.epoch
    forgetful.restart()
    with caplog.at_level(logging.CRITICAL):
        for first in range(3, 1303, 100):
            await push_many(engine, first, 100)
    assert "came back without its data" in caplog.text
    assert engine.state.counters["store_losses"] == 1
    assert (after := engine.state.run.epoch) > before
    groups = list(engine.state.groups.values())
    assert await engine.store.read([group.payload for group in groups]) == [
        b"payload %d" % number for number in range(3, 1303)
    ]
    with pytest.raises(Refusal, match="has ended"):
        await engine.read(registry.check_epoch, str(before))
    assert (await answered(idle, views.status))["queue_size"] == 1300
    assert (idle.state.run.epoch, idle.state.counters["store_losses"]) == (after, 1), (
        "one epoch, told by both"
    )
    for each in (engine, idle):
        await each.close()


async def test_a_mere_reading_server_notices_too_and_begins_the_epoch(forgetful):
    engine = await opened(RedisStore(forgetful.url))
    await engine.write(registry.reset)
    before = engine.state.run.epoch
    forgetful.restart()
    assert (await answered(engine, views.info))["batch_size"] == -1
    other = await opened(RedisStore(forgetful.url), registered=False)
    assert other.state.run.epoch == engine.state.run.epoch > before
    for each in (engine, other):
        await each.close()


async def test_a_redis_that_lost_its_last_commits_begins_an_epoch_and_keeps_the_rest(forgetful):
    """As an append-only file does that is flushed once a second: the last commits are gone, others
    took their numbers."""
    engine = await opened(RedisStore(forgetful.url))
    other = RedisStore(forgetful.url)
    with redis.Redis(port=forgetful.port) as client:
        names = [name for name in client.keys("realhf:*") if client.type(name) != b"none"]
        saved = {name: client.dump(name) for name in names}
        await engine.write(registry.set_policy_version, 5)
        client.delete(*client.keys("realhf:*"))
        for name, value in saved.items():
            client.restore(name, 0, value)  # type: ignore[arg-type]
    run = (await other.open())["run"][0]
    assert isinstance(run, RunRecord)
    for _ in range(2):
        await other.begin()
        await other.commit(Changes(rows={("run", "run"): run}))
    assert (await engine.read(views.info))["batch_size"] == 8
    assert engine.state.run.policy_version is None
    assert engine.state.counters["store_losses"] == 1
    assert engine.state.run.epoch > run.epoch
    await engine.close()
    await other.close()


async def test_an_unharmed_redis_is_no_loss(tmp_path):
    server = RedisServer(tmp_path)
    engine = await opened(RedisStore(server.url))
    server.restart()
    await push_many(engine, 0, 10)
    assert (engine.state.run.epoch, engine.state.counters["store_losses"]) == (0, 0)
    assert engine.state.run.registered
    await engine.close()
    server.stop()


async def test_a_payload_number_that_is_taken_is_never_written_over(forgetful):
    """Even where two servers drew the same numbers."""
    one = RedisStore(forgetful.url)
    two = RedisStore(forgetful.url)
    one._refs, two._refs = iter(range(7, 99)), iter(range(7, 99))
    refs = await one.stage([b"one"]), await two.stage([b"two"])
    with redis.Redis(port=forgetful.port) as client:
        assert [client.get(f"realhf:p:{ref}") for [ref] in refs] == [b"one", b"two"]
    for each in (one, two):
        await each.close()


async def test_two_losses_noticed_by_different_servers_are_two_epochs(forgetful):
    """The second server never heard of the epoch that the first loss began, and must not begin one
    of its number."""
    first = await opened(RedisStore(forgetful.url))
    second = await opened(RedisStore(forgetful.url), registered=False)
    await answered(second, views.info)
    forgetful.restart()
    await answered(first, views.info)
    between = first.state.run.epoch
    forgetful.restart()
    await answered(second, views.info)
    assert second.state.run.epoch > between
    await answered(first, views.info)
    assert first.state.run.epoch == second.state.run.epoch
    for each in (first, second):
        await each.close()
