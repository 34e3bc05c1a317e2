"""The gate: no sample is overtaken until it is too old (docs/reference/dataflow.md 9, 14)."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from realhf.dataflow.rollouts.staleness import StragglerGate
from tests.dataflow.rollouts.toy_rollouts import Conditions, Simulation


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
    assert gate.staged == 4
    assert gate.release(1) == ["s2@0", "s4@1", "s5@1"]
    assert (gate.staged, len(gate)) == (1, 3)


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
    assert (gate.staged, len(gate)) == (1, 2)


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
    assert (gate.staged, len(gate)) == (1, 1)


def test_the_rule_is_the_one_of_the_reference() -> None:
    """For every a >= u - eta: the sum over a' <= a of (out[a'] - S[a']) is at most (a + eta - u) * B, or no sample of
    the versions up to a runs."""
    verdicts = Counter(_gate_agrees_with_the_reference(Random(seed)) for seed in range(1000))
    assert min(verdicts["opens"], verdicts["too few"], verdicts["waits"]) > 100


def _gate_agrees_with_the_reference(random: Random) -> str:
    batch_size, eta, step = random.randint(1, 4), random.randint(0, 4), random.randint(0, 8)
    gate = StragglerGate(batch_size, eta)
    versions = {f"s{order}": random.randint(max(0, step - eta - 1), step) for order in range(random.randint(1, 14))}
    for order, (id, version) in enumerate(versions.items()):
        gate.admit(id, version, order)
    arrived = random.sample(list(versions), random.randint(0, len(versions)))
    for id in arrived:
        gate.stage(id)
    chosen = sorted(arrived, key=lambda id: versions[id])[:batch_size]
    left = Counter(versions.values()) - Counter(versions[id] for id in chosen)
    fits = all(
        sum(count for version, count in left.items() if version <= a) <= (a + eta - step) * batch_size
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


def test_a_run_that_goes_on_with_another_bound_does_not_stop_and_loses_nothing() -> None:
    """Samples that had arrived and are too old for a lower bound used to close the gate for ever."""
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
