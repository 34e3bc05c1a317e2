"""The adversary that is no list, for a few hundred commands (`make red-team` plays many thousand), and its own eyes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from realhf.aws.cli.executor import CommandResult, SentRequest
from realhf.aws.simulator.pool import MiniStackPool
from tests.aws.red_team.command_fuzzer import Fuzzer, Tally, Watch
from tests.aws.red_team.command_grammar import CommandGrammar
from tests.aws.red_team.firing_range import FiringRange

pytestmark = pytest.mark.sim
PLACES = {"secret": "/s", "marker": "/m", "url": "http://127.0.0.1:9", "sibling": "127.0.0.1:9"}
SERVICES = ("s3", "s3api", "lambda", "apigateway", "sqs", "iam", "route53", "ssm", "kms", "logs")


@pytest.fixture
def target(pool: MiniStackPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FiringRange]:
    target = FiringRange(pool, tmp_path_factory.mktemp("fuzzed"))
    yield target
    target.close()


def test_drawn_commands_breach_nothing(target: FiringRange) -> None:
    """Requests, worlds, switches, files, processes and connections are what the tracker tells, whatever is said."""
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
    assert list(watch.requests([told], Tally())) == []  # a REST request is known by its number alone
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
    target.slot.ministack.ask("POST", "/_ministack/config", "s3", body=b'{"stepfunctions._SFN_WAIT_SCALE": 7}')
    assert any("switches" in breach for breach in watch.world())
