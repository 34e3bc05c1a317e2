"""The adversaries that are no lists, for a few hundred commands (`make red-team` plays many
thousand), and their own eyes: one says what it likes, the other uses everything up."""

from __future__ import annotations

import itertools
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from realhf.aws.cli.executor import CommandResult, SentRequest
from realhf.aws.simulator.ministack_process import SIMULATOR_MEMORY_MB
from realhf.aws.simulator.pool import MiniStackPool
from tests.aws.red_team.command_fuzzer import Fuzzer, Tally, Watch
from tests.aws.red_team.command_grammar import CommandGrammar
from tests.aws.red_team.firing_range import FiringRange
from tests.aws.red_team.resource_fuzzer import Case, Cases, ResourceFuzzer

pytestmark = pytest.mark.sim
PLACES = {"secret": "/s", "marker": "/m", "url": "http://127.0.0.1:9", "sibling": "127.0.0.1:9"}
SERVICES = ("s3", "s3api", "lambda", "apigateway", "sqs", "iam", "route53", "ssm", "kms", "logs")


@pytest.fixture
def target(pool: MiniStackPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FiringRange]:
    target = FiringRange(pool, tmp_path_factory.mktemp("fuzzed"))
    yield target
    target.close()


@pytest.mark.nightly
def test_drawn_commands_breach_nothing(target: FiringRange) -> None:
    """Requests, worlds, switches, files, processes and connections are what the tracker tells,
    whatever is said."""
    tally = Fuzzer(target, seed=11, services=SERVICES).play(240)
    assert tally.breaches == []
    assert tally.reached > 60 and sum(tally.refused.values()) > 20, tally


def test_a_seed_draws_the_same_commands_over_the_whole_table() -> None:
    one, other = (CommandGrammar(5, PLACES) for _ in range(2))
    drawn = [one.draw() for _ in range(400)]
    assert drawn == [other.draw() for _ in range(400)]
    assert len({command.words[0] for command in drawn}) > 30
    assert any("\r\n" in word for command in drawn for word in command.words)


def test_a_request_that_nobody_recorded_is_seen(target: FiringRange) -> None:
    watch = Watch(target)
    target.slot.executor.run("aws s3api list-buckets")
    told = CommandResult(0, "", "", requests=(SentRequest("sqs", "ListQueues", {}, 200, ""),))
    # a REST request is known by its number alone
    assert list(watch.requests([told], Tally())) == []
    target.slot.executor.run("aws dynamodb list-tables")
    assert len(list(watch.requests([told], Tally()))) == 1
    assert list(watch.requests([CommandResult(0, "", "")], Tally())) == []


def test_a_changed_world_sibling_or_switch_is_seen(target: FiringRange) -> None:
    watch = Watch(target)
    assert list(watch.world()) == []
    target.slot.reset()
    assert any("was reset" in breach for breach in watch.world())
    watch.renew()
    with socket.create_connection(("127.0.0.1", target.sibling.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost:4566\r\n\r\n")
        connection.recv(100)
    assert any("sibling" in breach for breach in watch.world())
    watch.renew()
    target.slot.ministack.ask(
        "POST", "/_ministack/config", "s3", body=b'{"stepfunctions._SFN_WAIT_SCALE": 7}'
    )
    assert any("switches" in breach for breach in watch.world())


NUMBERED_SERVICES = ("kinesis", "ec2", "ecs", "elasticache", "cloudformation", "sqs", "events")


@pytest.mark.nightly
@pytest.mark.slow
def test_extremes_cost_no_slot(pool: MiniStackPool) -> None:
    """Whatever is asked for, the simulator stays within its memory, and the next lease plays."""
    fuzzer = ResourceFuzzer(pool)
    try:
        tally = fuzzer.play(itertools.islice(Cases(7, NUMBERED_SERVICES), 60))
    finally:
        fuzzer.close()
    assert tally.breaches == [] and tally.slots_lost == 0
    assert tally.reached > 30 and 0 < tally.largest_mb < SIMULATOR_MEMORY_MB, tally
    assert tally.refused["too-many"] > 0, tally.refused


def test_every_number_of_the_models_is_among_the_cases() -> None:
    counted = Cases(1, ("kinesis", "ec2", "elasticache"))
    assert {
        ("kinesis", ("ShardCount",)),
        ("ec2", ("MaxCount",)),
        ("elasticache", ("NumCacheNodes",)),
    } <= {(service, path) for service, _, path, _ in counted.members}
    drawn = [case.command for case in itertools.islice(counted, 200)]
    assert drawn == [
        case.command for case in itertools.islice(Cases(1, ("kinesis", "ec2", "elasticache")), 200)
    ]


def test_a_simulator_and_a_slot_that_are_lost_are_told_apart(
    pool: MiniStackPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuzzer = ResourceFuzzer(pool)
    slot = fuzzer._slot
    run = fuzzer._slot.executor._exchange

    def killed(*arguments: object) -> object:
        os.kill(slot.ministack.pid, signal.SIGKILL)
        return run(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(slot.executor, "_exchange", killed)
    fuzzer.play([Case("m", "aws s3 ls")])
    monkeypatch.undo()
    assert fuzzer.tally.simulators_lost == ["aws s3 ls"] and fuzzer.tally.slots_lost == 0
    assert fuzzer.tally.breaches == []
    monkeypatch.setattr(
        fuzzer, "_next_lease", lambda: (_ for _ in ()).throw(AssertionError("does not play"))
    )
    with pytest.raises(AssertionError):
        fuzzer.play([Case("m", "aws s3 ls")] * 30)
    monkeypatch.undo()
    assert (
        fuzzer.tally.slots_lost == 1
        and "a slot was lost (does not play)" in fuzzer.tally.breaches[0]
    )
