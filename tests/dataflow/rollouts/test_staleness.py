"""Admission: the formula, and what keeps it true (docs/reference/dataflow.md 9, 13). The gate: no
sample is overtaken until it is too old (docs/reference/dataflow.md 9, 13). Requests for samples get
their turn in the order in which they came, and no turn is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from realhf.dataflow.rollouts.sample_queue import PendingRequests
from realhf.dataflow.rollouts.staleness import StalenessManager, StragglerGate
from tests.dataflow.rollouts.toy_rollouts import Conditions, Simulation


def manager(
    batch_size: int = 4, eta: int = 2, max_concurrent: int = 1000, **counters: int
) -> StalenessManager:
    return StalenessManager(
        batch_size=batch_size, max_head_offpolicyness=eta, max_concurrent=max_concurrent, **counters
    )


@pytest.mark.parametrize("eta", [0, 1, 2, 4, 8])
def test_first_one_batch_and_eta_more_then_one_for_each_version(eta: int) -> None:
    counters = manager(eta=eta)
    assert counters.capacity == (1 + eta) * 4
    counters.admit(counters.capacity)
    for version in range(1, 6):
        assert counters.capacity == 0
        with pytest.raises(ValueError, match="capacity"):
            counters.admit()
        counters.accept(4)
        counters.consume(4)
        assert counters.capacity == 0
        counters.set_version(version)
        assert counters.capacity == 4
        counters.admit(4)


@pytest.mark.parametrize(
    ("version", "accepted", "running", "max_concurrent", "capacity"),
    [
        (0, 0, 0, 1000, 12),
        (0, 0, 0, 5, 5),
        (0, 0, 5, 5, 0),
        (0, 8, 4, 1000, 0),
        (0, 8, 3, 1000, 1),
        (3, 12, 0, 1000, 12),
        (3, 20, 2, 1000, 2),
        (3, 20, 2, 3, 1),
        (1, 20, 0, 1000, 0),
    ],
)
def test_the_formula(
    version: int, accepted: int, running: int, max_concurrent: int, capacity: int
) -> None:
    """min(max_concurrent - running, (eta + v + 1) * B - (accepted + running)) with B = 4, eta = 2;
    never negative."""
    counters = manager(max_concurrent=max_concurrent, version=version)
    counters.running = running
    counters.accepted = accepted
    assert counters.capacity == counters.counters()["capacity"] == capacity


def test_rejected_and_dropped_samples_give_their_room_back() -> None:
    counters = manager(eta=0)
    counters.admit(4)
    counters.reject(1)
    assert (counters.capacity, counters.rejected) == (1, 1)
    counters.accept(3)
    assert counters.capacity == 1
    counters.drop(2)
    assert (counters.capacity, counters.accepted, counters.dropped) == (3, 1, 2)
    counters.consume(1)
    with pytest.raises(ValueError, match="accepted and not consumed: 0"):
        counters.drop()
    assert counters.capacity == 3


def test_what_waits_anywhere_after_a_recovery_is_counted() -> None:
    counters = manager(version=5, accepted=5 * 4 + 9, consumed=5 * 4)
    assert counters.capacity == 3
    assert counters.running == 0
    assert manager(version=5, accepted=5 * 4 + 30, consumed=5 * 4).capacity == 0


def test_impossible_steps_are_refused_and_change_nothing() -> None:
    counters = manager(version=2, accepted=9, consumed=8)
    counters.admit(2)
    before = counters.counters()
    for move in (
        lambda: counters.admit(100),
        lambda: counters.accept(3),
        lambda: counters.reject(3),
        lambda: counters.drop(2),
        lambda: counters.consume(2),
        lambda: counters.set_version(1),
        lambda: counters.admit(-1),
    ):
        with pytest.raises(ValueError):
            move()
    assert counters.counters() == before
    for wrong in (
        {"batch_size": 0},
        {"eta": -1},
        {"max_concurrent": 0},
        {"accepted": 1, "consumed": 2},
    ):
        with pytest.raises(ValueError):
            manager(**wrong)


def test_any_history_keeps_the_bounds() -> None:
    for seed in range(30):
        _keeps_the_bounds(Random(seed))


def _keeps_the_bounds(random: Random) -> None:
    batch_size = random.randint(1, 6)
    eta = random.randint(0, 4)
    concurrent = random.randint(1, 40)
    counters = manager(batch_size, eta, concurrent)
    for _ in range(400):
        name = random.choice(
            ["admit", "admit", "accept", "accept", "reject", "drop", "consume", "version"]
        )
        if name == "version":
            counters.set_version(
                random.randint(
                    counters.version, max(counters.version, counters.consumed // batch_size)
                )
            )
            continue
        limit = {"admit": counters.capacity, "accept": counters.running, "reject": counters.running}
        most = limit.get(name, counters.accepted - counters.consumed)
        getattr(counters, name)(random.randint(0, most))
        assert (
            counters.admitted
            == counters.running + counters.accepted + counters.rejected + counters.dropped
        )
        assert 0 <= counters.running <= concurrent
        assert counters.accepted + counters.running <= (eta + counters.version + 1) * batch_size


def gate_of(batch_size: int, eta: int, *admitted: str, wait: bool = True) -> StragglerGate:
    """Names like "s3@1": the sample that was admitted fourth, at version 1."""
    gate = StragglerGate(batch_size, eta, wait=wait)
    for name in admitted:
        order, version = name[1:].split("@")
        gate.admit(name, int(version), int(order))
    return gate


def test_step_1_waits_for_the_slow_ones_instead_of_taking_younger_samples() -> None:
    """B=2, eta=2, four of the first six rollouts are slow."""
    gate = gate_of(2, 2, *(f"s{order}@0" for order in range(6)))
    gate.stage("s5@0")
    gate.stage("s4@0")
    assert gate.release(0) == ["s4@0", "s5@0"]
    for name in ("s6@1", "s7@1"):
        gate.admit(name, 1, int(name[1]))
        gate.stage(name)
    assert gate.release(1) is None
    assert gate.stragglers(1) == ["s0@0", "s1@0", "s2@0", "s3@0"]
    gate.stage("s2@0")
    assert gate.release(1) is None
    gate.stage("s0@0")
    assert gate.release(1) == ["s0@0", "s2@0"]
    assert gate.release(2) is None
    assert gate.stragglers(2) == ["s1@0", "s3@0"]
    gate.forget("s1@0")
    gate.stage("s3@0")
    assert gate.release(2) == ["s3@0", "s6@1"]


def test_without_waiting_younger_samples_overtake() -> None:
    gate = gate_of(2, 2, *(f"s{order}@0" for order in range(4)), "s6@1", "s7@1", wait=False)
    gate.stage("s7@1")
    gate.stage("s6@1")
    assert gate.release(1) == ["s6@1", "s7@1"]


def test_earliest_version_then_earliest_arrival_in_the_order_of_admission() -> None:
    gate = gate_of(3, 4, "s0@0", "s1@0", "s2@0", "s3@1", "s4@1", "s5@1")
    for name in ("s5@1", "s4@1", "s3@1", "s2@0"):
        gate.stage(name)
    assert gate.n_staged == 4
    assert gate.release(1) == ["s2@0", "s4@1", "s5@1"]
    assert (gate.n_staged, len(gate)) == (1, 3)


def test_the_last_step_batch_may_be_small_but_waits_for_what_runs() -> None:
    gate = gate_of(3, 0, "s0@0", "s1@0")
    gate.stage("s1@0")
    assert gate.release(0) is None
    assert gate.release(0, final=True) is None
    assert gate.stragglers(0) == ["s0@0"]
    gate.stage("s0@0")
    assert gate.release(0) is None
    assert gate.release(0, final=True) == ["s0@0", "s1@0"]
    assert gate.release(1, final=True) == []


def test_a_retried_sample_counts_from_its_new_admission() -> None:
    gate = gate_of(1, 0, "s0@0")
    gate.forget("s0@0")
    gate.admit("s0@0", 1, 5)
    gate.admit("s6", 1, 6)
    gate.stage("s6")
    assert gate.release(1) is None
    assert gate.stragglers(1) == ["s0@0"]


def test_stale_samples_are_dropped_where_the_policy_says_so() -> None:
    gate = gate_of(2, 1, "s0@0", "s1@0", "s2@1", "s3@0", wait=False)
    for name in ("s3@0", "s0@0", "s2@1"):
        gate.stage(name)
    assert gate.drop_stale(1) == []
    assert gate.drop_stale(2) == ["s0@0", "s3@0"]
    assert (gate.n_staged, len(gate)) == (1, 2)


def test_what_cannot_be_is_refused() -> None:
    gate = gate_of(2, 1, "s0@0")
    gate.stage("s0@0")
    for act in (
        lambda: gate.stage("s0@0"),
        lambda: gate.stage("s1@0"),
        lambda: gate.forget("s1@0"),
        lambda: gate.admit("s0@0", 1, 1),
        lambda: StragglerGate(0, 1),
        lambda: StragglerGate(1, -1),
    ):
        with pytest.raises(ValueError):
            act()
    assert (gate.n_staged, len(gate)) == (1, 1)


def test_the_rule_is_the_one_of_the_reference() -> None:
    """For every a >= u - eta: the sum over a' <= a of (out[a'] - S[a']) is at most (a + eta - u) *
    B, or no sample of the versions up to a runs."""
    verdicts = Counter(_gate_agrees_with_the_reference(Random(seed)) for seed in range(1000))
    assert min(verdicts["opens"], verdicts["too few"], verdicts["waits"]) > 100


def _gate_agrees_with_the_reference(random: Random) -> str:
    batch_size = random.randint(1, 4)
    eta = random.randint(0, 4)
    step = random.randint(0, 8)
    gate = StragglerGate(batch_size, eta)
    versions = {
        f"s{order}": random.randint(max(0, step - eta - 1), step)
        for order in range(random.randint(1, 14))
    }
    for order, (id, version) in enumerate(versions.items()):
        gate.admit(id, version, order)
    arrived = random.sample(list(versions), random.randint(0, len(versions)))
    for id in arrived:
        gate.stage(id)
    chosen = sorted(arrived, key=lambda id: versions[id])[:batch_size]
    left = Counter(versions.values()) - Counter(versions[id] for id in chosen)
    fits = all(
        sum(count for version, count in left.items() if version <= a)
        <= (a + eta - step) * batch_size
        or all(id in arrived for id, version in versions.items() if version <= a)
        for a in range(step - eta, step + 1)
    )
    if len(chosen) == batch_size and fits:
        assert gate.stragglers(step) == []
        assert gate.release(step) == sorted(chosen, key=list(versions).index)
        return "opens"
    assert gate.release(step) is None
    assert len(gate) == len(versions)
    return "waits" if len(chosen) == batch_size else "too few"


@pytest.mark.slow
@pytest.mark.parametrize("crashes", [0, 2])
def test_no_sample_is_older_than_the_bound_and_nothing_stops(crashes: int) -> None:
    """1,500 simulated runs of admission and gate, half of them with crashes."""
    oldest: dict[int, int] = {}
    for seed in range(750):
        random = Random(seed)
        conditions = Conditions.draw(random, crashes=crashes)
        run = Simulation(conditions, random)
        run.run()
        trained = [id for ids in run.trained.values() for id in ids]
        assert len(trained) == len(set(trained)) == run.drawn - run.lost
        assert max(run.ages, default=0) <= conditions.eta, f"seed {seed}: {conditions}"
        oldest[conditions.eta] = max([*run.ages, oldest.get(conditions.eta, 0)])
    assert oldest == {eta: eta for eta in range(5)}


@pytest.mark.slow
def test_a_run_that_goes_on_with_another_bound_does_not_stop_and_loses_nothing() -> None:
    """Samples that had arrived and are too old for a lower bound used to close the gate for
    ever."""
    too_old = 0
    for seed in range(300):
        random = Random(seed)
        run = Simulation(Conditions.draw(random, crashes=3, changes=True), random)
        run.run()
        trained = [id for ids in run.trained.values() for id in ids]
        assert len(trained) == len(set(trained)) == run.drawn - run.lost
        too_old += max(run.ages, default=0) > run.on.eta
    assert too_old > 10


def test_without_the_gate_samples_get_older_than_the_bound() -> None:
    late = 0
    for seed in range(100):
        random = Random(seed)
        run = Simulation(Conditions.draw(random, wait=False), random)
        run.run()
        late += max(run.ages, default=0) > run.on.eta
    assert late > 20


LONG_S = 60.0


async def waiting(pending: PendingRequests, *workers: str) -> list[asyncio.Task[bool]]:
    """Requests of these workers, in this order."""
    tasks = [asyncio.create_task(pending.wait_turn(worker, LONG_S)) for worker in workers]
    await asyncio.sleep(0)
    return tasks


async def settled(tasks: list[asyncio.Task[bool]]) -> list[bool]:
    """Which of them have ended by now."""
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_only_so_many_are_woken_and_the_first_first() -> None:
    pending = PendingRequests()
    tasks = await waiting(pending, "a", "b", "c", "a")
    pending.wake(0)
    assert await settled(tasks) == [False] * 4
    pending.wake(2)
    assert await settled(tasks) == [True, True, False, False]
    assert len(pending) == 2
    pending.wake()
    assert await asyncio.gather(*tasks) == [True] * 4
    assert len(pending) == 0


async def test_one_that_waits_no_longer_costs_nobody_a_turn() -> None:
    pending = PendingRequests()
    tasks = await waiting(pending, "a", "b", "c")
    tasks[0].cancel()
    await settled(tasks)
    pending.wake(1)
    assert await settled(tasks) == [True, True, False]
    tasks += await waiting(pending, "d")
    pending.wake(1)  # c has its turn, and is cancelled before it can use it
    tasks[2].cancel()
    assert await settled(tasks) == [True] * 4
    assert tasks[3].result()
    with pytest.raises(asyncio.CancelledError):
        tasks[2].result()


async def test_a_wait_is_bounded() -> None:
    pending = PendingRequests()
    assert not await pending.wait_turn("a", 0.0)
    assert not await pending.wait_turn("a", 0.001)
    assert len(pending) == 0


async def test_all_requests_of_a_worker_end_together() -> None:
    pending = PendingRequests()
    tasks = await waiting(pending, "a", "b", "a")
    pending.wake_worker("a")
    pending.wake_worker("nobody")
    assert await settled(tasks) == [True, False, True]
    pending.wake(1)
    assert await tasks[1]
