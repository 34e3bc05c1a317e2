"""Evidence for the grader: the requests that an agent's commands sent, and the resources that they
are about.

One ``Evidence`` is one request, numbered within the episode. Its *resource* is the name in the
operation's identifying parameter, with ARNs and URLs reduced to the name. Source:
docs/reference/environment.md 7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jmespath

from realhf.aws.cli.command_table import READ_PREFIXES
from realhf.aws.cli.pinned_http import REGION
from realhf.aws.tasks.task import ACCOUNT_ID

if TYPE_CHECKING:
    from realhf.aws.cli.executor import CommandResult

_SECRET_SUFFIX = re.compile(r"-[A-Za-z0-9]{6}$")
"""The random suffix that Secrets Manager appends to a secret's name in the ARN."""
_NAMES: Mapping[str, re.Pattern[str]] = {
    "s3": re.compile(r"([^/]+)"),
    "dynamodb": re.compile(r"table/([^/]+)"),
    "kinesis": re.compile(r"stream/([^/]+)"),
    "lambda": re.compile(r"function:([^:]+)"),
    "logs": re.compile(r"log-group:([^:]+)"),
    "secretsmanager": re.compile(r"secret:(.+)"),
    "ssm": re.compile(r"parameter/?(/.+|[^/]+$)"),
    "ecr": re.compile(r"repository/(.+)"),
    "ecs": re.compile(r"task-definition/([^:]+)"),
    "kms": re.compile(r"(alias/.+)"),
    "cloudformation": re.compile(r"stack/([^/]+)"),
    "elasticloadbalancing": re.compile(r"(?:targetgroup|loadbalancer/\w+)/([^/]+)/[^/]+$"),
    "autoscaling": re.compile(r".*autoScalingGroupName/([^:]+)"),
}
"""Patterns that find the name in the resource part of an ARN, by service. For other services the
name is the last part."""
_PARTIAL_FUNCTION = re.compile(r"(?:\d{12}:)?(?:function:)?([\w-]+)(?::[\w$-]+)?")
"""A function name, a partial ARN, or a name with a qualifier, all of which Lambda accepts."""
_OWN_ACCOUNTS = frozenset({"", "aws", ACCOUNT_ID})
_OWN_REGIONS = frozenset({"", REGION})
"""Account ids and regions in ARNs of resources of the simulated account."""


@dataclass(frozen=True)
class _Question:
    """A read operation whose answer shows the requested information."""

    operation: str
    names: Mapping[str, str] = field(default_factory=dict)
    """JMESPath of a required parameter among this operation's parameters, where the name
    differs."""
    narrowed_by: tuple[str, ...] = ()
    """Parameters that remove part of the requested information from the answer."""


def _only_filter(filters: str, key: str, value: str) -> str:
    """Return a JMESPath expression for the values of the filter whose ``key`` is ``value``. The
    expression matches nothing if the request has other filters as well."""
    return f"!{filters}[1] && {filters}[?{key}=='{value}'].Values[]"


_QUESTIONS: Mapping[str, tuple[_Question, ...]] = {
    "cloudformation:ListStackResources": (
        _Question("cloudformation:ListStackResources"),
        _Question(
            "cloudformation:DescribeStackResources",
            narrowed_by=("LogicalResourceId", "PhysicalResourceId"),
        ),
        _Question(
            "resourcegroupstaggingapi:GetResources",
            {"StackName": _only_filter("TagFilters", "Key", "aws:cloudformation:stack-name")},
            narrowed_by=("ResourceTypeFilters",),
        ),
    ),
    "cloudwatch:DescribeAlarms": (
        _Question("cloudwatch:DescribeAlarms", narrowed_by=("StateValue", "ActionPrefix")),
    ),
    "ecr:ListImages": (
        _Question("ecr:ListImages", narrowed_by=("filter",)),
        _Question("ecr:DescribeImages", narrowed_by=("filter", "imageIds")),
    ),
    "events:DescribeRule": (
        _Question("events:DescribeRule"),
        _Question("events:ListRules", {"Name": "NamePrefix"}),
    ),
    "kinesis:DescribeStreamSummary": (
        _Question("kinesis:DescribeStreamSummary"),
        _Question("kinesis:DescribeStreamSummary", {"StreamName": "StreamARN"}),
        _Question("kinesis:DescribeStream", narrowed_by=("ExclusiveStartShardId",)),
        _Question(
            "kinesis:DescribeStream",
            {"StreamName": "StreamARN"},
            narrowed_by=("ExclusiveStartShardId",),
        ),
    ),
    "lambda:GetFunctionConfiguration": (
        _Question("lambda:GetFunctionConfiguration"),
        _Question("lambda:GetFunction"),
        _Question("lambda:ListVersionsByFunction"),
    ),
    "logs:DescribeLogStreams": (
        _Question("logs:DescribeLogStreams", narrowed_by=("logStreamNamePrefix",)),
        _Question(
            "logs:DescribeLogStreams",
            {"logGroupName": "logGroupIdentifier"},
            narrowed_by=("logStreamNamePrefix",),
        ),
    ),
    "opensearch:DescribeDomain": (
        _Question("opensearch:DescribeDomain"),
        _Question("opensearch:DescribeDomains", {"DomainName": "DomainNames"}),
        _Question("opensearch:DescribeDomainConfig"),
    ),
    "rds:DescribeDBInstances": (
        _Question("rds:DescribeDBInstances", narrowed_by=("Filters",)),
        _Question(
            "rds:DescribeDBInstances",
            {"DBInstanceIdentifier": _only_filter("Filters", "Name", "db-instance-id")},
        ),
    ),
    "s3:ListObjectsV2": (
        _Question("s3:ListObjectsV2", narrowed_by=("Prefix", "StartAfter")),
        _Question("s3:ListObjects", narrowed_by=("Prefix", "Marker")),
        _Question("s3:ListObjectVersions", narrowed_by=("Prefix", "KeyMarker")),
    ),
    "secretsmanager:DescribeSecret": (
        _Question("secretsmanager:DescribeSecret"),
        _Question(
            "secretsmanager:ListSecrets", {"SecretId": _only_filter("Filters", "Key", "name")}
        ),
    ),
    "sqs:GetQueueUrl": (
        _Question("sqs:GetQueueUrl"),
        _Question("sqs:ListQueues", {"QueueName": "QueueNamePrefix"}),
    ),
    "ssm:GetParameter": (
        _Question("ssm:GetParameter"),
        _Question("ssm:GetParameters", {"Name": "Names"}),
        _Question("ssm:GetParameterHistory"),
    ),
}
"""For each read operation, all operations that answer the same question. An operation that is not
listed has no equivalent."""
_EFFECTS: Mapping[str, frozenset[str]] = {
    "dynamodb:PutItem": frozenset({"dynamodb:UpdateItem"}),
    "s3:PutBucketLifecycleConfiguration": frozenset({"s3:PutBucketLifecycle"}),
    "s3:PutBucketNotificationConfiguration": frozenset({"s3:PutBucketNotification"}),
    "s3:PutObject": frozenset({"s3:CopyObject", "s3:CompleteMultipartUpload"}),
    "secretsmanager:PutSecretValue": frozenset({"secretsmanager:UpdateSecret"}),
}
"""For each write operation, the other operations on the same resource that can produce the same
state."""


def plain_name(text: str) -> str:
    """Return the name in an ARN or URL. Any other string is itself a name."""
    if text.startswith("arn:"):
        parts = text.split(":", 5)
        service = parts[2] if len(parts) == 6 else ""
        resource = parts[-1]
        if service == "ssm":
            resource = re.sub(r"^parameter/(?=.+/)", "parameter//", resource)
        match = _NAMES[service].match(resource) if service in _NAMES else None
        name = match[1] if match else resource.rpartition(":")[2].rpartition("/")[2]
        return _SECRET_SUFFIX.sub("", name) if service == "secretsmanager" else name
    if text.startswith(("http://", "https://")):
        return text.rpartition("/")[2]
    return text


def identity(service: str, text: str) -> str:
    """Return the canonical form of a service's resource name, ARN or URL.

    All ways to name a resource in this account and region have the same canonical form. An ARN in
    another account or region is returned unchanged.
    """
    if text.startswith("arn:"):
        parts = text.split(":", 5)
        own = len(parts) == 6 and parts[4] in _OWN_ACCOUNTS and parts[3] in _OWN_REGIONS
        return plain_name(text) if own else text
    if service == "lambda":
        match = _PARTIAL_FUNCTION.fullmatch(text)
        return match[1] if match else text
    if service == "route53":
        return text.rstrip(".").lower() if "." in text else text.removeprefix("/hostedzone/")
    return plain_name(text)


def same_meaning(service: str, sent: Any, wanted: Any) -> bool:
    """Return whether the value that a parameter has means the same as the wanted value.

    Strings are compared by their ``identity``, and lists in any order. A single string equals a
    list that contains only it. ``wanted`` may be ``{one_of: [...]}``.
    """
    if isinstance(wanted, Mapping) and set(wanted) == {"one_of"}:
        return any(same_meaning(service, sent, one) for one in wanted["one_of"])
    if isinstance(wanted, list) or isinstance(sent, list):
        return _identities(service, sent) == _identities(service, wanted)
    if isinstance(sent, str) and isinstance(wanted, str):
        return identity(service, sent) == identity(service, wanted)
    return type(sent) is type(wanted) and sent == wanted


def _identities(service: str, values: Any) -> list[str]:
    """Return the canonical forms of a value or of a list's values, sorted."""
    listed = values if isinstance(values, list) else [values]
    return sorted(
        {identity(service, value) if isinstance(value, str) else repr(value) for value in listed}
    )


def answers_question(
    operation: str, params: Mapping[str, Any], wanted_operation: str, wanted: Mapping[str, Any]
) -> bool:
    """Return whether the answer to a request shows the wanted information about the wanted
    resource.

    ``wanted``: the parameters that the task requires. A parameter that narrows the answer is
    accepted only if the task requires it.
    """
    service = operation.partition(":")[0]
    question_operation = wanted_operation or operation
    return any(
        operation == question.operation
        and not any(params.get(name) for name in question.narrowed_by if name not in wanted)
        and all(
            same_meaning(service, jmespath.search(question.names.get(key, key), params), value)
            for key, value in wanted.items()
        )
        for question in _QUESTIONS.get(question_operation, (_Question(question_operation),))
    )


def has_effect(operation: str, wanted_operation: str) -> bool:
    """Return whether an operation can produce the same state as the wanted operation."""
    return operation == wanted_operation or operation in _EFFECTS.get(wanted_operation, frozenset())


_STATEMENTS: Mapping[str, str] = {
    "dynamodb:BatchExecuteStatement": "Statements[].Statement",
    "dynamodb:ExecuteStatement": "[Statement]",
    "dynamodb:ExecuteTransaction": "TransactStatements[].Statement",
}
"""JMESPath of the PartiQL statements in an operation's parameters. The statements determine whether
the request reads or writes."""
_IDENTIFYING: Mapping[str, tuple[str, ...]] = {
    "s3": ("Bucket",),
    "dynamodb": ("TableName",),
    "sqs": ("QueueName", "QueueUrl"),
    "sns": ("Name", "TopicArn", "SubscriptionArn"),
    "iam": ("GroupName", "RoleName", "UserName", "PolicyName", "PolicyArn", "InstanceProfileName"),
    "lambda": ("FunctionName",),
    "logs": ("logGroupName",),
    "ssm": ("Name", "ResourceId"),
    "kinesis": ("StreamName", "StreamARN"),
    "ecr": ("repositoryName",),
    "events": ("Rule", "Name"),
    "secretsmanager": ("SecretId", "Name"),
    "ecs": ("clusterName", "cluster", "family"),
    "glue": ("DatabaseName", "DatabaseInput.Name", "Name"),
    "acm": ("DomainName",),
    "apigateway": ("pathPart", "restApiId", "name"),
    "apigatewayv2": ("Name", "ApiId"),
    "athena": ("Name", "WorkGroup"),
    "autoscaling": ("AutoScalingGroupName", "LaunchConfigurationName"),
    "backup": ("BackupVaultName",),
    "cloudtrail": ("Name",),
    "cloudwatch": ("AlarmName",),
    "codebuild": ("name",),
    "cognito-idp": ("PoolName", "Username", "GroupName", "UserPoolId"),
    "ec2": ("GroupName", "LaunchTemplateName"),
    "efs": ("CreationToken", "FileSystemId"),
    "elasticache": ("CacheClusterId", "CacheParameterGroupName", "CacheSubnetGroupName"),
    "elbv2": ("Name",),
    "firehose": ("DeliveryStreamName",),
    "kms": ("AliasName", "KeyId"),
    "opensearch": ("DomainName",),
    "rds": ("DBInstanceIdentifier", "DBSubnetGroupName", "DBParameterGroupName"),
    "route53": ("Name", "HostedZoneId"),
    "scheduler": ("GroupName", "Name"),
    "stepfunctions": ("name", "activityArn", "stateMachineArn"),
}
"""For each service, the parameters that can identify a request's resource. The first one present in
the request counts."""
ROLLBACK_PAIRS: Mapping[str, str] = {
    "s3:CreateBucket": "s3:DeleteBucket",
    "s3:PutBucketPolicy": "s3:DeleteBucketPolicy",
    "dynamodb:CreateTable": "dynamodb:DeleteTable",
    "lambda:CreateFunction": "lambda:DeleteFunction",
    "sqs:CreateQueue": "sqs:DeleteQueue",
    "sns:CreateTopic": "sns:DeleteTopic",
    "iam:CreateRole": "iam:DeleteRole",
    "iam:AttachRolePolicy": "iam:DetachRolePolicy",
    "secretsmanager:CreateSecret": "secretsmanager:DeleteSecret",
    "apigateway:CreateRestApi": "apigateway:DeleteRestApi",
}
"""The delete operation that undoes a create operation."""
_POLICY_PAIR = "iam:DetachRolePolicy"
"""The delete operation whose target is a policy on a role, so that it is identified by both."""
_GENERATED_IDS: Mapping[str, str] = {"apigateway:CreateRestApi": "id"}
"""Create operations whose delete operations name the resource by a generated id, with the field of
the create answer that contains the id."""
MAX_IDEMPOTENT_RETRIES = 3
"""Maximum number of idempotent retries that are rewarded per episode."""


@dataclass(frozen=True)
class Evidence:
    """One request that an agent's command sent."""

    index: int
    """Number of the request within the episode, from 0."""
    operation: str
    """Operation as "service:Operation", e.g. "s3:CreateBucket"."""
    params: Mapping[str, Any]
    """Parameters of the request."""
    resource: str
    """Name of the resource that the request is about, or "" if there is none."""
    ok: bool
    """Whether the request was accepted."""
    error_code: str
    """Error code if the request was rejected."""
    command: str = ""
    """The command line that sent the request."""

    @property
    def service(self) -> str:
        """The service of ``operation``."""
        return self.operation.partition(":")[0]

    @property
    def reads(self) -> bool:
        """Whether the request only reads."""
        return is_read(self.operation, self.params)


class Tracker:
    """Record of the commands and requests of one episode.

    ``present``: (service, name) of the resources that the set-up created. ``wanted``: operations
    that the task's criteria name; they never count as rollbacks.
    """

    def __init__(
        self,
        present: frozenset[tuple[str, str]] = frozenset(),
        wanted: frozenset[str] = frozenset(),
    ) -> None:
        self.commands: list[str] = []
        self.evidence: list[Evidence] = []
        self.last_failed = False
        self.rollbacks = 0
        self.idempotent_retries = 0
        self._present = present
        self._wanted = wanted
        self._undone: set[tuple[str, str]] = set()
        self._retried: set[tuple[str, str]] = set()
        self._disturbed: set[tuple[str, str]] = set()
        self._ids: dict[str, str] = {}
        self._collision: tuple[str, str] | None = None
        self._retry: tuple[str, str] | None = None

    def record(self, command: str, result: CommandResult) -> list[Evidence]:
        """Record one command and its result. Return the requests that it sent."""
        self.commands.append(command)
        self.last_failed = not result.success
        added = []
        for sent in result.requests:
            operation = f"{sent.service}:{sent.operation}"
            name = resource_name(sent.service, sent.params)
            index = len(self.evidence)
            added.append(
                Evidence(index, operation, sent.params, name, sent.ok, sent.error_code, command)
            )
            self.evidence.append(added[-1])
        self._learn_ids(added, result.stdout)
        self._count_rollbacks(added)
        self._retry = self._collision if result.success else None
        self._collision = next(
            (
                (request.service, request.resource)
                for request in added
                if _collides(request, self._present)
            ),
            None,
        )
        return added

    def record_progress(self) -> None:
        """Record that the last command made progress.

        If the command before it failed because a resource of the set-up already existed, this
        counts as an idempotent retry, because the agent continued correctly. A command after such a
        failure that makes no progress earns nothing.
        """
        if (
            self._retry
            and self._retry not in self._retried
            and len(self._retried) < MAX_IDEMPOTENT_RETRIES
        ):
            self._retried.add(self._retry)
            self.idempotent_retries += 1

    def record_disturbance(self, service: str, name: str) -> None:
        """Record that chaos changed this resource. Deleting it no longer counts as a rollback."""
        self._disturbed.add((service, name))

    @property
    def disturbances(self) -> frozenset[tuple[str, str]]:
        """(service, name) of the resources that chaos changed."""
        return frozenset(self._disturbed)

    def _learn_ids(self, added: Sequence[Evidence], output: str) -> None:
        """Store the generated ids that create requests returned, with the resource's name."""
        for request in added:
            if request.ok and request.operation in _GENERATED_IDS:
                try:
                    answer = json.loads(output)
                except (ValueError, RecursionError):
                    continue
                if isinstance(answer, dict) and isinstance(
                    answer.get(_GENERATED_IDS[request.operation]), str
                ):
                    self._ids[answer[_GENERATED_IDS[request.operation]]] = request.resource

    def _identity(self, request: Evidence) -> str:
        """Return the name that the resource of a create or delete request was created with."""
        name = self._ids.get(request.resource, request.resource)
        pair = (request.operation, ROLLBACK_PAIRS.get(request.operation))
        return f"{name} {request.params.get('PolicyArn')}" if _POLICY_PAIR in pair else name

    def _count_rollbacks(self, added: Sequence[Evidence]) -> None:
        """Count deletions of resources that the agent itself created as rollbacks, once per
        resource."""
        for request in added:
            if (
                not request.ok
                or request.operation in self._wanted
                or (request.service, request.resource) in self._disturbed
            ):
                continue
            creates = [
                create for create, delete in ROLLBACK_PAIRS.items() if delete == request.operation
            ]
            name = self._identity(request)
            made = any(
                other.ok
                and other.operation in creates
                and same_resource(self._identity(other), name)
                for other in self.evidence[: request.index]
            )
            pair = (request.operation, name)
            if made and pair not in self._undone:
                self._undone.add(pair)
                self.rollbacks += 1


def resource_name(service: str, params: Mapping[str, Any]) -> str:
    """Return the name of the resource that a request is about, or "" if no parameter identifies
    one."""
    return identifying_parameter(service, params)[1]


def identifying_parameter(service: str, params: Mapping[str, Any]) -> tuple[str, str]:
    """Return (parameter that identifies the request's resource, name of the resource).

    Both are "" if there is no such parameter.
    """
    for key in _IDENTIFYING.get(service, ()):
        value: Any = params
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str):
            return key, identity(service, value)
    return "", ""


def same_resource(one: str, other: str) -> bool:
    """Return whether two names are exactly equal (layer 7 of the ``grader`` module docstring). A
    prefix, suffix or substring names a different resource."""
    return one == other


def mentions(params: Any, name: str) -> bool:
    """Return whether a string among the parameters contains ``name`` as a whole word."""
    if isinstance(params, str):
        return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", params) is not None
    if isinstance(params, Mapping):
        return any(mentions(value, name) for value in params.values())
    return isinstance(params, list | tuple) and any(mentions(value, name) for value in params)


def is_read(operation: str, params: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Return whether an operation only reads; reads earn no credit (layer 5 of the ``grader``
    module docstring).

    With ``params``, a PartiQL request is classified by its statements.
    """
    if operation in _STATEMENTS:
        statements = jmespath.search(_STATEMENTS[operation], params) or [""]
        return all(
            isinstance(one, str) and one.lstrip().upper().startswith("SELECT") for one in statements
        )
    return operation.partition(":")[2].startswith(READ_PREFIXES)


def _collides(request: Evidence, present: frozenset[tuple[str, str]]) -> bool:
    """Return whether a request failed because it would create a resource that the set-up had
    already created."""
    exists = any(
        word in request.error_code
        for word in ("AlreadyExist", "AlreadyOwned", "InUse", "Exists", "Duplicate")
    )
    return not request.ok and exists and (request.service, request.resource) in present
