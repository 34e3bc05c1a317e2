"""Says how every kind of resource that a check can name is read from the simulator.

Rows are by (service, type), botocore's service names, sorted by service; ``%s`` stands for the name. ``verifier`` uses
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from realhf.aws.tasks.task import ACCOUNT_ID

Extra = tuple[str, Mapping[str, Any], str]
"""A further call: operation, params and the path to what is kept of the answer."""


@dataclass(frozen=True)
class Lookup:
    """How a kind of resource is read: the describing call, where its object lies in the response, and the field
    of it that must equal the name. ``extras`` are further calls (operation, of another service "ec2:...", params,
    path): made when an attribute's path names their key, put into the object under it. ``%(path)s`` in their params is
    what the path finds in it, extras of rows above included; where that is nothing, the extra is null."""

    operation: str
    params: Mapping[str, Any]
    root: str = "@"
    name_field: str = ""
    extras: Mapping[str, Extra] = field(default_factory=dict)


_TOPIC_ARN = f"arn:aws:sns:us-east-1:{ACCOUNT_ID}:%s"
_QUEUE_URL = f"http://localhost/{ACCOUNT_ID}/%s"


def _bucket(operation: str, path: str) -> tuple[str, Mapping[str, Any], str]:
    return operation, {"Bucket": "%s"}, path


def _in_vpc(operation: str, field_name: str, path: str) -> tuple[str, Mapping[str, Any], str]:
    return operation, {"Filters": [{"Name": field_name, "Values": ["%(VpcId)s"]}]}, path


_STATES_ARN = f"arn:aws:states:us-east-1:{ACCOUNT_ID}:%s:%%s"

RESOURCES: Mapping[tuple[str, str], Lookup] = MappingProxyType(
    {
        ("s3", "bucket"): Lookup(
            "HeadBucket",
            {"Bucket": "%s"},
            extras={
                "Versioning": _bucket("GetBucketVersioning", "@"),
                "Encryption": _bucket("GetBucketEncryption", "ServerSideEncryptionConfiguration.Rules[0]"),
                "Lifecycle": _bucket("GetBucketLifecycleConfiguration", "Rules"),
                "Notification": _bucket("GetBucketNotificationConfiguration", "@"),
                "BucketPolicy": _bucket("GetBucketPolicy", "Policy"),
                "PublicAccess": _bucket("GetPublicAccessBlock", "PublicAccessBlockConfiguration"),
            },
        ),
        ("dynamodb", "table"): Lookup(
            "DescribeTable",
            {"TableName": "%s"},
            "Table",
            "TableName",
            extras={
                "TimeToLive": ("DescribeTimeToLive", {"TableName": "%s"}, "TimeToLiveDescription"),
                "Recovery": (
                    "DescribeContinuousBackups",
                    {"TableName": "%s"},
                    "ContinuousBackupsDescription.PointInTimeRecoveryDescription.PointInTimeRecoveryStatus",
                ),
            },
        ),
        ("sqs", "queue"): Lookup(
            "GetQueueAttributes", {"QueueUrl": _QUEUE_URL, "AttributeNames": ["All"]}, "Attributes"
        ),
        ("sns", "topic"): Lookup(
            "GetTopicAttributes",
            {"TopicArn": _TOPIC_ARN},
            "Attributes",
            extras={"Subscriptions": ("ListSubscriptionsByTopic", {"TopicArn": _TOPIC_ARN}, "Subscriptions")},
        ),
        ("iam", "user"): Lookup(
            "GetUser",
            {"UserName": "%s"},
            "User",
            "UserName",
            extras={
                "Attached": ("ListAttachedUserPolicies", {"UserName": "%s"}, "AttachedPolicies[].PolicyArn"),
                "Inline": ("ListUserPolicies", {"UserName": "%s"}, "PolicyNames"),
            },
        ),
        ("iam", "group"): Lookup(
            "GetGroup",
            {"GroupName": "%s"},
            "{Path: Group.Path, Users: Users}",
            extras={"Attached": ("ListAttachedGroupPolicies", {"GroupName": "%s"}, "AttachedPolicies[].PolicyArn")},
        ),
        ("iam", "policy"): Lookup("ListPolicies", {"Scope": "Local"}, "Policies", "PolicyName"),
        ("iam", "instance-profile"): Lookup(
            "GetInstanceProfile", {"InstanceProfileName": "%s"}, "InstanceProfile", "InstanceProfileName"
        ),
        ("iam", "role"): Lookup(
            "GetRole",
            {"RoleName": "%s"},
            "Role",
            "RoleName",
            extras={
                "Attached": ("ListAttachedRolePolicies", {"RoleName": "%s"}, "AttachedPolicies[].PolicyArn"),
                "Inline": ("ListRolePolicies", {"RoleName": "%s"}, "PolicyNames"),
                "FirstInline": (
                    "GetRolePolicy",
                    {"RoleName": "%s", "PolicyName": "%(Inline[0])s"},
                    "PolicyDocument",
                ),
            },
        ),
        ("logs", "log-group"): Lookup(
            "DescribeLogGroups",
            {"logGroupNamePrefix": "%s"},
            "logGroups",
            "logGroupName",
            extras={"MetricFilters": ("DescribeMetricFilters", {"logGroupName": "%s"}, "metricFilters")},
        ),
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
        ("apigateway", "rest-api"): Lookup("GetRestApis", {}, "items", "name"),
        ("cloudformation", "stack"): Lookup("DescribeStacks", {"StackName": "%s"}, "Stacks", "StackName"),
        ("acm", "certificate"): Lookup(
            "ListCertificates",
            {},
            "CertificateSummaryList",
            "DomainName",
            extras={"Details": ("DescribeCertificate", {"CertificateArn": "%(CertificateArn)s"}, "Certificate")},
        ),
        ("apigatewayv2", "api"): Lookup(
            "GetApis",
            {},
            "Items",
            "Name",
            extras={
                "Authorizers": ("GetAuthorizers", {"ApiId": "%(ApiId)s"}, "Items"),
                "Routes": ("GetRoutes", {"ApiId": "%(ApiId)s"}, "Items"),
                "Stages": ("GetStages", {"ApiId": "%(ApiId)s"}, "Items"),
                "Pools": ("cognito-idp:ListUserPools", {"MaxResults": 60}, "UserPools"),
                "PoolClients": (
                    "cognito-idp:ListUserPoolClients",
                    {"UserPoolId": "%(Pools[?Name=='%s'].Id | [0])s", "MaxResults": 60},
                    "UserPoolClients",
                ),
            },
        ),
        ("athena", "work-group"): Lookup(
            "ListWorkGroups",
            {},
            "WorkGroups",
            "Name",
            extras={
                "Configuration": ("GetWorkGroup", {"WorkGroup": "%s"}, "WorkGroup.Configuration"),
                "NamedQueryIds": ("ListNamedQueries", {"WorkGroup": "%s"}, "NamedQueryIds"),
                "Queries": ("BatchGetNamedQuery", {"NamedQueryIds": "%(NamedQueryIds)s"}, "NamedQueries"),
            },
        ),
        ("autoscaling", "group"): Lookup(
            "DescribeAutoScalingGroups",
            {"AutoScalingGroupNames": ["%s"]},
            "AutoScalingGroups",
            "AutoScalingGroupName",
            extras={"Policies": ("DescribePolicies", {"AutoScalingGroupName": "%s"}, "ScalingPolicies")},
        ),
        ("autoscaling", "launch-configuration"): Lookup(
            "DescribeLaunchConfigurations",
            {"LaunchConfigurationNames": ["%s"]},
            "LaunchConfigurations",
            "LaunchConfigurationName",
        ),
        ("backup", "plan"): Lookup(
            "ListBackupPlans",
            {},
            "BackupPlansList",
            "BackupPlanName",
            extras={
                "Rules": ("GetBackupPlan", {"BackupPlanId": "%(BackupPlanId)s"}, "BackupPlan.Rules"),
                "Selections": ("ListBackupSelections", {"BackupPlanId": "%(BackupPlanId)s"}, "BackupSelectionsList"),
                "FirstSelection": (
                    "GetBackupSelection",
                    {"BackupPlanId": "%(BackupPlanId)s", "SelectionId": "%(Selections[0].SelectionId)s"},
                    "BackupSelection",
                ),
            },
        ),
        ("backup", "vault"): Lookup("DescribeBackupVault", {"BackupVaultName": "%s"}, name_field="BackupVaultName"),
        ("cloudtrail", "trail"): Lookup(
            "GetTrail", {"Name": "%s"}, "Trail", "Name", extras={"Status": ("GetTrailStatus", {"Name": "%s"}, "@")}
        ),
        ("cloudwatch", "alarm"): Lookup("DescribeAlarms", {"AlarmNames": ["%s"]}, "MetricAlarms", "AlarmName"),
        ("codebuild", "project"): Lookup("BatchGetProjects", {"names": ["%s"]}, "projects", "name"),
        ("cognito-idp", "user-pool"): Lookup(
            "ListUserPools",
            {"MaxResults": 60},
            "UserPools",
            "Name",
            extras={
                "Clients": ("ListUserPoolClients", {"UserPoolId": "%(Id)s", "MaxResults": 60}, "UserPoolClients"),
                "Groups": ("ListGroups", {"UserPoolId": "%(Id)s"}, "Groups"),
                "PasswordPolicy": ("DescribeUserPool", {"UserPoolId": "%(Id)s"}, "UserPool.Policies.PasswordPolicy"),
            },
        ),
        ("ec2", "launch-template"): Lookup(
            "DescribeLaunchTemplates",
            {"LaunchTemplateNames": ["%s"]},
            "LaunchTemplates",
            "LaunchTemplateName",
            extras={
                "Data": (
                    "DescribeLaunchTemplateVersions",
                    {"LaunchTemplateName": "%s"},
                    "LaunchTemplateVersions[-1].LaunchTemplateData",
                )
            },
        ),
        ("ec2", "security-group"): Lookup(
            "DescribeSecurityGroups",
            {"Filters": [{"Name": "group-name", "Values": ["%s"]}]},
            "SecurityGroups",
            "GroupName",
        ),
        ("ec2", "vpc"): Lookup(
            "DescribeVpcs",
            {"Filters": [{"Name": "tag:Name", "Values": ["%s"]}]},
            "Vpcs",
            extras={
                "Subnets": _in_vpc("DescribeSubnets", "vpc-id", "Subnets"),
                "RouteTables": _in_vpc("DescribeRouteTables", "vpc-id", "RouteTables"),
                "SecurityGroups": _in_vpc("DescribeSecurityGroups", "vpc-id", "SecurityGroups"),
                "Gateways": _in_vpc("DescribeInternetGateways", "attachment.vpc-id", "InternetGateways"),
            },
        ),
        ("ecs", "task-definition"): Lookup(
            "DescribeTaskDefinition", {"taskDefinition": "%s"}, "taskDefinition", "family"
        ),
        ("efs", "file-system"): Lookup(
            "DescribeFileSystems",
            {"CreationToken": "%s"},
            "FileSystems",
            "CreationToken",
            extras={
                "AccessPoints": ("DescribeAccessPoints", {"FileSystemId": "%(FileSystemId)s"}, "AccessPoints"),
                "Lifecycle": (
                    "DescribeLifecycleConfiguration",
                    {"FileSystemId": "%(FileSystemId)s"},
                    "LifecyclePolicies",
                ),
            },
        ),
        ("elasticache", "cluster"): Lookup(
            "DescribeCacheClusters", {"CacheClusterId": "%s"}, "CacheClusters", "CacheClusterId"
        ),
        ("elasticache", "parameter-group"): Lookup(
            "DescribeCacheParameterGroups",
            {"CacheParameterGroupName": "%s"},
            "CacheParameterGroups",
            "CacheParameterGroupName",
        ),
        ("elbv2", "load-balancer"): Lookup(
            "DescribeLoadBalancers",
            {"Names": ["%s"]},
            "LoadBalancers",
            "LoadBalancerName",
            extras={
                "Listeners": ("DescribeListeners", {"LoadBalancerArn": "%(LoadBalancerArn)s"}, "Listeners"),
                "Firewalls": (
                    "ec2:DescribeSecurityGroups",
                    {"GroupIds": "%(SecurityGroups)s"},
                    "SecurityGroups[].GroupName",
                ),
            },
        ),
        ("elbv2", "target-group"): Lookup("DescribeTargetGroups", {"Names": ["%s"]}, "TargetGroups", "TargetGroupName"),
        ("firehose", "delivery-stream"): Lookup(
            "DescribeDeliveryStream",
            {"DeliveryStreamName": "%s"},
            "DeliveryStreamDescription",
            "DeliveryStreamName",
        ),
        ("glue", "crawler"): Lookup("GetCrawler", {"Name": "%s"}, "Crawler", "Name"),
        ("kms", "alias"): Lookup(
            "DescribeKey",
            {"KeyId": "alias/%s"},
            "KeyMetadata",
            extras={"Rotation": ("GetKeyRotationStatus", {"KeyId": "alias/%s"}, "KeyRotationEnabled")},
        ),
        ("lambda", "function"): Lookup(
            "GetFunctionConfiguration",
            {"FunctionName": "%s"},
            name_field="FunctionName",
            extras={
                "Permissions": ("GetPolicy", {"FunctionName": "%s"}, "Policy"),
                "Sources": ("ListEventSourceMappings", {"FunctionName": "%s"}, "EventSourceMappings"),
            },
        ),
        ("opensearch", "domain"): Lookup("DescribeDomain", {"DomainName": "%s"}, "DomainStatus", "DomainName"),
        ("rds", "db-instance"): Lookup(
            "DescribeDBInstances", {"DBInstanceIdentifier": "%s"}, "DBInstances", "DBInstanceIdentifier"
        ),
        ("rds", "db-parameter-group"): Lookup(
            "DescribeDBParameterGroups", {"DBParameterGroupName": "%s"}, "DBParameterGroups", "DBParameterGroupName"
        ),
        ("rds", "db-subnet-group"): Lookup(
            "DescribeDBSubnetGroups", {"DBSubnetGroupName": "%s"}, "DBSubnetGroups", "DBSubnetGroupName"
        ),
        ("route53", "hosted-zone"): Lookup(
            "ListHostedZonesByName",
            {"DNSName": "%s"},
            "HostedZones",
            "Name",
            extras={"Records": ("ListResourceRecordSets", {"HostedZoneId": "%(Id)s"}, "ResourceRecordSets")},
        ),
        ("scheduler", "schedule-group"): Lookup("GetScheduleGroup", {"Name": "%s"}, name_field="Name"),
        ("stepfunctions", "activity"): Lookup(
            "DescribeActivity", {"activityArn": _STATES_ARN % "activity"}, name_field="name"
        ),
        ("stepfunctions", "state-machine"): Lookup(
            "DescribeStateMachine", {"stateMachineArn": _STATES_ARN % "stateMachine"}, name_field="name"
        ),
    }
)
