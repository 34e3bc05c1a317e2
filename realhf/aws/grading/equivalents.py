"""Lists requests that serve as well as the one a task names: they ask the same question, or have the same effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from realhf.aws.grading.resource_identity import same_meaning
from realhf.aws.grading.verifier import search

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
"""For each operation, others about the same resource that can bring the same state about; the state is checked
anyway."""


def asks(operation: str, params: Mapping[str, Any], wanted_operation: str, wanted: Mapping[str, Any]) -> bool:
    """Return whether a request asks what is wanted, of the same resource."""
    service = operation.partition(":")[0]
    return any(
        operation == other
        and all(same_meaning(service, search(paths.get(key, key), params), value) for key, value in wanted.items())
        for other, paths in _ways(wanted_operation or operation)
    )


def has_effect(operation: str, wanted_operation: str) -> bool:
    """Return whether an operation may bring about what the wanted one does."""
    return operation == wanted_operation or operation in _EFFECTS.get(wanted_operation, frozenset())


def _ways(operation: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield operation, {}
    yield from _QUESTIONS.get(operation, ())
