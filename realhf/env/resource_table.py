"""How every kind of resource that a check can name is read from the simulator.

Rows by (service, type), botocore's service names, sorted by service; ``%s`` stands for the name. Used by ``verifier``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from realhf.env.task import ACCOUNT_ID


@dataclass(frozen=True)
class Lookup:
    """How a kind of resource is read: the describing call, where its object lies in the response, and the field
    of it that must equal the name. ``extras`` are further calls, made when an attribute's path starts with
    their key and merged into the object under that key (``""``: merged at the top)."""

    operation: str
    params: Mapping[str, Any]
    root: str = "@"
    name_field: str = ""
    extras: Mapping[str, tuple[str, Mapping[str, Any], str]] = field(default_factory=dict)


_TOPIC_ARN = f"arn:aws:sns:us-east-1:{ACCOUNT_ID}:%s"
_QUEUE_URL = f"http://localhost/{ACCOUNT_ID}/%s"
_STATES_ARN = f"arn:aws:states:us-east-1:{ACCOUNT_ID}:%s:%%s"

RESOURCES: Mapping[tuple[str, str], Lookup] = MappingProxyType(
    {
        ("s3", "bucket"): Lookup(
            "HeadBucket", {"Bucket": "%s"}, extras={"Versioning": ("GetBucketVersioning", {"Bucket": "%s"}, "@")}
        ),
        ("dynamodb", "table"): Lookup("DescribeTable", {"TableName": "%s"}, "Table", "TableName"),
        ("sqs", "queue"): Lookup(
            "GetQueueAttributes", {"QueueUrl": _QUEUE_URL, "AttributeNames": ["All"]}, "Attributes"
        ),
        ("sns", "topic"): Lookup(
            "GetTopicAttributes",
            {"TopicArn": _TOPIC_ARN},
            "Attributes",
            extras={"Subscriptions": ("ListSubscriptionsByTopic", {"TopicArn": _TOPIC_ARN}, "Subscriptions")},
        ),
        ("iam", "user"): Lookup("GetUser", {"UserName": "%s"}, "User", "UserName"),
        ("iam", "group"): Lookup("GetGroup", {"GroupName": "%s"}, "{Path: Group.Path, Users: Users}"),
        ("logs", "log-group"): Lookup("DescribeLogGroups", {"logGroupNamePrefix": "%s"}, "logGroups", "logGroupName"),
        ("ssm", "parameter"): Lookup("GetParameter", {"Name": "%s"}, "Parameter", "Name"),
        ("kinesis", "stream"): Lookup(
            "DescribeStreamSummary", {"StreamName": "%s"}, "StreamDescriptionSummary", "StreamName"
        ),
        ("ecr", "repository"): Lookup(
            "DescribeRepositories", {"repositoryNames": ["%s"]}, "repositories", "repositoryName"
        ),
        ("events", "rule"): Lookup(
            "DescribeRule",
            {"Name": "%s"},
            name_field="Name",
            extras={"Targets": ("ListTargetsByRule", {"Rule": "%s"}, "Targets")},
        ),
        ("secretsmanager", "secret"): Lookup(
            "DescribeSecret",
            {"SecretId": "%s"},
            name_field="Name",
            extras={"Value": ("GetSecretValue", {"SecretId": "%s"}, "@")},
        ),
        ("ecs", "cluster"): Lookup("DescribeClusters", {"clusters": ["%s"]}, "clusters", "clusterName"),
        ("glue", "database"): Lookup("GetDatabase", {"Name": "%s"}, "Database", "Name"),
        ("athena", "work-group"): Lookup("ListWorkGroups", {}, "WorkGroups", "Name"),
        ("autoscaling", "group"): Lookup(
            "DescribeAutoScalingGroups", {"AutoScalingGroupNames": ["%s"]}, "AutoScalingGroups", "AutoScalingGroupName"
        ),
        ("autoscaling", "launch-configuration"): Lookup(
            "DescribeLaunchConfigurations",
            {"LaunchConfigurationNames": ["%s"]},
            "LaunchConfigurations",
            "LaunchConfigurationName",
        ),
        ("backup", "vault"): Lookup("DescribeBackupVault", {"BackupVaultName": "%s"}, name_field="BackupVaultName"),
        ("cloudtrail", "trail"): Lookup(
            "GetTrail", {"Name": "%s"}, "Trail", "Name", extras={"Status": ("GetTrailStatus", {"Name": "%s"}, "@")}
        ),
        ("cloudwatch", "alarm"): Lookup("DescribeAlarms", {"AlarmNames": ["%s"]}, "MetricAlarms", "AlarmName"),
        ("cognito-idp", "user-pool"): Lookup("ListUserPools", {"MaxResults": 60}, "UserPools", "Name"),
        ("ec2", "security-group"): Lookup(
            "DescribeSecurityGroups",
            {"Filters": [{"Name": "group-name", "Values": ["%s"]}]},
            "SecurityGroups",
            "GroupName",
        ),
        ("efs", "file-system"): Lookup("DescribeFileSystems", {"CreationToken": "%s"}, "FileSystems", "CreationToken"),
        ("elasticache", "cluster"): Lookup(
            "DescribeCacheClusters", {"CacheClusterId": "%s"}, "CacheClusters", "CacheClusterId"
        ),
        ("elasticache", "parameter-group"): Lookup(
            "DescribeCacheParameterGroups",
            {"CacheParameterGroupName": "%s"},
            "CacheParameterGroups",
            "CacheParameterGroupName",
        ),
        ("elbv2", "target-group"): Lookup("DescribeTargetGroups", {"Names": ["%s"]}, "TargetGroups", "TargetGroupName"),
        ("firehose", "delivery-stream"): Lookup(
            "DescribeDeliveryStream",
            {"DeliveryStreamName": "%s"},
            "DeliveryStreamDescription",
            "DeliveryStreamName",
        ),
        ("kms", "alias"): Lookup("DescribeKey", {"KeyId": "alias/%s"}, "KeyMetadata"),
        ("lambda", "function"): Lookup("GetFunctionConfiguration", {"FunctionName": "%s"}, name_field="FunctionName"),
        ("opensearch", "domain"): Lookup("DescribeDomain", {"DomainName": "%s"}, "DomainStatus", "DomainName"),
        ("rds", "db-instance"): Lookup(
            "DescribeDBInstances", {"DBInstanceIdentifier": "%s"}, "DBInstances", "DBInstanceIdentifier"
        ),
        ("route53", "hosted-zone"): Lookup("ListHostedZonesByName", {"DNSName": "%s"}, "HostedZones", "Name"),
        ("scheduler", "schedule-group"): Lookup("GetScheduleGroup", {"Name": "%s"}, name_field="Name"),
        ("stepfunctions", "activity"): Lookup(
            "DescribeActivity", {"activityArn": _STATES_ARN % "activity"}, name_field="name"
        ),
        ("stepfunctions", "state-machine"): Lookup(
            "DescribeStateMachine", {"stateMachineArn": _STATES_ARN % "stateMachine"}, name_field="name"
        ),
    }
)
