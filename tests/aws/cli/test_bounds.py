"""What a request may ask for has bounds, whatever its spelling was."""

from __future__ import annotations

from typing import Any

import botocore.session
import pytest

from realhf.aws.cli.warm_cli import MAX_ALIASES, has_many_aliases, too_much

_SESSION = botocore.session.Session()


def _too_much(service: str, operation: str, params: Any) -> str:
    return too_much(_SESSION.get_service_model(service).operation_model(operation), params)


@pytest.mark.parametrize(
    ("service", "operation", "params", "member"),
    [
        ("kinesis", "CreateStream", {"ShardCount": 101}, "ShardCount"),
        ("kinesis", "UpdateShardCount", {"TargetShardCount": 1 << 40}, "TargetShardCount"),
        ("ec2", "RunInstances", {"MinCount": 1, "MaxCount": 40_000}, "MaxCount"),
        ("elasticache", "CreateCacheCluster", {"NumCacheNodes": 2_000}, "NumCacheNodes"),
        ("ecs", "CreateService", {"desiredCount": 5_000}, "desiredCount"),
        ("autoscaling", "CreateAutoScalingGroup", {"MinSize": 1, "MaxSize": 101}, "MaxSize"),
        ("opensearch", "CreateDomain", {"ClusterConfig": {"InstanceCount": 999}}, "InstanceCount"),
        ("events", "PutTargets", {"Targets": [{"EcsParameters": {"TaskCount": 999}}]}, "TaskCount"),
    ],
)
def test_counts_are_bounded_wherever_they_stand(service: str, operation: str, params: Any, member: str) -> None:
    assert _too_much(service, operation, params).startswith(f"{member} may be ")


@pytest.mark.parametrize(
    ("service", "operation", "params"),
    [
        ("kinesis", "CreateStream", {"ShardCount": 100}),
        ("dynamodb", "CreateTable", {"ProvisionedThroughput": {"ReadCapacityUnits": 40_000}}),
        ("ec2", "CreateVolume", {"Size": 16_384}),
        ("lambda", "PutFunctionConcurrency", {"ReservedConcurrentExecutions": 1_000}),
        ("kinesis", "CreateStream", {"ShardCount": "many", "Unknown": 10**9}),
        ("s3", "PutObject", {"Body": b"&a *a " * 100}),
        ("lambda", "CreateFunction", {"Code": {"ZipFile": b"PK\x03\x04" + bytes(range(256)) * 800}}),
        ("cloudwatch", "PutMetricData", {"MetricData": [{"StatisticValues": {"SampleCount": 1_000.0}}]}),
    ],
)
def test_other_numbers_are_left_alone(service: str, operation: str, params: Any) -> None:
    assert _too_much(service, operation, params) == ""


def test_a_deep_document_is_walked() -> None:
    deep: Any = {"S": "x"}
    for _ in range(5_000):
        deep = {"L": [deep]}
    assert _too_much("dynamodb", "PutItem", {"Item": {"k": deep}}) == ""


BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 30))])


def test_a_document_that_unfolds_is_refused() -> None:
    """Thirty lines that stand for a thousand million words used to keep a simulator busy until it counted as broken."""
    assert _too_much("cloudformation", "CreateStack", {"TemplateBody": BOMB}) != ""
    assert _too_much("apigateway", "ImportRestApi", {"body": BOMB.encode()}) != ""
    assert has_many_aliases(BOMB.replace("\n", "\r\n")) and has_many_aliases("x: !Ref y\n" + BOMB)
    assert has_many_aliases(BOMB + "\n\x01"), "what one reader of YAML does not read, another may"
    assert not has_many_aliases("\n".join(BOMB.split("\n")[: MAX_ALIASES // 2 + 1]))


@pytest.mark.parametrize("text", ["&a " * 50, "* & " * 50, '{"Action": "*", "x": "&y"}' * 50, "**bold** & *so* " * 50])
def test_stars_and_ampersands_are_no_aliases(text: str) -> None:
    assert not has_many_aliases(text)
