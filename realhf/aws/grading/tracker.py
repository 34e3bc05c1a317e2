"""Records what an agent's commands really did: the requests that were sent, as evidence for the grader.

Names: an *evidence* is one sent request with its place in the episode; its *resource* is the name in the operation's
identifying parameter, ARNs and URLs reduced to the name. Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from realhf.aws.grading.resource_identity import identity

if TYPE_CHECKING:
    from realhf.aws.cli.executor import CommandResult

_READ_PREFIXES = ("Get", "List", "Describe", "Head", "BatchGet", "Query", "Scan", "Search", "Lookup", "Filter")

_IDENTIFYING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
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
)
"""For each service, the parameters that identify what a request is about; the first one present counts."""

ROLLBACK_PAIRS: Mapping[str, str] = MappingProxyType(
    {
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
)
"""For each create, the delete that undoes it."""
_POLICY_PAIR = "iam:DetachRolePolicy"
"""The undo whose policy belongs to the identity of what is undone, beside the role."""
_GENERATED_IDS: Mapping[str, str] = MappingProxyType({"apigateway:CreateRestApi": "id"})
"""Creates whose deletes name the resource by an id of the answer."""

MAX_IDEMPOTENT_RETRIES = 3


@dataclass(frozen=True)
class Evidence:
    """Records one sent request. ``index`` counts requests of the episode; ``operation`` is canonical:
    "s3:CreateBucket"; ``command`` is the line that sent it."""

    index: int
    operation: str
    params: Mapping[str, Any]
    resource: str
    ok: bool
    error_code: str
    command: str = ""

    @property
    def service(self) -> str:
        """The service of ``operation``."""
        return self.operation.partition(":")[0]


class Tracker:
    """Records one episode. ``present``: (service, name) of what the setup made."""

    def __init__(self, present: frozenset[tuple[str, str]] = frozenset(), wanted: frozenset[str] = frozenset()) -> None:
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
        """Record one command and what came of it; returns the evidence it added."""
        self.commands.append(command)
        self.last_failed = not result.success
        added = []
        for request in result.requests:
            operation = f"{request.service}:{request.operation}"
            name = resource_name(request.service, request.params)
            index = len(self.evidence)
            added.append(Evidence(index, operation, request.params, name, request.ok, request.error_code, command))
            self.evidence.append(added[-1])
        self._learn_ids(added, result.stdout)
        self._count_rollbacks(added)
        self._retry = self._collision if result.success else None
        self._collision = next(
            ((deed.service, deed.resource) for deed in added if _met_existing(deed, self._present)), None
        )
        return added

    def progressed(self) -> None:
        """Note that the last command brought progress. If the one before it had met something that the set-up had made,
        the agent went on as it should, which counts; a harmless command after a collision brings nothing."""
        if self._retry and self._retry not in self._retried and len(self._retried) < MAX_IDEMPOTENT_RETRIES:
            self._retried.add(self._retry)
            self.idempotent_retries += 1

    def disturbed(self, service: str, name: str) -> None:
        """Note that chaos touched this resource: to delete it is no rollback any more."""
        self._disturbed.add((service, name))

    @property
    def disturbances(self) -> frozenset[tuple[str, str]]:
        """(service, name) of what chaos touched."""
        return frozenset(self._disturbed)

    def _learn_ids(self, added: Sequence[Evidence], output: str) -> None:
        for deed in added:
            if deed.ok and deed.operation in _GENERATED_IDS:
                try:
                    answer = json.loads(output)
                except (ValueError, RecursionError):
                    continue
                if isinstance(answer, dict) and isinstance(answer.get(_GENERATED_IDS[deed.operation]), str):
                    self._ids[answer[_GENERATED_IDS[deed.operation]]] = deed.resource

    def _identity(self, deed: Evidence) -> str:
        """Return the resource of a create or delete, under the name that it was made by."""
        name = self._ids.get(deed.resource, deed.resource)
        pair = (deed.operation, ROLLBACK_PAIRS.get(deed.operation))
        return f"{name} {deed.params.get('PolicyArn')}" if _POLICY_PAIR in pair else name

    def _count_rollbacks(self, added: Sequence[Evidence]) -> None:
        for deed in added:
            if not deed.ok or deed.operation in self._wanted or (deed.service, deed.resource) in self._disturbed:
                continue
            creates = [create for create, delete in ROLLBACK_PAIRS.items() if delete == deed.operation]
            name = self._identity(deed)
            made = any(
                other.ok and other.operation in creates and same_resource(self._identity(other), name)
                for other in self.evidence[: deed.index]
            )
            pair = (deed.operation, name)
            if made and pair not in self._undone:
                self._undone.add(pair)
                self.rollbacks += 1


def resource_name(service: str, params: Mapping[str, Any]) -> str:
    """Return the name a request is about, "" where its service identifies nothing by a parameter."""
    return identifying(service, params)[1]


def identifying(service: str, params: Mapping[str, Any]) -> tuple[str, str]:
    """Return the parameter that says what a request is about, and the name that it gives; "" for both where there is
    none."""
    for key in _IDENTIFYING.get(service, ()):
        value: Any = params
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str):
            return key, identity(service, value)
    return "", ""


def same_resource(one: str, other: str) -> bool:
    """Return whether two names are equal exactly (layer 7): a prefix, a suffix or a substring is another resource."""
    return one == other


def mentions(params: Any, name: str) -> bool:
    """Return whether a text among the parameters holds the name as a word of its own: a longer name is another
    resource."""
    if isinstance(params, str):
        return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", params) is not None
    if isinstance(params, Mapping):
        return any(mentions(value, name) for value in params.values())
    return isinstance(params, list | tuple) and any(mentions(value, name) for value in params)


def is_read(operation: str) -> bool:
    """Return whether an operation only looks (layer 5, no verification reward)."""
    return operation.partition(":")[2].startswith(_READ_PREFIXES)


def _met_existing(deed: Evidence, present: frozenset[tuple[str, str]]) -> bool:
    exists = any(word in deed.error_code for word in ("AlreadyExist", "AlreadyOwned", "InUse", "Exists", "Duplicate"))
    return not deed.ok and exists and (deed.service, deed.resource) in present
