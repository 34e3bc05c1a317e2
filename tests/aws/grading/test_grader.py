"""Criteria that are no end state, and how they are graded: of tasks of other makers, in the words
of the CLI, solved as they are meant or refused aloud; strategies on boundary values, with a fake
state; the tracker's bookkeeping."""

from typing import Any

import pytest

from realhf.aws.cli.executor import CommandResult, SentRequest
from realhf.aws.cli.state_client import StateCallError, UnreadableAnswer
from realhf.aws.episode.episode import Episode
from realhf.aws.grading.criteria import CommandCheck, parse_criteria
from realhf.aws.grading.grader import Grader
from realhf.aws.grading.tracker import (
    Tracker,
    is_read,
    mentions,
    plain_name,
    resource_name,
    same_meaning,
    same_resource,
)
from realhf.aws.tasks.task import Task, TaskError


class FakeState:
    """Answers by operation; an exception is raised. Counts the calls."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls = 0

    def call(self, service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        answer = self.answers.get(operation, StateCallError("NoSuchThing", "absent"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, command: str) -> CommandResult:
        raise AssertionError(command)


class Play:
    """A tracker and a grader fed with requests as an executor would report them."""

    def __init__(self, criteria: dict, state: FakeState, present: frozenset = frozenset()) -> None:
        parsed = parse_criteria(criteria)
        self.tracker = Tracker(present, parsed.operations)
        self.grader = Grader(parsed, state)
        self.grader.start()

    def send(self, operation: str, params: dict, status: int = 200, code: str = "") -> float:
        service, _, name = operation.partition(":")
        request = SentRequest(service, name, params, status, code)
        result = CommandResult(0 if request.ok else 255, "", "", requests=(request,))
        return self.grader.evaluate(self.tracker.record(f"aws {operation}", result)).progress


BUCKET = {"service": "s3", "name": "a"}
LISTED = {"Buckets": [{"Name": "a-2"}, {"Name": "a"}]}


def test_command_match_wants_operation_parameters_and_acceptance() -> None:
    play = Play({"operation": "s3:ListObjectsV2", "params": {"Bucket": "a"}}, FakeState())
    assert play.send("s3:ListBuckets", {}) == 0
    assert play.send("s3:ListObjectsV2", {"Bucket": "a-2"}) == 0
    assert play.send("s3:ListObjectsV2", {"Bucket": "a"}, 404, "NoSuchBucket") == 0
    assert play.grader.credited_operations == []
    assert play.send("s3:ListObjectsV2", {"Bucket": "a", "MaxKeys": 5}) == 1
    assert play.grader.credited_operations == ["s3:ListObjectsV2"]
    assert play.grader.grade.achieved


def test_creation_is_half_done_until_it_is_there() -> None:
    state = FakeState(ListBuckets={"Buckets": [{"Name": "a-2"}]})
    play = Play({"operation": "s3:CreateBucket", "resource_exists": BUCKET}, state)
    assert play.send("s3:CreateBucket", {"Bucket": "b"}) == 0
    assert play.send("s3:CreateBucket", {"Bucket": "a"}) == 0.5
    state.answers["ListBuckets"] = LISTED
    assert play.send("s3:PutBucketTagging", {"Bucket": "a"}) == 1
    assert play.grader.grade.achieved


TWO_STEPS: dict[str, Any] = {
    "steps": [
        {"operation": "s3:CreateBucket", "resource": "a"},
        {"operation": "s3:PutObject", "resource": "a"},
    ]
}


def test_steps_are_credited_by_prefix() -> None:
    play = Play(TWO_STEPS, FakeState())
    assert play.send("s3:PutObject", {"Bucket": "a", "Key": "k"}) == 0
    assert play.send("s3:CreateBucket", {"Bucket": "a"}) == 1, (
        "an earlier request may pay for the second step"
    )
    assert play.grader.credited_operations == ["s3:CreateBucket", "s3:PutObject"]
    assert play.grader.grade.achieved


def test_missing_service_caps_progress() -> None:
    play = Play(TWO_STEPS | {"services": ["s3", "sns"]}, FakeState())
    play.send("s3:CreateBucket", {"Bucket": "a"})
    assert play.send("s3:PutObject", {"Bucket": "a", "Key": "k"}) == 0.5
    assert not play.grader.grade.achieved
    assert play.send("sns:CreateTopic", {"Name": "t"}) == 1
    assert play.grader.grade.achieved


class Printing(FakeState):
    """Commands print what is kept by the last word of the command; others fail."""

    def run(self, command: str) -> CommandResult:
        self.calls += 1
        output = self.answers.get(command.split()[-1])
        return CommandResult(255, "", "absent") if output is None else CommandResult(0, output, "")


def asks_for(name: str, text: str = "") -> dict[str, Any]:
    return {"command": f"aws s3api get-bucket-tagging --bucket {name}", "output_contains": text}


def test_state_checks_count_from_the_baseline() -> None:
    state = Printing(one="there", two="old")
    checks = [asks_for("one"), asks_for("two", "new"), asks_for("three")]
    play = Play({"state_checks": checks, "steps": [{"operation": "s3:PutObject"}]}, state)
    state.answers["three"] = ""
    assert play.send("s3:PutObject", {"Bucket": "a"}) == pytest.approx(0.7 + 0.3 * 0.5)
    state.answers["two"] = "new"
    assert play.send("s3:PutBucketTagging", {"Bucket": "a"}) == 1
    assert play.grader.grade.achieved


def test_a_task_that_is_solved_from_the_start_is_an_error() -> None:
    with pytest.raises(TaskError, match="every state check"):
        Play({"state_checks": [asks_for("one")]}, Printing(one="x"))


def test_reads_and_failures_cost_no_verification() -> None:
    state = FakeState(ListBuckets=LISTED)
    play = Play({"operation": "s3:CreateBucket", "resource_exists": BUCKET}, state)
    play.send("s3:ListBuckets", {})
    play.send("s3:CreateBucket", {"Bucket": "a"}, 409, "BucketAlreadyExists")
    assert state.calls == 0


def test_a_broken_simulator_is_no_failed_task() -> None:
    play = Play(
        {"operation": "s3:CreateBucket", "resource_exists": BUCKET},
        FakeState(ListBuckets=ConnectionError()),
    )
    with pytest.raises(ConnectionError):
        play.send("s3:CreateBucket", {"Bucket": "a"})


def test_what_cannot_be_read_is_no_success_and_no_end_of_the_episode() -> None:
    """An agent can write what nobody can decode."""
    state = FakeState(ListBuckets=UnreadableAnswer("nested"))
    play = Play({"operation": "s3:CreateBucket", "resource_exists": BUCKET}, state)
    assert play.send("s3:CreateBucket", {"Bucket": "a"}) == 0.5 and not play.grader.grade.achieved
    state.answers["ListBuckets"] = LISTED
    assert play.send("s3:CreateBucket", {"Bucket": "a"}) == 1.0


@pytest.mark.parametrize("other", ["a-2", "a-", "A", "my-a", "", "a/a"])
def test_only_the_exact_name_counts(other: str) -> None:
    """Exploit of layer 7: prefixes, suffixes and substrings."""
    assert not same_resource(other, "a")
    play = Play(
        {"operation": "s3:CreateBucket", "resource_exists": BUCKET}, FakeState(ListBuckets={})
    )
    assert play.send("s3:CreateBucket", {"Bucket": other}) == 0


@pytest.mark.parametrize(
    ("service", "params", "name"),
    [
        ("sns", {"TopicArn": "arn:aws:sns:us-east-1:000000000000:t"}, "t"),
        ("sqs", {"QueueUrl": "http://127.0.0.1:4566/000000000000/q"}, "q"),
        ("iam", {"PolicyArn": "arn:aws:iam::aws:policy/ReadOnlyAccess"}, "ReadOnlyAccess"),
        ("iam", {"UserName": "u", "PolicyArn": "arn:aws:iam::aws:policy/X"}, "u"),
        ("glue", {"DatabaseInput": {"Name": "d"}}, "d"),
        ("glue", {"DatabaseName": "d", "TableInput": {"Name": "t"}}, "d"),
        ("events", {"Rule": "r", "Targets": []}, "r"),
        ("sts", {}, ""),
        (
            "secretsmanager",
            {"SecretId": "arn:aws:secretsmanager:us-east-1:000000000000:secret:a/db-a1B2c3"},
            "a/db",
        ),
        ("lambda", {"FunctionName": "arn:aws:lambda:us-east-1:000000000000:function:f:live"}, "f"),
        ("lambda", {"FunctionName": "000000000000:function:f"}, "f"),
        (
            "logs",
            {"logGroupName": "arn:aws:logs:us-east-1:000000000000:log-group:/x/api:*"},
            "/x/api",
        ),
        ("ssm", {"Name": "arn:aws:ssm:us-east-1:000000000000:parameter/x/y"}, "/x/y"),
        ("ssm", {"Name": "arn:aws:ssm:us-east-1:000000000000:parameter/x"}, "x"),
        ("dynamodb", {"TableName": "arn:aws:dynamodb:us-east-1:000000000000:table/t/index/i"}, "t"),
        ("kinesis", {"StreamARN": "arn:aws:kinesis:us-east-1:000000000000:stream/s"}, "s"),
        ("ecr", {"repositoryName": "team/app"}, "team/app"),
        ("kms", {"KeyId": "arn:aws:kms:us-east-1:000000000000:alias/k"}, "alias/k"),
        ("route53", {"Name": "X.example.com."}, "x.example.com"),
        ("route53", {"HostedZoneId": "/hostedzone/Z1"}, "Z1"),
        (
            "lambda",
            {"FunctionName": "arn:aws:lambda:eu-west-1:000000000000:function:f"},
            "arn:aws:lambda:eu-west-1:000000000000:function:f",
        ),
        (
            "sqs",
            {"QueueUrl": "arn:aws:sqs:us-east-1:111122223333:q"},
            "arn:aws:sqs:us-east-1:111122223333:q",
        ),
    ],
)
def test_resource_of_a_request(service: str, params: dict, name: str) -> None:
    assert resource_name(service, params) == name


def test_lists_have_no_order_and_one_thing_is_a_list_of_one() -> None:
    assert same_meaning("ecs", ["b", "arn:aws:ecs:us-east-1:000000000000:cluster/a"], ["a", "b"])
    assert same_meaning("ssm", ["a"], "a") and not same_meaning("ssm", ["a", "b"], "a")
    assert same_meaning("kms", "k-1", {"one_of": ["alias/k", "k-1"]}) and not same_meaning(
        "kms", "k", {"one_of": []}
    )
    assert (
        not same_meaning("s3", None, "a")
        and not same_meaning("s3", 1, "1")
        and not same_meaning("s3", [], "a")
    )


def test_names_are_taken_out_of_arns_and_urls_only() -> None:
    assert plain_name("a/b:c") == "a/b:c"


@pytest.mark.parametrize(
    ("operation", "read"),
    [
        ("s3:GetObject", True),
        ("ecs:DescribeClusters", True),
        ("s3:PutObject", False),
        ("dynamodb:TransactGetItems", True),
        ("dynamodb:TransactWriteItems", False),
        ("cognito-idp:AdminGetUser", True),
        ("cognito-idp:AdminRemoveUserFromGroup", False),
        ("sts:AssumeRole", True),
        ("stepfunctions:StartExecution", False),
        ("dynamodb:ExecuteStatement", False),
    ],
)
def test_reads(operation: str, read: bool) -> None:
    assert is_read(operation) is read


@pytest.mark.parametrize(
    ("statements", "read"),
    [
        (["SELECT * FROM t"], True),
        ([" select a from t", "DELETE FROM t WHERE a=1"], False),
        ([3], False),
        ([], False),
    ],
)
def test_a_statement_says_whether_it_looks(statements: list, read: bool) -> None:
    asked = [{"Statement": one} for one in statements]
    assert is_read("dynamodb:BatchExecuteStatement", {"Statements": asked}) is read
    assert is_read("dynamodb:ExecuteTransaction", {"TransactStatements": asked}) is read
    if len(statements) == 1:
        assert is_read("dynamodb:ExecuteStatement", asked[0]) is read


def test_rollbacks_count_once_per_pair_and_not_when_wanted() -> None:
    play = Play(
        {"operation": "s3:CreateBucket", "resource_exists": BUCKET}, FakeState(ListBuckets={})
    )
    play.send("s3:DeleteBucket", {"Bucket": "a"})
    assert play.tracker.rollbacks == 0, "nothing of the agent's was deleted"
    for _ in range(2):
        play.send("s3:CreateBucket", {"Bucket": "a"})
        play.send("s3:DeleteBucket", {"Bucket": "a"})
    assert play.tracker.rollbacks == 1
    wanted = Play(
        {"steps": [{"operation": "s3:CreateBucket"}, {"operation": "s3:DeleteBucket"}]}, FakeState()
    )
    wanted.send("s3:CreateBucket", {"Bucket": "a"})
    wanted.send("s3:DeleteBucket", {"Bucket": "a"})
    assert wanted.tracker.rollbacks == 0


def test_retries_count_for_what_the_setup_made_and_at_most_three() -> None:
    present = frozenset(("s3", name) for name in "abcdef")
    play = Play(
        {"operation": "s3:CreateBucket", "resource_exists": BUCKET},
        FakeState(ListBuckets={}),
        present,
    )
    for name in "aabcdefz":
        play.send("s3:CreateBucket", {"Bucket": name}, 409, "BucketAlreadyOwnedByYou")
        play.send("s3:ListBuckets", {})
        play.tracker.record_progress()
    assert play.tracker.idempotent_retries == 3
    other = Play(
        {"operation": "s3:CreateBucket", "resource_exists": BUCKET}, FakeState(ListBuckets={})
    )
    other.send("s3:CreateBucket", {"Bucket": "a"}, 409, "BucketAlreadyOwnedByYou")
    other.send("s3:ListBuckets", {})
    other.tracker.record_progress()
    assert other.tracker.idempotent_retries == 0


def test_a_harmless_command_after_a_collision_is_no_retry() -> None:
    criteria = {"operation": "s3:CreateBucket", "resource_exists": BUCKET}
    present = frozenset({("s3", "b")})
    play = Play(criteria, FakeState(ListBuckets={}), present)
    play.send("s3:CreateBucket", {"Bucket": "b"}, 409, "BucketAlreadyOwnedByYou")
    play.send("s3:ListBuckets", {})
    assert play.tracker.idempotent_retries == 0
    play.tracker.record_progress()
    assert play.tracker.idempotent_retries == 1, "but one that brings the task on is"
    play.send("s3:PutObject", {"Bucket": "b"})
    play.tracker.record_progress()
    assert play.tracker.idempotent_retries == 1


def test_a_text_that_the_command_must_contain_needs_an_accepted_request() -> None:
    play = Play({"command_contains": "sns:ListTopics"}, FakeState())
    assert play.send("sns:ListTopics", {}, 403, "AccessDenied") == 0
    assert play.send("sns:ListSubscriptions", {}) == 0
    assert play.send("sns:ListTopics", {}) == 1


def test_a_generated_id_or_a_secret_arn_names_what_was_made() -> None:
    tracker = Tracker()

    def send(operation: str, params: dict, output: str = "") -> None:
        service, _, name = operation.partition(":")
        request = SentRequest(service, name, params, 200, "")
        tracker.record("aws", CommandResult(0, output, "", requests=(request,)))

    send("apigateway:CreateRestApi", {"name": "api"}, '{"id": "abc"}')
    send("apigateway:DeleteRestApi", {"restApiId": "xyz"})
    assert tracker.rollbacks == 0
    send("apigateway:DeleteRestApi", {"restApiId": "abc"})
    assert tracker.rollbacks == 1
    send("secretsmanager:CreateSecret", {"Name": "db"})
    send(
        "secretsmanager:DeleteSecret",
        {"SecretId": "arn:aws:secretsmanager:us-east-1:000000000000:secret:db-a1B2c3"},
    )
    assert tracker.rollbacks == 2
    send("iam:AttachRolePolicy", {"RoleName": "r", "PolicyArn": "p1"})
    send("iam:DetachRolePolicy", {"RoleName": "r", "PolicyArn": "p2"})
    assert tracker.rollbacks == 2
    send("iam:DetachRolePolicy", {"RoleName": "r", "PolicyArn": "p1"})
    assert tracker.rollbacks == 3


_TRUST = (
    '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":{"Service":"lambda.amazonaws.com"},'
    '"Action":"sts:AssumeRole"}]}'
)


def task(success: dict[str, Any], tier: str = "warmup", **rest: Any) -> Task:
    return Task.from_json(
        {
            "task_id": 9,
            "difficulty": tier,
            "description": "...",
            "success_criteria": success,
            **rest,
        }
    )


def reward(episode: Episode, one: Task, *commands: str) -> tuple[float, bool]:
    episode.reset(one, chaos=False)
    steps = [episode.step(command) for command in commands]
    return sum(step.reward for step in steps), steps[-1].observation["task_achieved"]


SOLVED = [
    ({"command_contains": "s3", "operation": "ls"}, ["aws s3 ls"]),
    ({"command_contains": "s3", "operation": "ls"}, ["aws s3api list-buckets"]),
    (
        {"command_contains": "rds", "operation": "describe-db-instances"},
        ["aws rds describe-db-instances"],
    ),
    (
        {"operation": "create-policy", "resource_exists": {"service": "iam", "name": "read-only"}},
        [
            "aws iam create-policy --policy-name read-only --policy-document "
            '\'{"Version":"2012-10-17","Statement":'
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
        {
            "steps": [
                {"operation": "create-table", "resource": "tab"},
                {"operation": "put-item", "resource": "tab"},
            ]
        },
        [
            "aws dynamodb create-table --table-name tab --billing-mode PAY_PER_REQUEST "
            "--attribute-definitions AttributeName=id,AttributeType=S --key-schema "
            "AttributeName=id,KeyType=HASH",
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
    """A leading ``$.`` is the root, "120" is 120, and a check may ask for a value and for a text at
    once."""
    url = "http://localhost:4566/000000000000/jobs"
    look = f"aws sqs get-queue-attributes --queue-url {url} --attribute-names VisibilityTimeout"
    check = {
        "command": look,
        "json_path": "$.Attributes.VisibilityTimeout",
        "expected": 120,
        "output_contains": "120",
    }
    setup = ["aws sqs create-queue --queue-name jobs"]
    one = task({"services": ["sqs"], "state_checks": [check]}, "expert", setup_commands=setup)
    change = "aws sqs set-queue-attributes --queue-url {} --attributes VisibilityTimeout={}"
    assert reward(episode, one, change.format(url, 1200))[1] is False
    assert reward(episode, one, change.format(url, 120)) == (1.0, True)


@pytest.mark.sim
def test_an_id_that_aws_draws_and_nobody_made_is_refused_at_the_start(episode: Episode) -> None:
    """Such a check can never hold: the task would be accepted and could not be solved."""
    check = {
        "command": "aws cognito-idp describe-user-pool --user-pool-id us-east-1_chosen",
        "output_contains": "x",
    }
    setup = ["aws cognito-idp create-user-pool --pool-name chosen"]
    with pytest.raises(TaskError, match="generated id"):
        episode.reset(task({"state_checks": [check]}, "expert", setup_commands=setup), chaos=False)
    assert not CommandCheck("aws iam get-role --role-name group-id").asks_for_drawn_id()


@pytest.mark.parametrize(
    ("success", "reason"),
    [
        (
            {"command_contains": "emr", "operation": "list-clusters"},
            "service 'emr' is not available",
        ),
        (
            {"steps": [{"operation": "put-integration"}], "services": ["apigateway"]},
            "'put-integration' of apigateway",
        ),
        (
            {"steps": [{"operation": "put-record"}], "services": ["glue", "s3"]},
            "'put-record' of glue, s3",
        ),
        ({"steps": [{"operation": "fly"}]}, "operation 'fly' is not available"),
        ({"operation": "create-table", "command_contains": "me a table"}, "several services"),
        (
            {"operation": "create-volume", "resource_exists": {"service": "ebs", "name": "v"}},
            "cannot be checked by a name",
        ),
    ],
)
def test_what_cannot_be_graded_here_is_refused_with_the_reason(
    success: dict[str, Any], reason: str
) -> None:
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
def test_an_operation_says_of_which_kind_the_resource_is(
    operation: str, service: str, kind: str
) -> None:
    parsed = parse_criteria(
        {"operation": operation, "resource_exists": {"service": service, "name": "n"}}
    )
    assert parsed.resource is not None and (parsed.resource.kind, parsed.resource.name) == (
        kind,
        "n",
    )


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
    setup = [
        f"aws ssm put-parameter --name {name} --value v --type String" for name in ("x-2", "ax")
    ]
    one = task(exists, "beginner", setup_commands=setup)
    assert reward(episode, one, "aws ssm put-parameter --name x2 --value v --type String") == (
        0.0,
        False,
    )
    assert reward(episode, one, "aws ssm put-parameter --name x --value v --type String") == (
        1.0,
        True,
    )


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
        (
            {"resource_exists": {**BUCKET, "attributes": {"Versioning": 1}}},
            "unknown key 'attributes'.*end state",
        ),
        ({"steps": [{"resource": "a"}]}, "operation and resource of a step"),
        ({"steps": ["s3:CreateBucket"]}, "not an object"),
        ({"steps": [{"operation": 5}]}, "operation and resource of a step"),
        (
            {"steps": [{"operation": "s3:CreateBucket", "verify": BUCKET}]},
            "unknown key 'verify'.*end state",
        ),
        ({"steps": {"operation": "s3:CreateBucket"}}, "steps is not of type list"),
        ({"state_checks": [{"command": 1}]}, "command is not of type str"),
        ({"state_checks": ["s3"]}, "has no command"),
        (
            {"state_checks": [{"call": {"service": "s3", "operation": "HeadBucket"}}]},
            "has no command",
        ),
        ({"state_checks": [{"command": LOOK, "json_path": "]["}]}, "json_path"),
        ({"state_checks": [{"command": LOOK, "absent": True}]}, "unknown key 'absent'.*end state"),
        (
            {"state_checks": [{"command": LOOK}], "protected": [BUCKET]},
            "unknown key 'protected'.*end state",
        ),
        ({"state_checks": [{"command": LOOK}] * 41}, "more than 40"),
    ],
)
def test_what_is_wrong_or_belongs_to_the_end_state_is_named(
    criteria: dict[str, Any], said: str
) -> None:
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
    with pytest.raises(TaskError, match="may only read"):
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


class Output:
    """A slot whose commands print this; None: they fail."""

    def __init__(self, output: str | None) -> None:
        self.result = (
            CommandResult(255, "", "absent") if output is None else CommandResult(0, output, "")
        )

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
        (
            {"json_path": "QueueUrls[0]", "expected": "a", "output_contains": "b"},
            '{"QueueUrls": ["a"]}',
            False,
        ),
        ({"json_path": "QueueUrls", "expected": 1}, "no JSON", False),
        ({"json_path": "QueueUrls", "expected": 1}, "[" * 100_000, False),
        ({}, "", True),
        ({}, None, False),
    ],
)
def test_checks_by_command(wanted: dict[str, Any], output: str | None, holds: bool) -> None:
    (check,) = parse_criteria(
        {"state_checks": [{"command": LOOK, "description": "x"} | wanted]}
    ).checks
    assert check.holds(Output(output)) is holds
