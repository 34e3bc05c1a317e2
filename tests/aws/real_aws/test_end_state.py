"""Tasks that are graded by end state on a real account, which a simulator stands for: it is reached
as AWS would be, and read by the permitted list and describe calls alone. (The commands are those of
a warm worker, which takes a hundredth of the time; ``test_account`` plays such a task through the
real one.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import botocore.session
import pytest

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.executor import OutputLimits
from realhf.aws.cli.state_client import StateCallError
from realhf.aws.episode.episode import Episode
from realhf.aws.grading.snapshot import SnapshotError
from realhf.aws.real_aws.account import RealAwsPool, RealState
from realhf.aws.real_aws.permissions import DEFAULT_READS, is_default_read
from realhf.aws.real_aws.walked_account import AccountReader
from realhf.aws.simulator.pool import ACCOUNT, MiniStackPool, Slot
from realhf.aws.tasks.captures import resolve
from realhf.aws.tasks.loader import instantiate
from realhf.aws.tasks.task import TaskError

pytestmark = [pytest.mark.sim, pytest.mark.slow]
SERVICES = ("ec2", "iam", "s3", "s3api", "sns", "sqs")
QUEUE = "http://localhost:4566/000000000000/of-others"
POLICY = '{"Version":"2012-10-17","Statement":{"Effect":"Allow","Principal":"*","Action":"s3:*","Resource":"*"}}'


@pytest.fixture(scope="module")
def cloud() -> Iterator[Slot]:
    """The simulator that stands for AWS."""
    pool = MiniStackPool(1)
    pool.start()
    yield pool.slots[0]
    pool.stop()


@pytest.fixture(scope="module")
def pool(cloud: Slot, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealAwsPool]:
    """A pool on that account, in which agents may write to some services."""
    allow = tmp_path_factory.mktemp("real") / "allow.txt"
    lines = [
        f"{service} {name}\n"
        for service in SERVICES
        for name in ALLOWED[service] - DEFAULT_READS[service]
    ]
    allow.write_text("".join(lines))
    with pytest.MonkeyPatch.context() as settings:
        settings.setenv("AWS_ENDPOINT_URL", cloud.endpoint)
        settings.setenv("AWS_ACCESS_KEY_ID", ACCOUNT)
        settings.setenv("AWS_SECRET_ACCESS_KEY", "none")
        limits = OutputLimits(timeout_s=60.0)
        endpoints = {"AWS_ENDPOINT_URL": cloud.endpoint}
        real = RealAwsPool(ACCOUNT, str(allow), limits, MiniStackPool(1), endpoints)
        real.start()
        yield real
        real.stop()


@pytest.fixture
def episode(cloud: Slot, pool: RealAwsPool) -> Iterator[Episode]:
    """An episode in an account that holds things of other people."""
    cloud.reset(7)
    for service, operation, params in (
        ("s3", "CreateBucket", {"Bucket": "of-others"}),
        (
            "s3",
            "PutBucketVersioning",
            {"Bucket": "of-others", "VersioningConfiguration": {"Status": "Enabled"}},
        ),
        ("sqs", "CreateQueue", {"QueueName": "of-others"}),
        ("iam", "CreateUser", {"UserName": "of-others"}),
        ("ec2", "CreateVpc", {"CidrBlock": "10.7.0.0/16"}),
    ):
        cloud.state.call(service, operation, params)
    slot = pool.acquire()
    slot.executor = cloud.executor
    yield Episode(slot, 64)
    pool.release(slot)


def later(*cases: Any) -> Iterator[Any]:
    """Cases that `make test` leaves to `make test-all`."""
    return (
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly)
        for case in cases
    )


def played(
    episode: Episode, task_id: int, first: str = "", old: str = "", new: str | None = ""
) -> dict:
    """Play ``first`` and then a solution with a text in it replaced, or for None without the
    command that has it; returns the last observation, with the sum of the rewards."""
    task = instantiate(task_id, 1)
    assert old in " ".join(task.solution)
    episode.reset(task)
    lines = [line for line in task.solution if new is not None or old not in line]
    lines = [line.replace(old, new) if old and new is not None else line for line in lines]
    first = first.replace("NAME", str(task.params.get("name")))
    outputs: list[str] = []
    total = 0.0
    for line in lines:
        if first and line is lines[-1]:
            step = episode.step(first)
            total += step.reward
            assert step.observation["command_success"], step.observation["error"]
        step = episode.step(resolve(line, outputs))
        assert step.observation["command_success"], step.observation["error"]
        outputs.append(step.observation["command_output"])
        total += step.reward
    return step.observation | {"reward": total}


@pytest.mark.nightly
@pytest.mark.parametrize("task_id", [101, 203, 309, *later(103, 105, 207, 216, 306)])
def test_the_solution_is_paid_in_an_account_of_others(episode: Episode, task_id: int) -> None:
    """Beginner, intermediate and advanced; generated ids, times and what others have make no
    difference."""
    last = played(episode, task_id)
    assert (last["task_achieved"], last["partial_progress"], last["reward"] > 0.9) == (
        True,
        1.0,
        True,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("task_id", "old", "new"),
    [
        (101, "--bucket ", "--bucket another-"),
        (103, "VisibilityTimeout=", "DelaySeconds=9,VisibilityTimeout="),
        (207, "add-user-to-group", None),
        (309, "s3:ObjectCreated", "s3:ObjectRemoved"),
        *later(
            (103, "VisibilityTimeout=", "VisibilityTimeout=1"),
            (105, "create-user", "create-user --path /other/"),
            (203, "--protocol", "--attributes RawMessageDelivery=true --protocol"),
            (216, "authorize-security-group-ingress", None),
            (216, "--cidr 10.", "--cidr 11."),
            (306, "subscribe", None),
            (309, "s3.amazonaws.com", "ec2.amazonaws.com"),
            (309, "BlockPublicPolicy=true", "BlockPublicPolicy=false"),
        ),
    ],
)
def test_another_state_is_not_paid(
    episode: Episode, task_id: int, old: str, new: str | None
) -> None:
    """Other names, values, settings that nobody asked for, and parts left out."""
    last = played(episode, task_id, "", old, new)
    assert not last["task_achieved"] and last["partial_progress"] < 1.0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("task_id", "harmful"),
    [
        (
            101,
            "aws s3api put-bucket-versioning --bucket of-others --versioning-configuration "
            "Status=Suspended",
        ),
        (105, "aws iam delete-user --user-name of-others"),
        (201, f"aws s3api put-bucket-policy --bucket NAME --policy '{POLICY}'"),
        *later(
            (103, f"aws sqs set-queue-attributes --queue-url {QUEUE} --attributes DelaySeconds=5"),
            (203, f"aws s3api put-bucket-policy --bucket of-others --policy '{POLICY}'"),
            (
                207,
                "aws iam attach-user-policy --user-name NAME --policy-arn "
                "arn:aws:iam::aws:policy/AdministratorAccess",
            ),
            (309, "aws s3api delete-bucket --bucket of-others"),
        ),
    ],
)
def test_damage_is_never_achieved(episode: Episode, task_id: int, harmful: str) -> None:
    """Also where it is done to what the task knows nothing of, and in another service."""
    last = played(episode, task_id, harmful)
    assert not last["task_achieved"] and last["reward"] < 0.9


@pytest.mark.parametrize(
    ("task_id", "what"), [(108, "Value of ssm:PutParameter"), (213, "what events:PutTargets does")]
)
def test_a_task_whose_state_no_permitted_read_shows_is_refused(
    episode: Episode, task_id: int, what: str
) -> None:
    with pytest.raises(TaskError, match=f"none shows {what}"):
        episode.reset(instantiate(task_id, 1))


def reader(**answers: Any) -> AccountReader:
    """An account of the number 123456789012 that answers so."""

    def call(service: str, operation: str, params: dict) -> dict:
        found = answers.get(operation, "NoSuchThing")
        if isinstance(found, str):
            raise StateCallError(found, "")
        return found

    return AccountReader(call, is_default_read, frozenset({"sqs"}), "123456789012", [])


def test_what_names_an_account_makes_no_difference() -> None:
    url = "https://sqs.us-east-1.amazonaws.com/123456789012/q"
    arn = "arn:aws:sqs:us-east-1:123456789012:q"
    found = reader(
        ListQueues={"QueueUrls": [url]}, GetQueueAttributes={"Attributes": {"QueueArn": arn}}
    ).read()
    kinds = {key[1]: key[2] for key in found.resources}
    assert kinds["ListQueues/QueueUrls"] == "queue/000000000000/q"
    assert {
        "Attributes": {"QueueArn": "arn:aws:sqs:us-east-1:000000000000:q"}
    } in found.resources.values()


def test_what_is_hidden_later_is_unreadable_and_a_busy_account_is_nobodys_fault() -> None:
    answers = {
        "ListQueues": {"QueueUrls": ["https://h/123456789012/q"]},
        "GetQueueAttributes": {"Attributes": {}},
    }
    account = reader(**answers)
    account.read()
    account._call = reader(**{**answers, "GetQueueAttributes": "AccessDenied"})._call
    with pytest.raises(SnapshotError, match=r"GetQueueAttributes .* returned AccessDenied"):
        account.read()
    with pytest.raises(ConnectionError, match="ThrottlingException") as busy:
        reader(ListQueues="ThrottlingException").read()
    assert not isinstance(busy.value, SnapshotError)


@pytest.mark.usefixtures("pool")
def test_an_answer_in_pages_is_read_whole(cloud: Slot) -> None:
    cloud.reset(7)
    for number in range(3):
        cloud.state.call("iam", "CreateUser", {"UserName": f"u{number}"})
    state = RealState(botocore.session.Session())
    users = state.call("iam", "ListUsers", {"MaxItems": 1})["Users"]
    assert [user["UserName"] for user in users] == ["u0", "u1", "u2"]
