"""Admission: the formula, and what keeps it true (docs/reference/dataflow.md 9, 14)."""

from __future__ import annotations

from random import Random

import pytest

from realhf.dataflow.rollouts.staleness import StalenessManager


def manager(batch_size: int = 4, eta: int = 2, max_concurrent: int = 1000, **counters: int) -> StalenessManager:
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
def test_the_formula(version: int, accepted: int, running: int, max_concurrent: int, capacity: int) -> None:
    """min(max_concurrent - running, (eta + v + 1) * B - (accepted + running)) with B = 4, eta = 2; never negative."""
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
    for wrong in ({"batch_size": 0}, {"eta": -1}, {"max_concurrent": 0}, {"accepted": 1, "consumed": 2}):
        with pytest.raises(ValueError):
            manager(**wrong)


def test_any_history_keeps_the_bounds() -> None:
    for seed in range(30):
        _keeps_the_bounds(Random(seed))


def _keeps_the_bounds(random: Random) -> None:
    batch_size, eta, concurrent = random.randint(1, 6), random.randint(0, 4), random.randint(1, 40)
    counters = manager(batch_size, eta, concurrent)
    for _ in range(400):
        name = random.choice(["admit", "admit", "accept", "accept", "reject", "drop", "consume", "version"])
        if name == "version":
            counters.set_version(
                random.randint(counters.version, max(counters.version, counters.consumed // batch_size))
            )
            continue
        limit = {"admit": counters.capacity, "accept": counters.running, "reject": counters.running}
        most = limit.get(name, counters.accepted - counters.consumed)
        getattr(counters, name)(random.randint(0, most))
        assert counters.admitted == counters.running + counters.accepted + counters.rejected + counters.dropped
        assert 0 <= counters.running <= concurrent
        assert counters.accepted + counters.running <= (eta + counters.version + 1) * batch_size
