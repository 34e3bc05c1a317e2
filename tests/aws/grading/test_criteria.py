"""Success criteria: of tasks of other makers, in the words of the CLI, solved as they are meant, or refused aloud."""

from __future__ import annotations

from typing import Any

import pytest

from realhf.aws.cli.executor import CommandResult
from realhf.aws.episode.episode import Episode
from realhf.aws.grading.criteria import CommandCheck, parse_criteria
from realhf.aws.grading.tracker import mentions
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
    assert not CommandCheck("aws iam get-role --role-name group-id").asks_for_drawn_id()


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


@pytest.mark.parametrize(
    ("operation", "service", "kind"),
    [
        ("create-cache-cluster", "elasticache", "cluster"),
        ("create-crawler", "glue", "crawler"),
        ("create-instance-profile", "iam", "instance-profile"),
        ("put-object", "s3", "bucket"),
        ("iam:CreatePolicy", "iam", "policy"),
    ],
)
def test_an_operation_says_of_which_kind_the_resource_is(operation: str, service: str, kind: str) -> None:
    parsed = parse_criteria({"operation": operation, "resource_exists": {"service": service, "name": "n"}})
    assert parsed.resource is not None and (parsed.resource.kind, parsed.resource.name) == (kind, "n")


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


@pytest.mark.sim
def test_a_resource_is_looked_for_by_its_exact_name_on_every_page(episode: Episode) -> None:
    """The thing that is wanted may stand on a later page of a list, among longer names."""
    exists = {"operation": "put-parameter", "resource_exists": {"service": "ssm", "name": "x"}}
    setup = [f"aws ssm put-parameter --name {name} --value v --type String" for name in ("x-2", "ax")]
    one = task(exists, "beginner", setup_commands=setup)
    assert reward(episode, one, "aws ssm put-parameter --name x2 --value v --type String") == (0.0, False)
    assert reward(episode, one, "aws ssm put-parameter --name x --value v --type String") == (1.0, True)


BUCKET = {"service": "s3", "name": "a"}
LOOK = "aws sqs list-queues"


@pytest.mark.parametrize(
    ("criteria", "said"),
    [
        ({}, "names no operation"),
        ({"operation": "", "steps": []}, "names no operation"),
        ({"services": ["s3"]}, "names no operation"),
        ({"operation": ["s3:CreateBucket"]}, "operation is not of type str"),
        ({"operation": "s3:CreateBucket", "services": "s3"}, "services is not of type list"),
        ({"resource_exists": {"service": "s3"}}, "needs a service and a name"),
        ({"resource_exists": {"service": "moon", "name": "a"}}, "'moon' is not available"),
        ({"resource_exists": {**BUCKET, "name": 1}}, "needs a service and a name"),
        ({"resource_exists": {**BUCKET, "attributes": {"Versioning": 1}}}, "unknown key 'attributes'.*end state"),
        ({"steps": [{"resource": "a"}]}, "operation and resource of a step"),
        ({"steps": ["s3:CreateBucket"]}, "no object"),
        ({"steps": [{"operation": 5}]}, "operation and resource of a step"),
        ({"steps": [{"operation": "s3:CreateBucket", "verify": BUCKET}]}, "unknown key 'verify'.*end state"),
        ({"steps": {"operation": "s3:CreateBucket"}}, "steps is not of type list"),
        ({"state_checks": [{"command": 1}]}, "command is not of type str"),
        ({"state_checks": ["s3"]}, "has no command"),
        ({"state_checks": [{"call": {"service": "s3", "operation": "HeadBucket"}}]}, "has no command"),
        ({"state_checks": [{"command": LOOK, "json_path": "]["}]}, "json_path"),
        ({"state_checks": [{"command": LOOK, "absent": True}]}, "unknown key 'absent'.*end state"),
        ({"state_checks": [{"command": LOOK}], "protected": [BUCKET]}, "unknown key 'protected'.*end state"),
        ({"state_checks": [{"command": LOOK}] * 41}, "more than 40"),
    ],
)
def test_what_is_wrong_or_belongs_to_the_end_state_is_named(criteria: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        parse_criteria(criteria)


@pytest.mark.parametrize(
    "command",
    [
        "aws s3api delete-bucket --bucket b",
        "aws s3api --query get-x delete-bucket --bucket b",
        "aws --region us-east-1 s3api delete-bucket --bucket b",
        "aws s3 rm s3://b/k",
        "aws s3api help",
        "aws configure list",
        "rm x",
    ],
)
def test_the_command_of_a_check_may_only_look(command: str) -> None:
    with pytest.raises(TaskError, match="may only look"):
        parse_criteria({"state_checks": [{"command": command}]})


@pytest.mark.parametrize(
    ("command", "service"),
    [
        ("aws s3api get-bucket-policy --bucket b", "s3"),
        ("aws --output json dynamodb scan --table-name t", "dynamodb"),
        ("aws s3api --query delete-bucket list-buckets", "s3"),
        ("aws s3 ls", "s3"),
    ],
)
def test_a_check_is_about_the_service_that_its_command_reads(command: str, service: str) -> None:
    assert parse_criteria({"state_checks": [{"command": command}]}).named_services == {service}


class Printing:
    """A slot whose commands print this; None: they fail."""

    def __init__(self, output: str | None) -> None:
        self.result = CommandResult(255, "", "absent") if output is None else CommandResult(0, output, "")

    def call(self, service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError(operation)

    def run(self, command: str) -> CommandResult:
        return self.result


@pytest.mark.parametrize(
    ("wanted", "output", "holds"),
    [
        ({"output_contains": "jobs"}, '{"QueueUrls": ["http://x/jobs"]}', True),
        ({"output_contains": "jobs"}, '{"QueueUrls": []}', False),
        ({"json_path": "$.QueueUrls[0]", "expected": "A"}, '{"QueueUrls": ["a"]}', True),
        ({"json_path": "length(QueueUrls)", "expected": "1"}, '{"QueueUrls": ["a"]}', True),
        ({"json_path": "length(QueueUrls)", "expected": 1}, "{}", False),
        ({"json_path": "QueueUrls[0]", "expected": "a", "output_contains": "b"}, '{"QueueUrls": ["a"]}', False),
        ({"json_path": "QueueUrls", "expected": 1}, "no JSON", False),
        ({"json_path": "QueueUrls", "expected": 1}, "[" * 100_000, False),
        ({}, "", True),
        ({}, None, False),
    ],
)
def test_checks_by_command(wanted: dict[str, Any], output: str | None, holds: bool) -> None:
    (check,) = parse_criteria({"state_checks": [{"command": LOOK, "description": "x"} | wanted]}).checks
    assert check.holds(Printing(output)) is holds
