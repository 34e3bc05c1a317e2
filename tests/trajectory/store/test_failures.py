"""A store that fails loses nothing it acknowledged, and the server still stops.

Source: docs/reference/trajectory.md 3.8, 3.11.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from isal import isal_zlib

from realhf.trajectory.http.service import Metrics
from realhf.trajectory.records import (
    Encoding,
    GroupPlace,
    GroupRecord,
    Payload,
    PayloadRef,
    StateOptions,
)
from realhf.trajectory.state import delivery, push, registry, views
from realhf.trajectory.state import engine as engine_module
from realhf.trajectory.state.delivery import LeasedBatch, PullRequest
from realhf.trajectory.state.engine import StateEngine
from realhf.trajectory.state.server_state import TrajectoryState
from realhf.trajectory.store.base import Changes, Snapshot, StoreFailure
from realhf.trajectory.store.open import MemoryStore
from realhf.trajectory.store.sqlite import SqliteStore
from realhf.web.bodies import BodyBudget
from tests.trajectory.conftest import REGISTRATION
from tests.trajectory.driver import data, incoming, opened, opening, pushed, put


def record(number: int, ref: PayloadRef, data: bytes) -> GroupRecord:
    payload = Payload(ref, len(data), Encoding.JSON, 7, isal_zlib.crc32(data))
    return GroupRecord(number, number, GroupPlace.QUEUE, None, 4, payload, 0, 1.5)


def data_of(number: int) -> bytes:
    return bytes([number % 251]) * (50 + number % 97)


class FailingStore(SqliteStore):
    """A SQLite store in which the test sets off failures. ``before``: of the payloads' write;
    ``refuses``: of the rows' transaction, a moment later; ``after``: of that which was made;
    ``housekeeping``: of what follows a commit."""

    before = refuses = after = housekeeping = False
    reloads = 0

    async def commit(self, changes: Changes) -> None:
        if self.before and self._segments.waiting():
            raise StoreFailure("no space left on device (set off by a test)")
        if self.refuses:
            await asyncio.sleep(0.01)
        await super().commit(changes)

    def _write(self, changes: Changes) -> None:
        if not self.refuses:
            super()._write(changes)
        if self.refuses or self.after:
            raise sqlite3.OperationalError("disk I/O error (set off by a test)")

    async def _merge_log(self) -> None:
        if self.housekeeping:
            raise OSError("no space left on device (set off by a test)")
        await super()._merge_log()

    async def reload(self) -> Snapshot:
        self.reloads += 1
        return await super().reload()


async def test_a_payload_that_was_given_up_leaves_its_neighbours_where_they_are(tmp_path):
    store = await opening(SqliteStore(tmp_path))
    first, rejected, *later = [await store.stage([data_of(number)]) for number in range(4)]
    await store.unstage(rejected)
    kept = {0: first[0], 2: later[0][0], 3: later[1][0]}
    groups = [record(number, ref, data_of(number)) for number, ref in kept.items()]
    await store.commit(Changes(rows={("groups", group.id): group for group in groups}))
    assert await store.read([group.payload for group in groups]) == [
        data_of(number) for number in kept
    ]
    await store.close()
    again = SqliteStore(tmp_path)
    assert sorted(group.id for group in (await again.open())["groups"]) == [0, 2, 3]  # type: ignore[union-attr]
    await again.close()


@pytest.mark.slow
async def test_everything_acknowledged_can_be_read_after_failures_at_random(tmp_path):
    """Pushes, some of them in lists, through an engine whose store fails at every third commit or
    so."""
    store, rng = FailingStore(tmp_path, segment_bytes=4000), random.Random(7)
    engine = await opened(store, registered=False)
    acknowledged: dict[int, bytes] = {}

    async def produce(numbers: Sequence[int]) -> None:
        for number in numbers:
            data = data_of(number)
            while number not in acknowledged:
                refs = await store.stage([data])
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                try:
                    await engine.write(
                        push.push, [incoming(data, number + 1)], refs, False, f"key {number}", "f"
                    )
                    acknowledged[number] = data
                except StoreFailure:
                    await store.unstage(refs)
                    engine._failure = None
                await asyncio.sleep(0)

    async def fail() -> None:
        while len(acknowledged) < 240:
            store.before, store.after = rng.random() < 0.3, rng.random() < 0.2
            await asyncio.sleep(0)
        store.before = store.after = False

    await asyncio.gather(fail(), *(produce(range(start, 240, 6)) for start in range(6)))
    groups = [*engine.state.groups.values()]
    assert sorted(group.size - 1 for group in groups) == list(range(240)), "each of them once"
    found = await store.read([group.payload for group in groups])
    assert found == [acknowledged[group.size - 1] for group in groups]
    await engine.close()


async def test_an_error_after_the_transaction_does_not_free_what_it_kept(tmp_path):
    """Whether it was kept is looked up, so it is neither refused to its producer nor freed
    later."""
    store = await opening(FailingStore(tmp_path, segment_bytes=300))
    store.after = True
    await put(store, [1], 60)
    store.after = False
    [kept] = (await store.reload())["groups"]
    assert isinstance(kept, GroupRecord)
    for number in range(2, 40):
        [group] = await put(store, [number], 60)
        await store.commit(Changes(rows={("groups", number): None}, freed=[group.payload.ref]))
    await asyncio.get_running_loop().run_in_executor(store._writer, lambda: None)
    assert await store.read([kept.payload]) == [data(1, 60)]
    assert len(list(tmp_path.glob("*.seg"))) <= 3, "the files of the others went"
    await store.close()


async def test_housekeeping_that_fails_is_no_failure_of_the_commit(tmp_path, caplog):
    store = await opening(FailingStore(tmp_path))
    store.housekeeping = True
    await put(store, [1])
    assert "could not be merged" in caplog.text
    store.housekeeping = False
    assert len((await store.reload())["groups"]) == 1
    await store.close()


async def test_a_command_that_fails_in_the_middle_leaves_nothing_behind(tmp_path):
    """The other commands of its round count; what it did before its fault does not."""
    engine = await opened(SqliteStore(tmp_path), registered=False)

    def broken(state: TrajectoryState, now: float) -> None:
        registry.set_policy_version(state, now, 99)
        raise ZeroDivisionError

    results = await asyncio.gather(
        engine.write(registry.register, REGISTRATION, False),
        engine.write(broken),
        engine.write(registry.disconnect_env, 5),
        return_exceptions=True,
    )
    assert isinstance(results[1], ZeroDivisionError)
    assert (engine.state.run.registered, engine.state.run.policy_version) == (True, None)
    await engine.close()
    again = await opened(SqliteStore(tmp_path), registered=False)
    assert (again.state.run.registered, again.state.run.policy_version) == (True, None)
    await again.close()


class SlowStore(MemoryStore):
    """Memory whose commits wait until the test lets them go."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    async def commit(self, changes: Changes) -> None:
        self.begun.set()
        await self.go.wait()


async def slow_engine() -> tuple[SlowStore, StateEngine, list[asyncio.Task[Any]]]:
    """An engine that commits one command while another one waits."""
    store = SlowStore()
    engine = StateEngine(store, StateOptions())
    store.go.set()
    await engine.open()
    store.go.clear()
    store.begun.clear()
    tasks = [asyncio.create_task(engine.write(registry.set_policy_version, 1))]
    await store.begun.wait()
    tasks.append(asyncio.create_task(engine.write(registry.set_policy_version, 2)))
    await asyncio.sleep(0)
    return store, engine, tasks


async def test_closing_while_a_round_runs_and_a_command_waits():
    store, engine, tasks = await slow_engine()
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    store.go.set()
    await asyncio.wait({closing}, timeout=300)
    assert closing.done(), "the server stops"
    assert [(await task)["policy_version"] for task in tasks] == [1, 2]
    with pytest.raises(StoreFailure, match="stopping"):
        await engine.write(registry.set_policy_version, 3)


async def test_a_store_that_hangs_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(engine_module, "CLOSE_DEADLINE_S", 0.05)
    _, engine, tasks = await slow_engine()
    closing = asyncio.create_task(engine.close())
    await asyncio.wait({closing}, timeout=300)
    assert closing.done(), "the server stops"
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, StoreFailure) for result in results), "everybody is told"


async def test_a_read_that_waits_for_the_disk_holds_up_no_commit(tmp_path, monkeypatch):
    """Commits are made on the event loop, so whatever they wait for everybody waits for."""
    store = await opening(SqliteStore(tmp_path))
    [first] = await put(store, [1])
    reading = threading.Event()
    disk = threading.Event()
    pread = os.pread

    def slow_pread(handle: int, nbytes: int, offset: int) -> bytes:
        reading.set()
        slow.append(not disk.wait(60))
        return pread(handle, nbytes, offset)

    slow: list[bool] = []
    monkeypatch.setattr(os, "pread", slow_pread)
    read = asyncio.create_task(store.read([first.payload]))
    await asyncio.to_thread(reading.wait, 10)
    await put(store, [2])
    disk.set()
    assert await read == [data(1)]
    assert slow == [False], "the commit did not wait for the read"
    await store.close()


async def refusing(folder: Path) -> tuple[FailingStore, StateEngine]:
    """An engine with a registered trainer and five groups in its queue."""
    store = FailingStore(folder)
    engine = await opened(store)
    await pushed(engine, *[b"x"] * 5, size=8)
    return store, engine


@pytest.mark.slow
async def test_a_failed_round_is_undone_without_reading_everything_anew(tmp_path):
    """Reading 100,000 groups anew used to stop the event loop for most of a second."""
    store, engine = await refusing(tmp_path)
    before = {table: dict(rows) for table, rows in engine.state.tables.items()}
    store.refuses = True
    pulling = asyncio.create_task(engine.write(delivery.pull, PullRequest("t", anonymous=False)))
    while not engine._committing:
        await asyncio.sleep(0)
    assert (await engine.read(views.status))["current_step"] == 0, (
        "nobody is shown what was not kept"
    )
    with pytest.raises(StoreFailure):
        await pulling
    assert engine.state.tables == before
    store.refuses = False
    await asyncio.sleep(engine_module.PAUSE_AFTER_FAILURE_S)
    batch = await engine.write(delivery.pull, PullRequest("t", anonymous=False))
    assert isinstance(batch, LeasedBatch)
    assert [group.id for group in batch.groups] == [1]
    assert store.reloads == 0
    await engine.close()


@pytest.mark.slow
async def test_no_view_shows_what_a_round_did_not_keep(tmp_path):
    """Neither metrics nor the epoch in each answer's header tell of a round that may still fail."""
    store, engine = await refusing(tmp_path)
    metrics = Metrics(engine, BodyBudget(1 << 20))
    epoch = engine.epoch
    assert epoch == engine.state.run.epoch
    store.refuses = True
    resetting = asyncio.create_task(engine.write(registry.reset))
    while not engine._committing:
        await asyncio.sleep(0)
    assert engine.state.run.epoch != epoch, "the round is under way"
    assert engine.epoch == epoch
    text = (await engine.peek(lambda state, now: metrics.text())).decode()
    assert f"trajectory_epoch {epoch:.1f}\n" in text
    assert 'trajectory_queue_groups{env="none"} 5.0\n' in text
    with pytest.raises(StoreFailure):
        await resetting
    store.refuses = False
    await asyncio.sleep(engine_module.PAUSE_AFTER_FAILURE_S)
    await engine.write(registry.reset)
    assert engine.epoch == engine.state.run.epoch > epoch
    await engine.close()


@pytest.mark.slow
async def test_that_a_batch_was_sent_is_recorded_as_soon_as_the_store_recovers(tmp_path):
    """It was tried once, and when that failed the trainer was given the same batch again."""
    store, engine = await refusing(tmp_path)
    trainer = PullRequest("t", anonymous=False)
    first = await engine.write(delivery.pull, trainer)
    store.refuses = True
    engine.write_until_kept(delivery.mark_sent, first)
    while engine._failure is None:
        await asyncio.sleep(0)
    store.refuses = False
    await asyncio.sleep(engine_module.PAUSE_AFTER_FAILURE_S)
    second = await engine.write(delivery.pull, trainer)
    assert isinstance(second, LeasedBatch)
    assert (second.step, second.redelivered) == (1, False)
    store.refuses = True
    engine.write_until_kept(delivery.mark_sent, second)
    while not engine._repeat:
        await asyncio.sleep(0)
    store.refuses = False
    await engine.close()
    assert [lease.sent for lease in engine.state.leases.values()] == [True], (
        "at the latest when it stops"
    )


@pytest.mark.slow
async def test_the_machines_clock_may_be_set(tmp_path, monkeypatch):
    """Back two days: an error of yesterday used to be told for as long. On 700 seconds: all leases
    used to end."""
    store, engine = await refusing(tmp_path)
    batch = await engine.write(delivery.pull, PullRequest("t", anonymous=False))
    await engine.write(delivery.mark_sent, batch)
    store.refuses = True
    with pytest.raises(StoreFailure):
        await engine.write(registry.set_policy_version, 1)
    store.refuses, real = False, time.time()
    monkeypatch.setattr(time, "time", lambda: real - 2 * 86400)
    await asyncio.sleep(engine_module.PAUSE_AFTER_FAILURE_S)
    await engine.write(registry.set_policy_version, 1)
    monkeypatch.setattr(time, "time", lambda: real + 700)
    other = await engine.write(delivery.pull, PullRequest("other", anonymous=False))
    assert isinstance(other, LeasedBatch)
    assert other.step == 1, "a batch of its own"
    await engine.close()
    monkeypatch.setattr(time, "time", lambda: real - 2 * 86400)
    again = await opened(SqliteStore(tmp_path), registered=False)
    [one, _] = await again.read(
        lambda state, now: [lease.expires_at - now for lease in state.leases.values()]
    )
    assert 0 < one <= 600, "leases end in time also where a server starts with another clock"
    await again.close()


async def test_payloads_that_were_not_written_wait_on(tmp_path, monkeypatch):
    """The rows of the commit that failed are in the database already, by chance: that says nothing
    of payloads."""
    store = await opening(SqliteStore(tmp_path))
    rows = {("groups", 1): None}
    [ref] = await store.stage([data_of(2)])

    def full(handle: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "input/output error (set off by a test)")

    with monkeypatch.context() as patched, pytest.raises(StoreFailure):
        patched.setattr(os, "pwritev", full)
        await store.commit(Changes(rows=rows))
    await store.commit(Changes(rows={("groups", 2): record(2, ref, data_of(2))}))
    await store.close()
    store = SqliteStore(tmp_path)
    [kept] = (await store.open())["groups"]
    assert isinstance(kept, GroupRecord)
    assert await store.read([kept.payload]) == [data_of(2)]
    await store.close()
