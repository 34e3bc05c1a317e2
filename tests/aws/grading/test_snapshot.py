"""The digest of an account's state: equal for equal accounts, whatever led to them; no simulator is
needed."""

from __future__ import annotations

from realhf.aws.grading.snapshot import Snapshot, state_digest
from tests.aws.grading.test_differences import account, drawn, group, topic

START = account()


def digest(*records: list, start: Snapshot = START) -> str:
    return state_digest(start, account(*records))


def test_an_account_that_is_as_it_was_has_the_digest_of_the_start() -> None:
    """Also where a resource was deleted and made anew in between: its number is another one
    then."""
    start = account(topic(serial=2))
    assert (
        digest()
        == state_digest(start, start)
        == digest(topic(serial=7), start=start)
        != digest(topic())
    )


def test_the_order_of_commands_says_nothing() -> None:
    """Of resources, of what was added to a list, and of the texts that the simulator drew
    meanwhile."""
    tags = [{"Key": "a", "Value": "1"}, {"Key": "b", "Value": "2"}]
    assert digest(topic(Tags=tags), topic("two")) == digest(topic("two"), topic(Tags=tags[::-1]))
    first = [
        vpc("aaaaaaaa", "10.0.0.0/16"),
        vpc("bbbbbbbb", "10.1.0.0/16"),
        group("cccccccc", drawn("bbbbbbbb")),
    ]
    second = [
        vpc("bbbbbbbb", "10.0.0.0/16"),
        vpc("aaaaaaaa", "10.1.0.0/16"),
        group("dddddddd", drawn("aaaaaaaa")),
    ]
    assert digest(*first) == digest(*second)


def test_another_account_has_another_digest() -> None:
    """A value, a name, a change that was undone by half, and which of two drawn texts something
    belongs to."""
    networks = [vpc("aaaaaaaa", "10.0.0.0/16"), vpc("bbbbbbbb", "10.1.0.0/16")]
    found = [
        digest(),
        digest(topic()),
        digest(topic("two")),
        digest(topic(display="News")),
        digest(topic(display="Old news")),
        digest(*networks),
        digest(*networks, group("cccccccc", drawn("aaaaaaaa"))),
        digest(*networks, group("cccccccc", drawn("bbbbbbbb"))),
        state_digest(account(topic()), account()),
    ]
    assert len({*found}) == len(found)


def vpc(token: str, block: str) -> list:
    return [
        "ec2",
        "vpcs",
        "us-east-1",
        drawn(token),
        1,
        {"VpcId": drawn(token), "CidrBlock": block},
    ]
