"""The walk over list and describe calls: what it reads without a table, and what it takes for the
same account."""

from typing import Any

import pytest

from realhf.aws.cli.state_client import StateCallError
from realhf.aws.episode.episode import Episode
from realhf.aws.real_aws.describe_walker import walk
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.loader import instantiate
from tests.aws.validation.command_line import renumbered
from tests.aws.validation.describe_answers import disagreements, told
from tests.aws.validation.play import run_commands

NOTHING: frozenset[Any] = frozenset()
POLICY = '{"Version":"2012-10-17","Statement":{"Effect":"Allow","Action":"s3:*","Resource":"*"}}'


@pytest.mark.sim
def test_arguments_of_calls_come_out_of_the_answers_of_others(slot: Slot) -> None:
    slot.reset(1)
    for service, operation, params in (
        ("iam", "CreateUser", {"UserName": "ann"}),
        ("iam", "PutUserPolicy", {"UserName": "ann", "PolicyName": "p", "PolicyDocument": POLICY}),
        ("s3", "CreateBucket", {"Bucket": "box"}),
        ("s3", "PutObject", {"Bucket": "box", "Key": "a/b", "Body": b"text"}),
        ("sqs", "CreateQueue", {"QueueName": "q", "Attributes": {"DelaySeconds": "7"}}),
    ):
        slot.state.call(service, operation, params)
    answers = walk(slot.state.call, ["iam", "s3", "sqs"])
    policy = answers['iam:GetUserPolicy {"PolicyName": "p", "UserName": "ann"}']
    assert policy["PolicyDocument"]["Statement"]["Action"] == "s3:*"
    assert answers['s3:GetObject {"Bucket": "box", "Key": "a/b"}']["Body"].startswith("sha256:")
    assert answers['s3:GetBucketPolicy {"Bucket": "box"}'] == {"error": "NoSuchBucketPolicy"}
    attributes = next(
        answer for call, answer in answers.items() if call.startswith("sqs:GetQueueAttributes")
    )
    assert attributes["Attributes"]["DelaySeconds"] == "7"


@pytest.mark.sim
def test_two_accounts_that_differ_in_ids_and_times_alone_say_the_same(slot: Slot) -> None:
    task = instantiate(311, 0)
    episode = Episode(slot, 64)
    run_commands(episode, task, task.solution)
    target = told(walk(slot.state.call, ["ec2", "rds"]))
    later = ["aws ec2 create-volume --size 1 --availability-zone us-east-1a", *task.solution]
    run_commands(
        episode,
        task,
        [renumbered(line, {number: number + 1 for number in range(7)}) for line in later],
    )
    assert not disagreements(NOTHING, target, told(walk(slot.state.call, ["ec2", "rds"]))), (
        "other ids, and a volume of one's own"
    )
    run_commands(episode, task, task.solution[:-1])
    lacking = disagreements(NOTHING, target, told(walk(slot.state.call, ["ec2", "rds"])))
    assert any(
        line.startswith("- ec2:DescribeSecurityGroups") and "5432" in line for line in lacking
    )


def answering(answers: dict[str, Any]) -> Any:
    def call(service: str, operation: str, params: dict[str, Any]) -> Any:
        found = answers.get(f"{operation} {params}" if params else operation)
        if found is None:
            raise StateCallError("NotFound", "")
        return found

    return call


def said(**answers: Any) -> Any:
    return told(walk(answering(answers), ["ec2"]))


def group(identity: str, port: int, **more: Any) -> dict[str, Any]:
    return {"GroupId": identity, "GroupName": "web", "IpPermissions": [{"FromPort": port}], **more}


def test_an_id_stands_for_what_is_said_of_its_owner() -> None:
    def vpcs(one: str, other: str, of_group: str) -> Any:
        return said(
            DescribeVpcs={
                "Vpcs": [
                    {"VpcId": one, "CidrBlock": "10.0.0.0/16"},
                    {"VpcId": other, "IsDefault": True},
                ]
            },
            DescribeSecurityGroups={
                "SecurityGroups": [group("sg-ccccddddeeeeffff0", 443, VpcId=of_group)]
            },
        )

    first = "vpc-0123456789abcdef0"
    second = "vpc-aaaabbbbccccdddd0"
    assert vpcs(first, second, first) == vpcs(second, first, second), "other ids, the same account"
    assert disagreements(NOTHING, vpcs(first, second, first), vpcs(first, second, second)), (
        "a namesake in another network"
    )


def test_own_resources_and_tags_are_no_disagreement_and_more_rules_are() -> None:
    def groups(*found: Any) -> Any:
        return said(DescribeSecurityGroups={"SecurityGroups": list(found)})

    target = groups(group("sg-0123456789abcdef0", 443))
    own = {**group("sg-aaaabbbbccccdddd0", 22), "GroupName": "own"}
    assert not disagreements(
        NOTHING, target, groups(group("sg-0123456789abcdef0", 443, Tags=[{"Key": "a"}]), own)
    )
    more = group("sg-0123456789abcdef0", 443)
    more["IpPermissions"].append({"FromPort": 22})
    (line,) = disagreements(NOTHING, target, groups(more))
    assert line.startswith("+ ec2:DescribeSecurityGroups") and line.endswith("FromPort = 22")
    assert disagreements(NOTHING, target, groups(own)), "the group is gone"
    assert disagreements(groups(own), target, groups(group("sg-0123456789abcdef0", 443), own)), (
        "one that was to go"
    )


def test_a_part_of_a_known_thing_counts_though_nothing_like_it_was_there() -> None:
    def filters(*found: Any) -> Any:
        answers = {"DescribeLogGroups": {"logGroups": [{"logGroupName": "app"}]}}
        answers["DescribeSubscriptionFilters {'logGroupName': 'app'}"] = {
            "subscriptionFilters": list(found)
        }
        return told(walk(answering(answers), ["logs"]))

    lines = disagreements(
        NOTHING, filters(), filters({"filterName": "f", "destinationArn": "arn:aws:sqs:::q"})
    )
    assert any("destinationArn" in line for line in lines)
    assert not disagreements(NOTHING, filters(), filters())
