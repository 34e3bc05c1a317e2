"""The inventory: what it lists, what it leaves out, and that it asks only where something
changed."""

import pytest

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.policy import operation_allowed
from realhf.aws.cli.state_client import StateCallError
from realhf.aws.episode.episode import Episode
from realhf.aws.grading.inventory import LISTINGS, Inventory, list_names
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.loader import instantiate, load_templates


class FakeAccount:
    """Two topics, and no other service that answers."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, service: str, operation: str, params: dict) -> dict:
        self.calls.append(operation)
        if operation != "ListTopics":
            raise StateCallError("NotImplemented", "")
        return {
            "Topics": [
                {"TopicArn": "arn:aws:sns:us-east-1:000000000000:b"},
                {"TopicArn": "arn:a:sns:r:0:a"},
            ]
        }


def test_it_is_kept_until_something_changed() -> None:
    account = FakeAccount()
    inventory = Inventory(account, ["sns", "sts"])
    assert inventory.read() == inventory.read() == {"sns": {"topic": ["a", "b"]}}
    assert account.calls.count("ListTopics") == 1
    inventory.touch("sns", changed=False)
    inventory.read()
    assert account.calls.count("ListTopics") == 1
    inventory.touch("sns", changed=True)
    inventory.read()
    assert account.calls.count("ListTopics") == 2


class PagedAccount:
    """Three parameters on three pages."""

    def call(self, service: str, operation: str, params: dict) -> dict:
        page = int(params.get("NextToken", "0"))
        return {
            "Parameters": [{"Name": f"p{page}"}],
            **({"NextToken": str(page + 1)} if page < 2 else {}),
        }


def test_every_page_of_a_list_is_read_as_far_as_needed() -> None:
    assert list_names(PagedAccount(), "ssm", "parameter") == {"p0", "p1", "p2"}
    assert list_names(PagedAccount(), "ssm", "parameter", limit=2) == {"p0", "p1"}


def test_only_services_that_were_touched_or_named_are_listed() -> None:
    account = FakeAccount()
    inventory = Inventory(account)
    assert inventory.read() == {} and account.calls == []
    inventory.touch("sqs", changed=True)
    assert inventory.read() == {} and account.calls == ["ListQueues"]


def test_lists_are_reads_of_known_services() -> None:
    for service, listings in LISTINGS.items():
        assert [kind for kind, *_ in listings] == sorted(kind for kind, *_ in listings)
        assert service in ALLOWED or service == "s3"
        for _, operation, _, _ in listings:
            assert operation.startswith(("List", "Describe", "Get"))
    used = {
        check["service"]
        for t in load_templates()
        for check in t.setup_commands
        if isinstance(check, dict) and "service" in check
    }
    assert used - {"sts"} <= LISTINGS.keys(), "every service of the tasks can be listed"
    assert operation_allowed("s3", "ListBuckets")


@pytest.mark.nightly
@pytest.mark.sim
@pytest.mark.parametrize("service", list(LISTINGS))
def test_the_simulator_answers_every_list(slot: Slot, service: str) -> None:
    for _, operation, params, _ in LISTINGS[service]:
        slot.state.call(service, operation, dict(params))


@pytest.mark.sim
def test_state_shows_what_is_there(slot: Slot) -> None:
    episode = Episode(slot)
    task = instantiate(203, 1)
    name = task.params["name"]
    episode.reset(task)
    assert episode.state()["infra_state"] == {}
    episode.step(task.solution[0])
    assert episode.state()["infra_state"] == {"sns": {"topic": [name]}}
    episode.step("aws iam create-user --user-name someone")
    episode.step(task.solution[1])
    state = episode.state()["infra_state"]
    assert state["iam"]["user"] == ["someone"] and state["sqs"] == {"queue": [name]}
    episode.step(f"aws sns delete-topic --topic-arn arn:aws:sns:us-east-1:000000000000:{name}")
    assert "sns" not in episode.state()["infra_state"]
