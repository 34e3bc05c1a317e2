"""Tasks of other makers, whose criteria are in the words of the CLI: solved as they are meant, or refused aloud."""

from __future__ import annotations

from typing import Any

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.grading.cli_criteria import from_cli_words, names_drawn_id
from realhf.aws.grading.grader import parse_criteria
from realhf.aws.grading.tracker import mentions
from realhf.aws.tasks import load_tasks
from realhf.aws.tasks.task import Task, TaskError

_TRUST = (
    '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":{"Service":"lambda.amazonaws.com"},'
    '"Action":"sts:AssumeRole"}]}'
)


def task(success: dict[str, Any], tier: str = "warmup", **rest: Any) -> Task:
    return Task.from_json({"task_id": 9, "difficulty": tier, "description": "...", "success_criteria": success, **rest})


def reward(episode: Episode, one: Task, *commands: str) -> tuple[float, bool]:
    episode.reset(one, chaos=False)
    steps = [episode.step(command) for command in commands]
    return sum(step.reward for step in steps), steps[-1].observation["task_achieved"]


SOLVED = [
    ({"command_contains": "s3", "operation": "ls"}, ["aws s3 ls"]),
    ({"command_contains": "s3", "operation": "ls"}, ["aws s3api list-buckets"]),
    ({"command_contains": "rds", "operation": "describe-db-instances"}, ["aws rds describe-db-instances"]),
    (
        {"operation": "create-policy", "resource_exists": {"service": "iam", "name": "read-only"}},
        [
            'aws iam create-policy --policy-name read-only --policy-document \'{"Version":"2012-10-17","Statement":'
            '[{"Effect":"Allow","Action":"s3:GetObject","Resource":"*"}]}\''
        ],
    ),
    (
        {
            "command_contains": "route53",
            "operation": "create-hosted-zone",
            "resource_exists": {"service": "route53", "name": "shop.internal"},
        },
        ["aws route53 create-hosted-zone --name shop.internal --caller-reference 1"],
    ),
    (
        {
            "command_contains": "apigateway",
            "operation": "create-rest-api",
            "resource_exists": {"service": "apigateway", "name": "shop"},
        },
        ["aws apigateway create-rest-api --name shop"],
    ),
    (
        {"steps": [{"operation": "create-table", "resource": "tab"}, {"operation": "put-item", "resource": "tab"}]},
        [
            "aws dynamodb create-table --table-name tab --billing-mode PAY_PER_REQUEST "
            "--attribute-definitions AttributeName=id,AttributeType=S --key-schema AttributeName=id,KeyType=HASH",
            'aws dynamodb put-item --table-name tab --item \'{"id":{"S":"1"}}\'',
        ],
    ),
    (
        {
            "services": ["sqs", "lambda"],
            "steps": [
                {"operation": "create-role"},
                {"operation": "create-queue", "resource": "jobs"},
                {"operation": "create-event-source-mapping"},
            ],
        },
        [
            f"aws iam create-role --role-name runner --assume-role-policy-document '{_TRUST}'",
            "aws sqs create-queue --queue-name jobs",
            "aws lambda create-function --function-name worker --runtime python3.12 --handler i.h "
            "--role arn:aws:iam::000000000000:role/runner --code S3Bucket=code,S3Key=code.zip",
            "aws lambda create-event-source-mapping --function-name worker "
            "--event-source-arn arn:aws:sqs:us-east-1:000000000000:jobs",
        ],
    ),
]


@pytest.mark.sim
@pytest.mark.parametrize(("success", "commands"), SOLVED)
def test_a_task_in_the_words_of_the_cli_is_solved_by_what_it_means(
    episode: Episode, success: dict[str, Any], commands: list[str]
) -> None:
    assert reward(episode, task(success), *commands) == (1.0, True)


@pytest.mark.sim
def test_state_checks_read_paths_from_the_root_and_compare_texts(episode: Episode) -> None:
    """A leading ``$.`` is the root, "120" is 120, and a check may ask for a value and for a text at once."""
    url = "http://localhost:4566/000000000000/jobs"
    look = f"aws sqs get-queue-attributes --queue-url {url} --attribute-names VisibilityTimeout"
    check = {"command": look, "json_path": "$.Attributes.VisibilityTimeout", "expected": 120, "output_contains": "120"}
    setup = ["aws sqs create-queue --queue-name jobs"]
    one = task({"services": ["sqs"], "state_checks": [check]}, "expert", setup_commands=setup)
    change = "aws sqs set-queue-attributes --queue-url {} --attributes VisibilityTimeout={}"
    assert reward(episode, one, change.format(url, 1200))[1] is False
    assert reward(episode, one, change.format(url, 120)) == (1.0, True)


@pytest.mark.sim
def test_an_id_that_aws_draws_and_nobody_made_is_refused_at_the_start(episode: Episode) -> None:
    """Such a check can never hold: the task would be accepted and could not be solved."""
    check = {"command": "aws cognito-idp describe-user-pool --user-pool-id us-east-1_chosen", "output_contains": "x"}
    setup = ["aws cognito-idp create-user-pool --pool-name chosen"]
    with pytest.raises(TaskError, match="id that AWS draws"):
        episode.reset(task({"state_checks": [check]}, "expert", setup_commands=setup), chaos=False)
    assert not names_drawn_id("aws iam get-role --role-name group-id")


@pytest.mark.parametrize(
    ("success", "reason"),
    [
        ({"command_contains": "emr", "operation": "list-clusters"}, "service 'emr' is not available"),
        ({"steps": [{"operation": "put-integration"}], "services": ["apigateway"]}, "'put-integration' of apigateway"),
        ({"steps": [{"operation": "put-record"}], "services": ["firehose", "s3"]}, "'put-record' of firehose, s3"),
        ({"steps": [{"operation": "fly"}]}, "operation 'fly' is not available"),
        ({"operation": "create-table", "command_contains": "me a table"}, "several services"),
        (
            {"operation": "create-volume", "resource_exists": {"service": "ebs", "name": "v"}},
            "cannot be checked by a name",
        ),
    ],
)
def test_what_cannot_be_graded_here_is_refused_with_the_reason(success: dict[str, Any], reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        parse_criteria(success)


def test_a_word_of_several_services_counts_in_each_unless_the_task_says_which() -> None:
    steps = [{"operation": "create-table", "resource": "t"}]
    (either,) = parse_criteria({"steps": steps}).steps
    assert {either.operation, *either.also} == {"dynamodb:CreateTable", "glue:CreateTable"}
    (one,) = parse_criteria({"steps": steps, "services": ["glue"]}).steps
    assert (one.operation, one.also) == ("glue:CreateTable", frozenset())


def test_a_name_counts_wherever_it_stands_as_a_word_of_its_own() -> None:
    """Layer 7 holds for other makers' tasks too: a longer name is another resource."""
    assert mentions({"RouteKey": "GET /shop"}, "shop")
    assert mentions({"Targets": [{"Arn": "arn:aws:sqs:us-east-1:000000000000:shop"}]}, "shop")
    assert not mentions({"TableName": "shop-2", "Tags": [{"Key": "my-shop"}]}, "shop")


def test_criteria_in_our_own_words_are_left_as_they_are() -> None:
    for one in load_tasks():
        assert from_cli_words(one.success) is one.success
