"""Strategies on boundary values, with a fake state; the tracker's bookkeeping; parsing of criteria."""

from typing import Any

import pytest

from realhf.aws.cli.executor import CommandResult, SentRequest
from realhf.aws.cli.state_client import StateCallError
from realhf.aws.grading.check_parser import parse_check
from realhf.aws.grading.grader import Grader, Step, parse_criteria, unspent_request
from realhf.aws.grading.resource_identity import plain_name, same_meaning
from realhf.aws.grading.tracker import Tracker, is_read, resource_name, same_resource
from realhf.aws.grading.verifier import equal
from realhf.aws.tasks.task import TaskError


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
        self.calls += 1
        return self.answers["run"]


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


BUCKET = {"service": "s3", "type": "bucket", "name": "a"}


def test_command_match_wants_operation_parameters_and_acceptance() -> None:
    play = Play({"operation": "s3:ListObjectsV2", "params": {"Bucket": "a"}}, FakeState())
    assert play.send("s3:ListBuckets", {}) == 0
    assert play.send("s3:ListObjectsV2", {"Bucket": "a-2"}) == 0
    assert play.send("s3:ListObjectsV2", {"Bucket": "a"}, 404, "NoSuchBucket") == 0
    assert play.grader.credited_operations == []
    assert play.send("s3:ListObjectsV2", {"Bucket": "a", "MaxKeys": 5}) == 1
    assert play.grader.credited_operations == ["s3:ListObjectsV2"]
    assert play.grader.grade.achieved


def test_creation_is_half_done_without_its_attributes() -> None:
    state = FakeState(DescribeStreamSummary={"StreamDescriptionSummary": {"StreamName": "a", "OpenShardCount": 1}})
    check = {"service": "kinesis", "name": "a", "attributes": {"OpenShardCount": 2}}
    play = Play({"operation": "kinesis:CreateStream", "resource_exists": check}, state)
    assert play.send("kinesis:CreateStream", {"StreamName": "b"}) == 0
    assert play.send("kinesis:CreateStream", {"StreamName": "a"}) == 0.5
    state.answers["DescribeStreamSummary"] = {"StreamDescriptionSummary": {"StreamName": "a", "OpenShardCount": 2}}
    assert play.send("kinesis:UpdateShardCount", {"StreamName": "a"}) == 1
    assert play.grader.grade.achieved


def two_steps(**second: Any) -> dict:
    steps = [{"operation": "s3:CreateBucket", "resource": "a", "verify": BUCKET}]
    return {"steps": [*steps, {"operation": "s3:PutObject", "resource": "a", **second}]}


def test_steps_are_credited_by_prefix() -> None:
    play = Play(two_steps(), FakeState(HeadBucket={}))
    assert play.send("s3:PutObject", {"Bucket": "a", "Key": "k"}) == 0
    assert play.send("s3:CreateBucket", {"Bucket": "a"}) == 1, "an earlier request may pay for the second step"
    assert play.grader.credited_operations == ["s3:CreateBucket", "s3:PutObject"]


def test_an_ordered_step_wants_a_later_request() -> None:
    play = Play(two_steps(ordered=True), FakeState(HeadBucket={}))
    assert play.send("s3:PutObject", {"Bucket": "a", "Key": "k"}) == 0
    assert play.send("s3:CreateBucket", {"Bucket": "a"}) == 0.5
    assert play.send("s3:PutObject", {"Bucket": "a", "Key": "k"}) == 1


def test_a_step_whose_verification_fails_is_not_credited() -> None:
    play = Play(two_steps(), FakeState())
    assert play.send("s3:CreateBucket", {"Bucket": "a"}) == 0


def test_missing_service_caps_progress() -> None:
    play = Play(two_steps() | {"services": ["s3", "sns"]}, FakeState(HeadBucket={}))
    play.send("s3:CreateBucket", {"Bucket": "a"})
    assert play.send("s3:PutObject", {"Bucket": "a", "Key": "k"}) == 0.5
    assert not play.grader.grade.achieved
    assert play.send("sns:CreateTopic", {"Name": "t"}) == 1
    assert play.grader.grade.achieved


def test_state_checks_count_from_the_baseline() -> None:
    def head(name: str) -> dict:
        return {"call": {"service": "s3", "operation": name, "params": {}}}

    checks = [head("HeadBucket"), head("HeadObject"), {**head("GetBucketPolicy"), "absent": True}]
    state = FakeState(GetBucketPolicy={"Policy": "{}"}, HeadBucket={})
    play = Play({"state_checks": checks, "steps": [{"operation": "s3:PutObject"}]}, state)
    state.answers["HeadObject"] = {}
    assert play.send("s3:PutObject", {"Bucket": "a"}) == pytest.approx(0.7 + 0.3 * 0.5)
    del state.answers["GetBucketPolicy"]
    assert play.send("s3:DeleteBucketPolicy", {"Bucket": "a"}) == 1
    assert play.grader.grade.achieved


def test_a_task_that_is_solved_from_the_start_is_an_error() -> None:
    checks = [{"call": {"service": "s3", "operation": "HeadBucket", "params": {}}}]
    with pytest.raises(TaskError, match="every state check"):
        Play({"state_checks": checks}, FakeState(HeadBucket={}))


def test_reads_and_failures_cost_no_verification() -> None:
    state = FakeState(HeadBucket={})
    play = Play({"operation": "s3:CreateBucket", "resource_exists": BUCKET}, state)
    play.send("s3:ListBuckets", {})
    play.send("s3:CreateBucket", {"Bucket": "a"}, 409, "BucketAlreadyExists")
    assert state.calls == 0


def test_a_broken_simulator_is_no_failed_task() -> None:
    play = Play({"operation": "s3:CreateBucket", "resource_exists": BUCKET}, FakeState(HeadBucket=ConnectionError()))
    with pytest.raises(ConnectionError):
        play.send("s3:CreateBucket", {"Bucket": "a"})


def test_one_request_pays_for_one_step() -> None:
    """Exploit of layer 2: one subscribe for two required subscriptions."""
    subscribe = {"operation": "sns:Subscribe", "resource": "t"}
    play = Play({"steps": [subscribe, subscribe]}, FakeState())
    topic = {"TopicArn": "arn:aws:sns:us-east-1:000000000000:t"}
    assert play.send("sns:Subscribe", topic) == 0.5
    assert play.send("sns:ListTopics", {}) == 0.5
    assert play.send("sns:Subscribe", topic) == 1
    assert unspent_request(Step("sns:Subscribe", "t"), play.tracker.evidence, [0, 2]) is None


@pytest.mark.parametrize("other", ["a-2", "a-", "A", "my-a", "", "a/a"])
def test_only_the_exact_name_counts(other: str) -> None:
    """Exploit of layer 7: prefixes, suffixes and substrings."""
    assert not same_resource(other, "a")
    play = Play({"operation": "s3:CreateBucket", "resource_exists": BUCKET}, FakeState())
    assert play.send("s3:CreateBucket", {"Bucket": other}) == 0


def test_lists_are_searched_for_the_exact_name() -> None:
    """Exploit of layer 7: a log group whose name only begins with the wanted one."""
    check = parse_check({"service": "logs", "name": "web"})
    assert not check.holds(FakeState(DescribeLogGroups={"logGroups": [{"logGroupName": "web-2"}]}))
    assert check.holds(FakeState(DescribeLogGroups={"logGroups": [{"logGroupName": "web-2"}, {"logGroupName": "web"}]}))


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
        ("secretsmanager", {"SecretId": "arn:aws:secretsmanager:us-east-1:000000000000:secret:a/db-a1B2c3"}, "a/db"),
        ("lambda", {"FunctionName": "arn:aws:lambda:us-east-1:000000000000:function:f:live"}, "f"),
        ("lambda", {"FunctionName": "000000000000:function:f"}, "f"),
        ("logs", {"logGroupName": "arn:aws:logs:us-east-1:000000000000:log-group:/x/api:*"}, "/x/api"),
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
        ("sqs", {"QueueUrl": "arn:aws:sqs:us-east-1:111122223333:q"}, "arn:aws:sqs:us-east-1:111122223333:q"),
    ],
)
def test_resource_of_a_request(service: str, params: dict, name: str) -> None:
    assert resource_name(service, params) == name


def test_lists_have_no_order_and_one_thing_is_a_list_of_one() -> None:
    assert same_meaning("ecs", ["b", "arn:aws:ecs:us-east-1:000000000000:cluster/a"], ["a", "b"])
    assert same_meaning("ssm", ["a"], "a") and not same_meaning("ssm", ["a", "b"], "a")
    assert same_meaning("kms", "k-1", {"one_of": ["alias/k", "k-1"]}) and not same_meaning("kms", "k", {"one_of": []})
    assert not same_meaning("s3", None, "a") and not same_meaning("s3", 1, "1") and not same_meaning("s3", [], "a")


def test_names_are_taken_out_of_arns_and_urls_only() -> None:
    assert plain_name("a/b:c") == "a/b:c"


@pytest.mark.parametrize(
    ("operation", "read"), [("s3:GetObject", True), ("ecs:DescribeClusters", True), ("s3:PutObject", False)]
)
def test_reads(operation: str, read: bool) -> None:
    assert is_read(operation) is read


def test_rollbacks_count_once_per_pair_and_not_when_wanted() -> None:
    play = Play({"operation": "s3:CreateBucket", "resource_exists": BUCKET}, FakeState())
    play.send("s3:DeleteBucket", {"Bucket": "a"})
    assert play.tracker.rollbacks == 0, "nothing of the agent's was deleted"
    for _ in range(2):
        play.send("s3:CreateBucket", {"Bucket": "a"})
        play.send("s3:DeleteBucket", {"Bucket": "a"})
    assert play.tracker.rollbacks == 1
    wanted = Play({"steps": [{"operation": "s3:CreateBucket"}, {"operation": "s3:DeleteBucket"}]}, FakeState())
    wanted.send("s3:CreateBucket", {"Bucket": "a"})
    wanted.send("s3:DeleteBucket", {"Bucket": "a"})
    assert wanted.tracker.rollbacks == 0


def test_retries_count_for_what_the_setup_made_and_at_most_three() -> None:
    present = frozenset(("s3", name) for name in "abcdef")
    play = Play({"operation": "s3:CreateBucket", "resource_exists": BUCKET}, FakeState(), present)
    for name in "aabcdefz":
        play.send("s3:CreateBucket", {"Bucket": name}, 409, "BucketAlreadyOwnedByYou")
        play.send("s3:ListBuckets", {})
        play.tracker.progressed()
    assert play.tracker.idempotent_retries == 3
    other = Play({"operation": "s3:CreateBucket", "resource_exists": BUCKET}, FakeState())
    other.send("s3:CreateBucket", {"Bucket": "a"}, 409, "BucketAlreadyOwnedByYou")
    other.send("s3:ListBuckets", {})
    other.tracker.progressed()
    assert other.tracker.idempotent_retries == 0


def test_a_harmless_command_after_a_collision_is_no_retry() -> None:
    play = Play({"operation": "s3:CreateBucket", "resource_exists": BUCKET}, FakeState(), frozenset({("s3", "b")}))
    play.send("s3:CreateBucket", {"Bucket": "b"}, 409, "BucketAlreadyOwnedByYou")
    play.send("s3:ListBuckets", {})
    assert play.tracker.idempotent_retries == 0
    play.tracker.progressed()
    assert play.tracker.idempotent_retries == 1, "but one that brings the task on is"
    play.send("s3:PutObject", {"Bucket": "b"})
    play.tracker.progressed()
    assert play.tracker.idempotent_retries == 1


def test_equality_minds_types() -> None:
    assert equal({"a": [1, "x"]}, {"a": [1, "x"]})
    for found, expected in [(1, "1"), (True, 1), ([1], [1, 2]), ({"a": 1, "b": 2}, {"a": 1}), (None, {})]:
        assert not equal(found, expected)


@pytest.mark.parametrize(
    "criteria",
    [
        {},
        {"operation": "", "steps": []},
        {"resource_exists": {"service": "s3", "type": "bucket"}},
        {"resource_exists": {"service": "moon", "name": "a"}},
        {"resource_exists": {**BUCKET, "colour": "red"}},
        {"resource_exists": {**BUCKET, "attributes": {"][": 1}}},
        {"steps": [{"resource": "a"}]},
        {"steps": ["s3:CreateBucket"]},
        {"steps": [{"operation": 5}]},
        {"steps": [{"operation": "s3:CreateBucket", "resource": ["a"]}]},
        {"steps": {"operation": "s3:CreateBucket"}},
        {"operation": ["s3:CreateBucket"]},
        {"operation": "s3:CreateBucket", "services": "s3"},
        {"resource_exists": {**BUCKET, "name": 1}},
        {"resource_exists": {**BUCKET, "attributes": ["a"]}},
        {"state_checks": [{"call": {"service": "s3", "operation": "HeadBucket"}, "output_contains": 1}]},
        {"state_checks": [{"call": {"service": "s3", "operation": "HeadBucket", "params": [1]}}]},
        {"state_checks": [{"call": "s3"}]},
        {"state_checks": [{"command": 1}]},
        {"state_checks": ["s3"]},
        {"state_checks": [{"call": {"service": "s3", "operation": "DeleteBucket", "params": {}}}]},
        {"state_checks": [{"call": {"service": "lambda", "operation": "Invoke", "params": {}}}]},
        {"state_checks": [{"call": {"service": "athena", "operation": "GetQueryResults", "params": {}}}]},
    ],
)
def test_malformed_criteria_are_task_errors(criteria: dict) -> None:
    with pytest.raises(TaskError):
        parse_criteria(criteria)


def test_a_text_that_the_command_must_contain_needs_an_accepted_request() -> None:
    play = Play({"command_contains": "sns:ListTopics"}, FakeState())
    assert play.send("sns:ListTopics", {}, 403, "AccessDenied") == 0
    assert play.send("sns:ListSubscriptions", {}) == 0
    assert play.send("sns:ListTopics", {}) == 1


LIST = "aws sqs list-queues"


@pytest.mark.parametrize(
    ("wanted", "output", "holds"),
    [
        ({"output_contains": "jobs"}, '{"QueueUrls": ["http://x/jobs"]}', True),
        ({"output_contains": "jobs", "not_contains": "old"}, '{"QueueUrls": ["http://x/jobs-old"]}', False),
        ({"json_path": "length(QueueUrls)", "expected": 1}, '{"QueueUrls": ["a"]}', True),
        ({"json_path": "length(QueueUrls)", "expected": "1"}, '{"QueueUrls": ["a"]}', False),
        ({"json_path": "length(QueueUrls)", "expected": "1", "loose": True}, '{"QueueUrls": ["a"]}', True),
        ({"json_path": "QueueUrls", "absent": True}, "", True),
        ({"json_path": "QueueUrls"}, "no JSON", False),
        ({"absent": True}, None, True),
        ({}, None, False),
    ],
)
def test_checks_by_command(wanted: dict, output: str | None, holds: bool) -> None:
    result = CommandResult(255, "", "absent") if output is None else CommandResult(0, output, "")
    assert parse_check({"command": LIST, "description": "x"} | wanted).holds(FakeState(run=result)) is holds


@pytest.mark.parametrize(
    "command", ["aws sqs create-queue --queue-name x", "aws configure list", "rm x", "aws s3 rm s3://b", ""]
)
def test_a_check_by_command_may_only_look(command: str) -> None:
    with pytest.raises(TaskError):
        parse_check({"command": command})


def test_texts_of_an_answer_are_compared_without_escapes() -> None:
    state = FakeState(GetBucketPolicy={"Policy": '{"Principal": "*"}'})
    call = {"service": "s3", "operation": "GetBucketPolicy", "params": {}}
    assert parse_check({"call": call, "output_contains": '"Principal": "*"'}).holds(state)
    assert not parse_check({"call": call, "output_contains": "P", "not_contains": '"Principal": "*"'}).holds(state)


def test_an_expression_that_does_not_fit_the_answer_finds_nothing() -> None:
    call = {"service": "s3", "operation": "GetBucketTagging", "params": {}}
    check = parse_check({"call": call, "json_path": "length(TagSet)", "expected": 2})
    assert not check.holds(FakeState(GetBucketTagging={}))
    assert check.holds(FakeState(GetBucketTagging={"TagSet": [1, 2]}))


def test_too_many_checks_are_refused() -> None:
    with pytest.raises(TaskError, match="more than 40"):
        parse_criteria({"state_checks": [BUCKET] * 41})


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
    send("secretsmanager:DeleteSecret", {"SecretId": "arn:aws:secretsmanager:us-east-1:000000000000:secret:db-a1B2c3"})
    assert tracker.rollbacks == 2
    send("iam:AttachRolePolicy", {"RoleName": "r", "PolicyArn": "p1"})
    send("iam:DetachRolePolicy", {"RoleName": "r", "PolicyArn": "p2"})
    assert tracker.rollbacks == 2
    send("iam:DetachRolePolicy", {"RoleName": "r", "PolicyArn": "p1"})
    assert tracker.rollbacks == 3


def test_one_grading_sends_each_request_once() -> None:
    state = FakeState(HeadBucket={}, GetBucketVersioning={"Status": "Enabled"})
    verify = {**BUCKET, "attributes": {"Versioning.Status": "Enabled"}}
    steps = [
        {"operation": "s3:CreateBucket", "verify": BUCKET},
        {"operation": "s3:PutBucketVersioning", "verify": verify},
    ]
    play = Play({"steps": steps}, state)
    play.send("s3:CreateBucket", {"Bucket": "a"})
    assert state.calls == 1
    play.send("s3:PutBucketVersioning", {"Bucket": "a"})
    assert play.grader.grade.achieved and state.calls == 3
