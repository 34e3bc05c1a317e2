"""What a failed round did is undone: the state is the one that the store holds, in every order that
counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from realhf.trajectory.records import GroupPlace
from realhf.trajectory.state import delivery, maintenance, quarantine, registry
from realhf.trajectory.state.queue_index import QueueIndex
from realhf.trajectory.state.server_state import TrajectoryState
from realhf.web.refusal import Refusal
from tests.trajectory.driver import Driver


def shape(index: QueueIndex) -> Any:
    lanes = {
        key: [[member.id for member in unit.members] for unit in lane]
        for key, lane in index.lanes.items()
    }
    totals = (
        index.groups,
        index.sequences,
        index.nbytes,
        dict(index.env_sequences()),
        set(index.sizes()),
    )
    return lanes, totals


def seen(state: TrajectoryState) -> Any:
    """Everything that decides what happens next; the ids that come next need not be the same."""
    held = {env_id: list(groups.items()) for env_id, groups in state.buffers.items()}
    numbers = (state.quarantine_bytes, state.leased_groups, state.waiting_bytes, set(state.stale))
    tables = {table: dict(rows) for table, rows in state.tables.items()}
    queued = {
        (group.order, group.id)
        for group in state.groups.values()
        if group.place is GroupPlace.QUEUE
    }
    versions = sorted(entry for entry in set(state._versions) if entry[1:] in queued)
    return tables, list(state.envs), held, list(state.quarantine), numbers, versions, shape(state.queue), shape(
        state.with_stale
    )  # fmt: skip


def steps(driver: Driver, rng: random.Random) -> list[Callable[[], Any]]:
    """Commands as requests bring them."""
    state = driver.state
    leases = [*state.leases, "none"]
    return [
        lambda: driver.push(
            *rng.choices((1, 2, 3, 4, 5, 8, 9), k=rng.randint(1, 3)), env=rng.choice((None, 0, 1))
        ),
        lambda: driver.push(4, version=rng.randint(0, 6), key=f"k{rng.randrange(5)}"),
        lambda: driver.batch(rng.choice("abc"), sent=rng.random() < 0.5),
        lambda: delivery.ack(state, driver.now, rng.choice(leases)),
        lambda: delivery.nack(state, driver.now, rng.choice(leases)),
        lambda: driver.at_version(rng.randint(0, 8)),
        lambda: driver.env(group_size=rng.choice((2, 4, 8))),
        lambda: registry.disconnect_env(state, driver.now, rng.randrange(3)),
        lambda: quarantine.requeue(state, driver.now, list(state.quarantine)[:3]),
        lambda: maintenance.tidy(state, driver.now + rng.choice((0, 4000))),
        lambda: registry.reset(state, driver.now) if rng.random() < 0.1 else None,
        lambda: driver.register(batch_size=rng.choice((8, 12))) if rng.random() < 0.2 else None,
    ]


def play(driver: Driver, rng: random.Random, count: int) -> None:
    for _ in range(count):
        driver.now += 1.0
        with suppress(Refusal, AssertionError):
            rng.choice(steps(driver, rng))()


@pytest.mark.parametrize("policy", ["quarantine", "last"])
def test_random_rounds_leave_nothing_behind(policy):
    for seed in range(25):
        rng = random.Random(seed)
        driver = Driver(
            max_staleness=3, stale_policy=policy, max_quarantine_groups=6, max_queue_groups=60
        )
        driver.start()
        driver.env()
        for _ in range(6):
            play(driver, rng, 12)
            driver.state.settle()
            before = seen(driver.state)
            play(driver, rng, 8)
            driver.state.undo()
            assert seen(driver.state) == before, seed
            assert not driver.state.take_changes(), "and nothing of it is committed later"
