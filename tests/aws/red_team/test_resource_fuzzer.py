"""The adversary that uses everything up, for a few dozen commands (`make red-team` plays thousands), and its eyes."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from realhf.aws.simulator.ministack_process import SIMULATOR_MEMORY_MB
from realhf.aws.simulator.pool import MiniStackPool
from tests.aws.red_team.resource_fuzzer import Case, Cases, ResourceFuzzer

pytestmark = pytest.mark.sim
SERVICES = ("kinesis", "ec2", "ecs", "elasticache", "cloudformation", "sqs", "events")


@pytest.mark.nightly
@pytest.mark.slow
def test_extremes_cost_no_slot(pool: MiniStackPool) -> None:
    """Whatever is asked for, the simulator stays within its memory, and the next lease plays."""
    fuzzer = ResourceFuzzer(pool)
    try:
        tally = fuzzer.play(itertools.islice(Cases(7, SERVICES), 60))
    finally:
        fuzzer.close()
    assert tally.breaches == [] and tally.slots_lost == 0
    assert tally.reached > 30 and 0 < tally.largest_mb < SIMULATOR_MEMORY_MB, tally
    assert tally.refused["too-many"] > 0, tally.refused


def test_every_number_of_the_models_is_among_the_cases() -> None:
    counted = Cases(1, ("kinesis", "ec2", "elasticache"))
    assert {("kinesis", ("ShardCount",)), ("ec2", ("MaxCount",)), ("elasticache", ("NumCacheNodes",))} <= {
        (service, path) for service, _, path, _ in counted.members
    }
    drawn = [case.command for case in itertools.islice(counted, 200)]
    assert drawn == [case.command for case in itertools.islice(Cases(1, ("kinesis", "ec2", "elasticache")), 200)]


def test_a_simulator_and_a_slot_that_are_lost_are_told_apart(
    pool: MiniStackPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuzzer = ResourceFuzzer(pool)
    slot, run = fuzzer._slot, fuzzer._slot.executor._exchange

    def killed(*arguments: object) -> object:
        os.kill(slot.ministack.pid, signal.SIGKILL)
        return run(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(slot.executor, "_exchange", killed)
    fuzzer.play([Case("m", "aws s3 ls")])
    monkeypatch.undo()
    assert fuzzer.tally.simulators_lost == ["aws s3 ls"] and fuzzer.tally.slots_lost == 0
    assert fuzzer.tally.breaches == []
    monkeypatch.setattr(fuzzer, "_next_lease", lambda: (_ for _ in ()).throw(AssertionError("does not play")))
    with pytest.raises(AssertionError):
        fuzzer.play([Case("m", "aws s3 ls")] * 30)
    monkeypatch.undo()
    assert fuzzer.tally.slots_lost == 1 and "a slot was lost (does not play)" in fuzzer.tally.breaches[0]
