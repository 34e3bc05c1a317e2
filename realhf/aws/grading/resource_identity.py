"""Finds out what a request is about: the name of a resource from a name, an ARN or a URL, whatever way it is written;
and which requests serve as well as the one a task names, since they ask the same question or have the same effect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jmespath

from realhf.aws.cli.unsigned_client import REGION
from realhf.aws.tasks.task import ACCOUNT_ID

_SECRET_SUFFIX = re.compile(r"-[A-Za-z0-9]{6}$")
_NAMES: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
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
)
"""By the service of an ARN, where in its resource the name is; elsewhere it is the last part."""
_PARTIAL_FUNCTION = re.compile(r"(?:\d{12}:)?(?:function:)?([\w-]+)(?::[\w$-]+)?")
_OWN_ACCOUNTS, _OWN_REGIONS = frozenset({"", "aws", ACCOUNT_ID}), frozenset({"", REGION})
_QUESTIONS: Mapping[str, tuple[tuple[str, Mapping[str, str]], ...]] = MappingProxyType(
    {
        "cloudformation:ListStackResources": (("cloudformation:DescribeStackResources", {}),),
        "kinesis:DescribeStreamSummary": (("kinesis:DescribeStreamSummary", {"StreamName": "StreamARN"}),),
        "lambda:GetFunctionConfiguration": (("lambda:GetFunction", {}),),
        "logs:DescribeLogStreams": (("logs:DescribeLogStreams", {"logGroupName": "logGroupIdentifier"}),),
        "opensearch:DescribeDomain": (("opensearch:DescribeDomains", {"DomainName": "DomainNames"}),),
        "ecr:ListImages": (("ecr:DescribeImages", {}),),
        "rds:DescribeDBInstances": (
            ("rds:DescribeDBInstances", {"DBInstanceIdentifier": "Filters[?Name=='db-instance-id'].Values[]"}),
        ),
        "s3:ListObjectsV2": (("s3:ListObjects", {}),),
        "ssm:GetParameter": (("ssm:GetParameters", {"Name": "Names"}),),
    }
)
"""For each operation, others with the same answer, and where (JMESPath) they name a parameter otherwise."""

_EFFECTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "dynamodb:PutItem": frozenset({"dynamodb:UpdateItem"}),
        "s3:PutBucketLifecycleConfiguration": frozenset({"s3:PutBucketLifecycle"}),
        "s3:PutBucketNotificationConfiguration": frozenset({"s3:PutBucketNotification"}),
        "s3:PutObject": frozenset({"s3:CopyObject", "s3:CompleteMultipartUpload"}),
        "secretsmanager:PutSecretValue": frozenset({"secretsmanager:UpdateSecret"}),
    }
)
"""For each operation, others about the same resource that can bring the same state about."""


def plain_name(text: str) -> str:
    """Return the name in an ARN or URL. Any other text is a name itself."""
    if text.startswith("arn:"):
        parts = text.split(":", 5)
        service, resource = parts[2] if len(parts) == 6 else "", parts[-1]
        if service == "ssm":
            resource = re.sub(r"^parameter/(?=.+/)", "parameter//", resource)
        found = _NAMES[service].match(resource) if service in _NAMES else None
        name = found[1] if found else resource.rpartition(":")[2].rpartition("/")[2]
        return _SECRET_SUFFIX.sub("", name) if service == "secretsmanager" else name
    if text.startswith(("http://", "https://")):
        return text.rpartition("/")[2]
    return text


def identity(service: str, text: str) -> str:
    """Return what the text means to ``service``; the same for every way to name a resource of this account and region,
    and an ARN of another one stays what it is."""
    if text.startswith("arn:"):
        parts = text.split(":", 5)
        own = len(parts) == 6 and parts[4] in _OWN_ACCOUNTS and parts[3] in _OWN_REGIONS
        return plain_name(text) if own else text
    if service == "lambda":
        found = _PARTIAL_FUNCTION.fullmatch(text)
        return found[1] if found else text
    if service == "route53":
        return text.rstrip(".").lower() if "." in text else text.removeprefix("/hostedzone/")
    return plain_name(text)


def same_meaning(service: str, sent: Any, wanted: Any) -> bool:
    """Return whether a parameter says what is wanted: texts by their identity, lists in any order, one text as a list
    of one. ``wanted`` may be ``{one_of: [...]}``."""
    if isinstance(wanted, Mapping) and set(wanted) == {"one_of"}:
        return any(same_meaning(service, sent, one) for one in wanted["one_of"])
    if isinstance(wanted, list) or isinstance(sent, list):
        return _identities(service, sent) == _identities(service, wanted)
    if isinstance(sent, str) and isinstance(wanted, str):
        return identity(service, sent) == identity(service, wanted)
    return type(sent) is type(wanted) and sent == wanted


def _identities(service: str, values: Any) -> list[str]:
    listed = values if isinstance(values, list) else [values]
    return sorted({identity(service, value) if isinstance(value, str) else repr(value) for value in listed})


def asks(operation: str, params: Mapping[str, Any], wanted_operation: str, wanted: Mapping[str, Any]) -> bool:
    """Return whether a request asks what is wanted, of the same resource."""
    service = operation.partition(":")[0]
    return any(
        operation == other
        and all(
            same_meaning(service, jmespath.search(paths.get(key, key), params), value) for key, value in wanted.items()
        )
        for other, paths in _ways(wanted_operation or operation)
    )


def has_effect(operation: str, wanted_operation: str) -> bool:
    """Return whether an operation may bring about what the wanted one does."""
    return operation == wanted_operation or operation in _EFFECTS.get(wanted_operation, frozenset())


def _ways(operation: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield operation, {}
    yield from _QUESTIONS.get(operation, ())
