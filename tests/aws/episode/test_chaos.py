"""Chaos on a real simulator: what it does is seen in the state, at most once, silently, and
repairing it pays."""

import random

import pytest

from realhf.aws.cli.executor import CommandResult, SentRequest
from realhf.aws.cli.state_client import StateCallError
from realhf.aws.episode.chaos import PERTURBATIONS, PROBABILITY, Chaos, chaos_rng
from realhf.aws.episode.episode import Episode
from realhf.aws.episode.world import SlotState
from realhf.aws.grading.criteria import parse_criteria
from realhf.aws.grading.grader import Grader
from realhf.aws.grading.tracker import Tracker
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.loader import instantiate
from realhf.aws.tasks.task import Task

TOPIC_AND_QUEUE = 203
VERSIONED = 201


def seed_with_chaos(task: Task, first_roll: bool) -> int:
    """A seed whose first roll hits, or does not."""
    chance = PROBABILITY[task.tier]
    return next(
        seed
        for seed in range(1000)
        if (chaos_rng(task.task_id, seed).random() < chance) is first_roll
    )


def test_probabilities_by_tier() -> None:
    assert list(PROBABILITY.values()) == [0.0, 0.0, 0.1, 0.2, 0.3]


class CountingRandom(random.Random):
    """Counts its rolls and always hits."""

    rolls = 0

    def random(self) -> float:
        self.rolls += 1
        return 0.0


class FakeAccount:
    """Holds one bucket; says what was asked."""

    def __init__(self) -> None:
        self.there = True
        self.asked: list[str] = []

    def call(self, service: str, operation: str, params: dict) -> dict:
        self.asked.append(operation)
        if operation == "DeleteBucket":
            self.there = False
        elif operation == "HeadBucket" and not self.there:
            raise StateCallError("404", "absent")
        return {"Buckets": [{"Name": "a"}] if self.there else []}

    def run(self, command: str) -> CommandResult:
        raise AssertionError(command)


def made_bucket() -> Tracker:
    tracker = Tracker()
    request = SentRequest("s3", "CreateBucket", {"Bucket": "a"}, 200, "")
    tracker.record("aws s3 mb s3://a", CommandResult(0, "", "", requests=(request,)))
    return tracker


CRITERIA = {"operation": "s3:CreateBucket", "resource_exists": {"service": "s3", "name": "a"}}


def test_it_happens_once_and_counts_what_it_broke() -> None:
    account = FakeAccount()
    rng = CountingRandom()
    tracker = made_bucket()
    chaos = Chaos(1.0, rng, Grader(parse_criteria(CRITERIA), account), account)
    assert chaos.after_progress(tracker) == "s3"
    assert chaos.occurred and len(chaos.broken) == 1 and not chaos.survived()
    rolls = rng.rolls
    assert chaos.after_progress(tracker) == "" and rng.rolls == rolls
    account.there = True
    assert chaos.survived()
    deleted = SentRequest("s3", "DeleteBucket", {"Bucket": "a"}, 200, "")
    tracker.record("aws s3 rb s3://a", CommandResult(0, "", "", requests=(deleted,)))
    assert tracker.rollbacks == 0, "chaos touched it"


def test_without_an_effect_it_did_not_occur() -> None:
    account = FakeAccount()
    account.there = False
    chaos = Chaos(1.0, CountingRandom(), Grader(parse_criteria(CRITERIA), account), account)
    assert chaos.after_progress(made_bucket()) == ""
    assert not chaos.occurred and not chaos.survived()


def test_only_the_services_of_the_task_are_disturbed() -> None:
    account = FakeAccount()
    other = parse_criteria({"steps": [{"operation": "sns:CreateTopic"}]})
    assert (
        Chaos(1.0, CountingRandom(), Grader(other, account), account).after_progress(made_bucket())
        == ""
    )
    assert account.asked == []


@pytest.mark.sim
def test_it_is_silent_and_admitted_at_the_end(slot: Slot) -> None:
    task = instantiate(TOPIC_AND_QUEUE, 1)
    episode = Episode(slot, chaos=True)
    episode.reset(task, seed_with_chaos(task, True))
    first = episode.step(task.solution[0])
    assert first.observation["command_success"] and "haos" not in str(first.observation)
    assert episode._chaos is not None and not episode._chaos.occurred, (
        "nothing can be done to a topic alone"
    )
    episode._chaos.rng = CountingRandom()
    episode.step(task.solution[1])
    assert episode._chaos.occurred and not episode.state()["chaos_occurred"]
    while not episode.done:
        episode.step("aws sqs list-queues")
    assert episode.state()["chaos_occurred"]


@pytest.mark.sim
def test_it_deletes_a_bucket_that_was_just_made(slot: Slot) -> None:
    task = instantiate(VERSIONED, 1)
    create, enable = task.solution
    episode = Episode(slot, chaos=True)
    episode.reset(task, seed_with_chaos(task, True))
    total = episode.step(create).reward
    missing = episode.step(enable)
    assert "NoSuchBucket" in missing.observation["error"]
    total += missing.reward + episode.step(create).reward + episode.step(enable).reward
    assert total == pytest.approx(1.05, abs=1e-8) and episode.state()["chaos_occurred"]


@pytest.mark.sim
def test_idle_steps_are_not_rolled(slot: Slot) -> None:
    task = instantiate(VERSIONED, 1)
    episode = Episode(slot, chaos=True)
    episode.reset(task, seed_with_chaos(task, False))
    assert episode._chaos is not None
    episode._chaos.rng = rng = CountingRandom()
    for command in (
        "aws s3api list-buckets",
        "aws help --task-hint",
        "aws sns create-topic --name x",
        "aws nothing",
    ):
        episode.step(command)
    assert rng.rolls == 0
    episode.step(task.solution[0])
    assert rng.rolls > 0


BUCKET = {"Bucket": "abc"}
TABLE = {"TableName": "abc"}
FUNCTION = {"FunctionName": "a"}
QUEUE = {"QueueName": "a"}
ROLE = {"RoleName": "a", "AssumeRolePolicyDocument": '{"Version": "2012-10-17", "Statement": []}'}
ARN = "arn:aws:iam::aws:policy/ReadOnlyAccess"
MAKE_TABLE = {
    **TABLE,
    "KeySchema": [{"AttributeName": "id", "KeyType": "HASH"}],
    "BillingMode": "PAY_PER_REQUEST",
    "AttributeDefinitions": [{"AttributeName": "id", "AttributeType": "S"}],
}
MAKE_FUNCTION = {
    **FUNCTION,
    "Runtime": "python3.12",
    "Role": "arn:aws:iam::000000000000:role/a",
    "Handler": "a.b",
    "Code": {"ZipFile": "PK\x05\x06" + "\0" * 18},
}
QUEUE_URL = "http://localhost/000000000000/a"
TOPIC_ARN = "arn:aws:sns:us-east-1:000000000000:a"
WORLDS: dict[str, list[tuple[str, dict]]] = {
    "s3:CreateBucket": [("s3:CreateBucket", BUCKET)],
    "s3:PutBucketPolicy": [
        ("s3:CreateBucket", BUCKET),
        ("s3:PutBucketPolicy", {**BUCKET, "Policy": '{"a": 1}'}),
    ],
    "s3:PutBucketVersioning": [
        ("s3:CreateBucket", BUCKET),
        ("s3:PutBucketVersioning", {**BUCKET, "VersioningConfiguration": {"Status": "Enabled"}}),
    ],
    "dynamodb:CreateTable": [("dynamodb:CreateTable", MAKE_TABLE)],
    "lambda:CreateFunction": [("lambda:CreateFunction", MAKE_FUNCTION)],
    "lambda:UpdateFunctionConfiguration": [
        ("lambda:CreateFunction", MAKE_FUNCTION),
        ("lambda:UpdateFunctionConfiguration", {**FUNCTION, "Timeout": 30}),
    ],
    "sqs:CreateQueue": [("sqs:CreateQueue", QUEUE)],
    "sqs:SetQueueAttributes": [
        ("sqs:CreateQueue", QUEUE),
        ("sqs:SetQueueAttributes", {"QueueUrl": QUEUE_URL, "Attributes": {"DelaySeconds": "1"}}),
    ],
    "sns:Subscribe": [
        ("sns:CreateTopic", {"Name": "a"}),
        (
            "sns:Subscribe",
            {"TopicArn": TOPIC_ARN, "Protocol": "sqs", "Endpoint": "arn:aws:sqs:us-east-1:0:a"},
        ),
    ],
    "iam:AttachRolePolicy": [
        ("iam:CreateRole", ROLE),
        ("iam:AttachRolePolicy", {"RoleName": "a", "PolicyArn": ARN}),
    ],
    "iam:AttachUserPolicy": [
        ("iam:CreateUser", {"UserName": "a"}),
        ("iam:AttachUserPolicy", {"UserName": "a", "PolicyArn": ARN}),
    ],
}


@pytest.mark.sim
@pytest.mark.parametrize("operation", list(PERTURBATIONS))
def test_every_perturbation_has_an_effect(slot: Slot, operation: str) -> None:
    for perturbation in PERTURBATIONS[operation]:
        slot.reset(1)
        tracker = Tracker()
        for canonical, params in WORLDS[operation]:
            service, _, name = canonical.partition(":")
            slot.state.call(service, name, params)
            request = SentRequest(service, name, params, 200, "")
            tracker.record("aws", CommandResult(0, "", "", requests=(request,)))
        criteria = parse_criteria({"steps": [{"operation": operation}]})
        chaos = Chaos(1.0, CountingRandom(), Grader(criteria, SlotState(slot)), SlotState(slot))
        assert chaos._disturb(tracker.evidence[-1], perturbation), perturbation
