"""The grants that AWS needs for what a task wires: the least of them is paid, one action, resource
or principal more is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jmespath
import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.grading.companions import find_companions, read_wirings
from realhf.aws.grading.rights import read_rights
from realhf.aws.simulator.slot import Slot
from realhf.aws.tasks.loader import instantiate
from tests.aws.validation.play import run_commands

ACCOUNT = "000000000000"
AT = f"us-east-1:{ACCOUNT}"
BASIC = "arn:aws:iam::aws:policy/service-role/AWSLambdaBasicExecutionRole"
BACKUP = "arn:aws:iam::aws:policy/service-role/AWSBackupServiceRolePolicyForBackup"
Statements = list[dict[str, Any]]


def grant(
    actions: str, resource: str, source: str = "", principal: str = "", *, account: bool = False
) -> Statements:
    found: dict[str, Any] = {
        "Effect": "Allow",
        "Action": actions.split(),
        "Resource": resource.split(),
    }
    condition: dict[str, Any] = {"ArnEquals": {"aws:SourceArn": source}} if source else {}
    condition |= {"StringEquals": {"aws:SourceAccount": ACCOUNT}} if account else {}
    if principal:
        found |= {"Principal": {"Service": f"{principal}.amazonaws.com"}, "Condition": condition}
    return [found]


def to_queue(queue: str, statements: Statements) -> list[str]:
    policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
    url = f"http://localhost:4566/{ACCOUNT}/{queue}"
    return [
        f"aws sqs set-queue-attributes --queue-url {url} --attributes "
        f"'{json.dumps({'Policy': policy})}'"
    ]


def to_role(role: str, statements: Statements) -> list[str]:
    policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
    return [
        f"aws iam put-role-policy --role-name {role} --policy-name least --policy-document "
        f"'{policy}'"
    ]


def as_managed(role: str, statements: Statements) -> list[str]:
    policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
    return [
        f"aws iam create-policy --policy-name least --policy-document '{policy}'",
        f"aws iam attach-role-policy --role-name {role} --policy-arn "
        f"arn:aws:iam::{ACCOUNT}:policy/least",
    ]


def to_bucket(bucket: str, statements: Statements) -> list[str]:
    policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
    return [f"aws s3api put-bucket-policy --bucket {bucket} --policy '{policy}'"]


def attached(role: str, policy: str) -> list[str]:
    return [f"aws iam attach-role-policy --role-name {role} --policy-arn {policy}"]


def wider(statements: Statements, action: str, resource: str) -> Iterator[Statements]:
    """Yield the statements with an action, a resource, and a principal more, or without the
    condition."""
    first, *rest = statements
    yield [{**first, "Action": [*first["Action"], action]}, *rest]
    if resource:  # what the policy of a queue says of another queue means nothing
        yield [{**first, "Resource": [*first["Resource"], resource]}, *rest]
    if "Principal" in first:
        yield [
            {**first, "Principal": {**first["Principal"], "AWS": "arn:aws:iam::999999999999:root"}},
            *rest,
        ]
        yield [{name: value for name, value in first.items() if name != "Condition"}, *rest]


def plays(template_id: int, name: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return commands that give the least, and commands that give more."""
    queue = f"arn:aws:sqs:{AT}:{name}"
    match template_id:
        case 203 | 417:
            own = name if template_id == 203 else f"{name}-new"
            topic = f"arn:aws:sns:{AT}:{name}"
            queue = f"arn:aws:sqs:{AT}:{own}"
            forms = [(topic, False), (topic, True), ("", True)]
            least = [
                grant("sqs:SendMessage", queue, source, "sns", account=own) for source, own in forms
            ]
            more = [
                *wider(least[0], "sqs:DeleteMessage", ""),
                grant("sqs:SendMessage", queue, f"{topic}-2", "sns"),
            ]
            return [to_queue(own, one) for one in least], [to_queue(own, one) for one in more]
        case 213 | 406:
            own = name if template_id == 213 else f"{name}-jobs"
            rule = f"arn:aws:events:{AT}:rule/{name}"
            queue = f"arn:aws:sqs:{AT}:{own}"
            least = [
                grant("sqs:SendMessage", queue, rule, "events", account=account)
                for account in (False, True)
            ]
            more = [*wider(least[0], "sqs:*", ""), grant("sqs:SendMessage", queue, rule, "sns")]
            return [to_queue(own, one) for one in least], [to_queue(own, one) for one in more]
        case 218:
            trail = f"arn:aws:cloudtrail:{AT}:trail/{name}"
            bucket = f"arn:aws:s3:::{name}"
            look = grant("s3:GetBucketAcl", bucket, trail, "cloudtrail")
            write = grant(
                "s3:PutObject", f"{bucket}/records/AWSLogs/{ACCOUNT}/*", trail, "cloudtrail"
            )
            write[0]["Condition"] |= {"StringEquals": {"s3:x-amz-acl": "bucket-owner-full-control"}}
            more = [*wider([*write, *look], "s3:DeleteObject", f"{bucket}/*")]
            return [to_bucket(name, [*look, *write])], [to_bucket(name, one) for one in more]
        case 301:
            group = f"arn:aws:logs:{AT}:log-group:/aws/lambda/{name}:*"
            least = grant("logs:CreateLogStream logs:PutLogEvents", group)
            least += grant("logs:CreateLogGroup", f"arn:aws:logs:{AT}:*")
            more = [
                to_role(name, one)
                for one in wider(least, "logs:DeleteLogStream", f"arn:aws:logs:{AT}:*")
            ]
            more.append(attached(name, "arn:aws:iam::aws:policy/CloudWatchLogsFullAccess"))
            return [attached(name, BASIC), to_role(name, least), as_managed(name, least)], more
        case 302:
            queue = f"arn:aws:sqs:{AT}:{name}"
            least = grant("sqs:ReceiveMessage sqs:DeleteMessage sqs:GetQueueAttributes", queue)
            more = [*wider(least, "sqs:SendMessage", f"{queue}-failed")]
            return [to_role(name, least), as_managed(name, least)], [
                to_role(name, one) for one in more
            ]
        case 304:
            least = grant("states:StartExecution", f"arn:aws:states:{AT}:stateMachine:{name}")
            more = [
                *wider(least, "states:StopExecution", f"arn:aws:states:{AT}:stateMachine:{name}-2")
            ]
            return [to_role(name, least)], [to_role(name, one) for one in more]
        case 305:
            queue = f"arn:aws:sqs:{AT}:{name}-undelivered"
            least = grant("sqs:SendMessage", queue)
            more = [*wider(least, "sqs:ReceiveMessage", f"{queue}-2")]
            role = {"AWS": f"arn:aws:iam::{ACCOUNT}:role/{name}-scheduler"}
            own = f"{name}-undelivered"
            by_queue = [{**least[0], "Principal": role}]
            wide = [
                [{**by_queue[0], **change}]
                for change in (
                    {"Action": ["sqs:SendMessage", "sqs:ReceiveMessage"]},
                    {
                        "Principal": {
                            "AWS": [role["AWS"], f"arn:aws:iam::{ACCOUNT}:role/{name}-other"]
                        }
                    },
                    {"Principal": {"AWS": f"arn:aws:iam::{ACCOUNT}:root"}},
                )
            ]
            return [to_role(f"{name}-scheduler", least), to_queue(own, by_queue)], [
                *(to_role(f"{name}-scheduler", one) for one in more),
                *(to_queue(own, one) for one in wide),
            ]
        case 307:
            least = grant(
                "kinesis:PutRecord kinesis:PutRecords", f"arn:aws:kinesis:{AT}:stream/{name}"
            )
            more = [*wider(least, "kinesis:GetRecords", f"arn:aws:kinesis:{AT}:stream/{name}-2")]
            return [to_role(name, least), as_managed(name, least)], [
                *(to_role(name, one) for one in more),
                *(as_managed(name, one) for one in more),
            ]
        case 308:
            bucket = f"arn:aws:s3:::{name}-archive"
            reads = (
                "kinesis:DescribeStream kinesis:GetShardIterator kinesis:GetRecords "
                "kinesis:ListShards"
            )
            writes = "s3:AbortMultipartUpload s3:GetBucketLocation s3:GetObject s3:ListBucket"
            writes += " s3:ListBucketMultipartUploads s3:PutObject"
            least = grant(reads, f"arn:aws:kinesis:{AT}:stream/{name}") + grant(
                writes, f"{bucket} {bucket}/*"
            )
            more = [
                *wider(least, "kinesis:PutRecord", "*"),
                *wider(least[::-1], "s3:DeleteObject", "arn:aws:s3:::*"),
            ]
            return [to_role(name, least)], [to_role(name, one) for one in more]
        case 318:
            role = f"{name}-build"
            logs = "logs:CreateLogGroup logs:CreateLogStream logs:PutLogEvents"
            groups = [
                f"arn:aws:logs:{AT}:log-group:{group}"
                for group in (f"/aws/codebuild/{name}", f"/builds/{name}")
            ]
            least = grant(logs, " ".join(f"{group} {group}:*" for group in groups))
            least += grant(
                "s3:GetObject s3:GetObjectVersion", f"arn:aws:s3:::{name}-src/source.zip"
            )
            more = [
                *wider(least, "logs:DeleteLogGroup", "*"),
                *wider(least[::-1], "s3:PutObject", "arn:aws:s3:::*"),
            ]
            return [to_role(role, least)], [to_role(role, one) for one in more]
        case _:
            role = f"{name}-backup"
            more = [
                attached(role, "arn:aws:iam::aws:policy/AdministratorAccess"),
                to_role(role, grant("backup:*", "*")),
            ]
            return [attached(role, BACKUP)], more


TEMPLATES = (203, 213, 218, 301, 302, 304, 305, 307, 308, 318, 324, 406, 417)


@pytest.mark.sampled(5)
@pytest.mark.sim
@pytest.mark.parametrize("template_id", TEMPLATES)
def test_the_least_grant_is_paid_and_more_is_not(slot: Slot, template_id: int) -> None:
    task = instantiate(template_id, 0)
    least, more = plays(template_id, str(task.params["name"]))
    for right, ways in ((True, least), (False, more)):
        for lines in ways:
            episode = Episode(slot, 64)
            run = run_commands(episode, task, [*task.solution[:-1], *lines, task.solution[-1]])
            assert not run.failures
            assert (run.achieved, run.score == 1.0) == (right, right), (lines, episode.missing())


Limits = dict[str, dict[str, str]]
OURS = {"aws:SourceAccount": ACCOUNT}


def trusting(role: str, **limits: Limits) -> str:
    """Return the command by which a role trusts services, each within its limits."""
    statements = [
        {
            "Effect": "Allow",
            "Principal": {"Service": f"{service}.amazonaws.com"},
            "Action": "sts:AssumeRole",
            "Condition": limit,
        }
        for service, limit in limits.items()
    ]
    document = json.dumps({"Version": "2012-10-17", "Statement": statements})
    return f"aws iam update-assume-role-policy --role-name {role} --policy-document '{document}'"


def trusts(template_id: int, name: str) -> tuple[list[str], list[str]]:
    """Return commands that limit the trust in a new role to what it is for, and commands that limit
    it otherwise."""
    role, service, *sources = {
        304: (name, "events", f"arn:aws:events:{AT}:rule/{name}"),
        305: (
            f"{name}-scheduler",
            "scheduler",
            f"arn:aws:scheduler:{AT}:schedule/{name}/{name}",
            f"arn:aws:scheduler:{AT}:schedule-group/{name}",
        ),
        308: (name, "firehose", f"arn:aws:firehose:{AT}:deliverystream/{name}"),
        318: (f"{name}-build", "codebuild", f"arn:aws:codebuild:{AT}:project/{name}"),
    }[template_id]
    also = {"states": {"StringEquals": OURS}} if template_id == 304 else {}
    right: list[Limits] = [{"StringEquals": OURS}]
    wrong: list[Limits] = [
        {"StringEquals": {"aws:SourceAccount": "999999999999"}},
        {"StringEquals": {**OURS, "sts:ExternalId": "x"}},
        {"ArnLike": {"aws:SourceArn": f"{sources[0]}-2"}},
    ]
    for source in sources:
        right += [{"ArnEquals": {"aws:SourceArn": source}}]
        right += [{"ArnLike": {"aws:SourceArn": source}, "StringEquals": OURS}]
    both = {service: right[-1], "states": right[-1]}
    return (
        [trusting(role, **{service: limit}, **also) for limit in right],
        [
            *(trusting(role, **{service: limit}, **also) for limit in wrong),
            *([trusting(role, **both)] if also else []),
        ],
    )


@pytest.mark.sim
@pytest.mark.parametrize("template_id", [304, 305, 308, 318])
def test_a_new_role_may_trust_a_service_for_its_source_alone(slot: Slot, template_id: int) -> None:
    task = instantiate(template_id, 0)
    for right, lines in zip(
        (True, False), trusts(template_id, str(task.params["name"])), strict=True
    ):
        for line in lines:
            episode = Episode(slot, 64)
            run = run_commands(episode, task, [*task.solution[:-1], line, task.solution[-1]])
            assert not run.failures
            assert (run.achieved, run.score == 1.0) == (right, right), (line, episode.missing())


def role_by_template(name: str, kind: str, resource: str, **more: object) -> str:
    """Return the command by which a stack makes the role of template 301 and a policy of a type for
    it."""
    trust = {
        "Effect": "Allow",
        "Principal": {"Service": "lambda.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    role = {
        "RoleName": name,
        "AssumeRolePolicyDocument": {"Version": "2012-10-17", "Statement": [trust]},
    }
    statements = grant("logs:CreateLogStream logs:PutLogEvents", resource)
    policy = {
        "PolicyDocument": {"Version": "2012-10-17", "Statement": statements},
        "Roles": [{"Ref": "R"}],
        **more,
    }
    resources = {
        "R": {"Type": "AWS::IAM::Role", "Properties": role},
        "P": {"Type": f"AWS::IAM::{kind}", "Properties": policy},
    }
    body = json.dumps({"Resources": resources})
    return (
        f"aws cloudformation create-stack --stack-name s --capabilities CAPABILITY_NAMED_IAM "
        f"--template-body '{body}'"
    )


@pytest.mark.sim
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Policy", {"PolicyName": "least"}),
        ("ManagedPolicy", {"ManagedPolicyName": "least"}),
        ("ManagedPolicy", {}),
    ],
)
def test_the_least_grant_by_a_template_is_paid_and_more_is_not(
    slot: Slot, kind: str, more: dict[str, str]
) -> None:
    """The stack of a managed policy was left behind, though the policy was a companion."""
    task = instantiate(301, 0)
    name = str(task.params["name"])
    for resource, right in ((f"/aws/lambda/{name}:*", True), ("*", False)):
        line = role_by_template(name, kind, f"arn:aws:logs:{AT}:log-group:{resource}", **more)
        run = run_commands(Episode(slot, 64), task, [line, *task.solution[1:]])
        assert not run.failures
        assert (run.achieved, run.score == 1.0) == (right, right)


@pytest.mark.parametrize(
    ("source", "action"),
    [
        (f"arn:aws:sqs:{AT}:jobs", "sqs:receivemessage"),
        (f"arn:aws:kinesis:{AT}:stream/jobs", "kinesis:getrecords"),
        (f"arn:aws:dynamodb:{AT}:table/jobs/stream/2026", "dynamodb:getsharditerator"),
    ],
)
def test_a_function_may_read_what_it_is_called_for(source: str, action: str) -> None:
    role = f"arn:aws:iam::{ACCOUNT}:role/r"
    function = f"arn:aws:lambda:{AT}:function:f"
    target: dict[tuple[str, str, str], dict[str, Any]] = {
        ("iam", "roles", "r"): {"Arn": role, "RoleName": "r"},
        ("lambda", "functions", "f"): {"config": {"FunctionArn": function, "Role": role}},
        ("lambda", "esms", "1"): {"EventSourceArn": source, "FunctionArn": f"{function}:live"},
    }
    wanted = read_rights(target, str)
    found = find_companions(target, wanted, str)
    before, after = (str(rights.roles).lower() for rights in (wanted, found.rights))
    assert action in after and action not in before


def test_a_topic_may_send_what_a_subscription_did_not_take() -> None:
    queue = f"arn:aws:sqs:{AT}:dead"
    redrive = {"RedrivePolicy": {"{document}": {"deadLetterTargetArn": queue}}}
    topic = {
        "arn": f"arn:aws:sns:{AT}:t",
        "subscriptions": [{"protocol": "https", "attributes": redrive}],
    }
    target = {
        ("sns", "topics", topic["arn"]): topic,
        ("sqs", "queues", "url"): {"attributes": {"QueueArn": queue}},
    }
    assert find_companions(target, read_rights(target, str), str).policies == {
        "sqs/queues/url/attributes/Policy"
    }


def test_every_row_names_the_page_of_aws_and_reads_its_record() -> None:
    for row in read_wirings():
        assert row.aws.startswith("https://docs.aws.amazon.com/"), row.name
        assert bool(row.principal) is (row.trust or not row.role), row.name
        assert bool(row.actions) is bool(row.resources), row.name
        assert (row.trust or row.actions or row.managed) and (
            row.role or row.source or row.source_arn
        ), row.name
        assert not row.trust or (row.role and row.source and not row.actions), row.name
        jmespath.compile(row.wires)
