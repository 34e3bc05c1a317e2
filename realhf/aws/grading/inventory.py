"""Lists what there is in an account, by service and type, read with the services' own list calls.

The simulator has no inventory of its own. Source: docs/reference/environment.md 2.1 (infra_state) and 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol

import botocore.loaders
import jmespath
from botocore.exceptions import UnknownServiceError

from realhf.aws.cli.state_client import StateCallError
from realhf.aws.grading.resource_identity import plain_name

MAX_NAMES = 100
"""Most names of one type; more are not shown."""
MAX_PAGES = 50
"""Most pages of one list that are read."""


class Caller(Protocol):
    """Is what an inventory needs of a slot; ``StateClient`` has it."""

    def call(self, service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        """See ``StateClient.call``."""
        ...


_LOCAL: Mapping[str, Any] = MappingProxyType({"Scope": "Local"})
_POOLS: Mapping[str, Any] = MappingProxyType({"MaxResults": 60})
_WEB: Mapping[str, Any] = MappingProxyType({"Scope": "REGIONAL"})
_NONE: Mapping[str, Any] = MappingProxyType({})

Listing = tuple[str, str, Mapping[str, Any], str]
"""Type, operation, its parameters, and the JMESPath of the names in the response."""

LISTINGS: Mapping[str, tuple[Listing, ...]] = MappingProxyType(
    {
        "acm": (("certificate", "ListCertificates", _NONE, "CertificateSummaryList[].DomainName"),),
        "apigateway": (("rest-api", "GetRestApis", _NONE, "items[].name"),),
        "apigatewayv2": (("api", "GetApis", _NONE, "Items[].Name"),),
        "athena": (("work-group", "ListWorkGroups", _NONE, "WorkGroups[].Name"),),
        "autoscaling": (
            ("group", "DescribeAutoScalingGroups", _NONE, "AutoScalingGroups[].AutoScalingGroupName"),
            ("launch-configuration", "DescribeLaunchConfigurations", _NONE,
             "LaunchConfigurations[].LaunchConfigurationName"),
        ),
        "backup": (
            ("plan", "ListBackupPlans", _NONE, "BackupPlansList[].BackupPlanName"),
            ("vault", "ListBackupVaults", _NONE, "BackupVaultList[].BackupVaultName"),
        ),
        "batch": (
            ("compute-environment", "DescribeComputeEnvironments", _NONE,
             "computeEnvironments[].computeEnvironmentName"),
            ("job-queue", "DescribeJobQueues", _NONE, "jobQueues[].jobQueueName"),
        ),
        "cloudformation": (("stack", "DescribeStacks", _NONE, "Stacks[].StackName"),),
        "cloudtrail": (("trail", "DescribeTrails", _NONE, "trailList[].Name"),),
        "cloudwatch": (("alarm", "DescribeAlarms", _NONE, "MetricAlarms[].AlarmName"),),
        "codebuild": (("project", "ListProjects", _NONE, "projects"),),
        "cognito-idp": (("user-pool", "ListUserPools", _POOLS, "UserPools[].Name"),),
        "dynamodb": (("table", "ListTables", _NONE, "TableNames"),),
        "ec2": (
            ("instance", "DescribeInstances", _NONE, "Reservations[].Instances[].InstanceId"),
            ("launch-template", "DescribeLaunchTemplates", _NONE, "LaunchTemplates[].LaunchTemplateName"),
            ("security-group", "DescribeSecurityGroups", _NONE, "SecurityGroups[].GroupName"),
            ("subnet", "DescribeSubnets", _NONE, "Subnets[].SubnetId"),
            ("volume", "DescribeVolumes", _NONE, "Volumes[].VolumeId"),
            ("vpc", "DescribeVpcs", _NONE, "Vpcs[].VpcId"),
        ),
        "ecr": (("repository", "DescribeRepositories", _NONE, "repositories[].repositoryName"),),
        "ecs": (
            ("cluster", "ListClusters", _NONE, "clusterArns"),
            ("task-definition", "ListTaskDefinitionFamilies", _NONE, "families"),
        ),
        "efs": (("file-system", "DescribeFileSystems", _NONE, "FileSystems[].CreationToken"),),
        "elasticache": (
            ("cluster", "DescribeCacheClusters", _NONE, "CacheClusters[].CacheClusterId"),
            ("parameter-group", "DescribeCacheParameterGroups", _NONE,
             "CacheParameterGroups[?!starts_with(CacheParameterGroupName, 'default.')].CacheParameterGroupName"),
        ),
        "elbv2": (
            ("load-balancer", "DescribeLoadBalancers", _NONE, "LoadBalancers[].LoadBalancerName"),
            ("target-group", "DescribeTargetGroups", _NONE, "TargetGroups[].TargetGroupName"),
        ),
        "events": (
            ("event-bus", "ListEventBuses", _NONE, "EventBuses[].Name"),
            ("rule", "ListRules", _NONE, "Rules[].Name"),
        ),
        "firehose": (("delivery-stream", "ListDeliveryStreams", _NONE, "DeliveryStreamNames"),),
        "glue": (
            ("crawler", "GetCrawlers", _NONE, "Crawlers[].Name"),
            ("database", "GetDatabases", _NONE, "DatabaseList[].Name"),
            ("job", "GetJobs", _NONE, "Jobs[].Name"),
        ),
        "iam": (
            ("group", "ListGroups", _NONE, "Groups[].GroupName"),
            ("instance-profile", "ListInstanceProfiles", _NONE, "InstanceProfiles[].InstanceProfileName"),
            ("policy", "ListPolicies", _LOCAL, "Policies[].PolicyName"),
            ("role", "ListRoles", _NONE, "Roles[].RoleName"),
            ("user", "ListUsers", _NONE, "Users[].UserName"),
        ),
        "kinesis": (("stream", "ListStreams", _NONE, "StreamNames"),),
        "kms": (
            ("alias", "ListAliases", _NONE, "Aliases[?!starts_with(AliasName, 'alias/aws/')].AliasName"),
            ("key", "ListKeys", _NONE, "Keys[].KeyId"),
        ),
        "lambda": (("function", "ListFunctions", _NONE, "Functions[].FunctionName"),),
        "logs": (("log-group", "DescribeLogGroups", _NONE, "logGroups[].logGroupName"),),
        "opensearch": (("domain", "ListDomainNames", _NONE, "DomainNames[].DomainName"),),
        "rds": (
            ("db-instance", "DescribeDBInstances", _NONE, "DBInstances[].DBInstanceIdentifier"),
            ("db-parameter-group", "DescribeDBParameterGroups", _NONE, "DBParameterGroups[].DBParameterGroupName"),
            ("db-subnet-group", "DescribeDBSubnetGroups", _NONE, "DBSubnetGroups[].DBSubnetGroupName"),
        ),
        "route53": (("hosted-zone", "ListHostedZones", _NONE, "HostedZones[].Name"),),
        "s3": (("bucket", "ListBuckets", _NONE, "Buckets[].Name"),),
        "scheduler": (
            ("schedule", "ListSchedules", _NONE, "Schedules[].Name"),
            ("schedule-group", "ListScheduleGroups", _NONE, "ScheduleGroups[].Name"),
        ),
        "secretsmanager": (("secret", "ListSecrets", _NONE, "SecretList[].Name"),),
        "ses": (("identity", "ListIdentities", _NONE, "Identities"),),
        "sns": (
            ("subscription", "ListSubscriptions", _NONE, "Subscriptions[].Endpoint"),
            ("topic", "ListTopics", _NONE, "Topics[].TopicArn"),
        ),
        "sqs": (("queue", "ListQueues", _NONE, "QueueUrls"),),
        "ssm": (("parameter", "DescribeParameters", _NONE, "Parameters[].Name"),),
        "stepfunctions": (
            ("activity", "ListActivities", _NONE, "activities[].name"),
            ("state-machine", "ListStateMachines", _NONE, "stateMachines[].name"),
        ),
        "wafv2": (
            ("ip-set", "ListIPSets", _WEB, "IPSets[].Name"),
            ("web-acl", "ListWebACLs", _WEB, "WebACLs[].Name"),
        ),
    }
)  # fmt: skip
"""By botocore's service name, the lists that are taken, sorted."""


class Inventory:
    """Keeps the names of what there is, of some services; read when needed and kept until ``changed``. Use it from one
    thread at a time, and not from an event loop: it sends requests."""

    def __init__(self, caller: Caller, services: Iterable[str] = ()) -> None:
        self._caller = caller
        self._services = set(services)
        self._known: dict[str, dict[str, list[str]]] = {}

    def touch(self, service: str, *, changed: bool) -> None:
        """Note that a request went to ``service``; ``changed``: its state may be another now."""
        self._services.add(service)
        if changed:
            self._known.pop(service, None)

    def forget(self) -> None:
        """Forget everything that was read: anything may have changed."""
        self._known.clear()

    def read(self) -> dict[str, dict[str, list[str]]]:
        """Return the names by service and type; types without any are left out, and so are services that cannot be
        listed. Raises ConnectionError when the simulator does not answer."""
        for service in self._services & LISTINGS.keys():
            if service not in self._known:
                self._known[service] = self._list(service)
        return {service: dict(self._known[service]) for service in sorted(self._known) if self._known[service]}

    def _list(self, service: str) -> dict[str, list[str]]:
        found = {}
        for kind, *_ in LISTINGS[service]:
            try:
                names = sorted(names_of(self._caller, service, kind, most=MAX_NAMES))
            except StateCallError:
                continue
            if names:
                found[kind] = names[:MAX_NAMES]
        return found


def names_of(caller: Caller, service: str, kind: str, most: int | None = None) -> set[str]:
    """Return the names that the account lists of one of the ``LISTINGS``, page by page until there are ``most`` (None:
    until MAX_PAGES). Raises StateCallError or ConnectionError."""
    _, operation, params, path = next(row for row in LISTINGS[service] if row[0] == kind)
    asked, told = _page_tokens(service, operation)
    page, names = dict(params), set()
    for _ in range(MAX_PAGES):
        answer = caller.call(service, operation, page)
        names |= {plain_name(name) for name in jmespath.search(path, answer) or () if name}
        token = answer.get(told)
        if not token or (most is not None and len(names) >= most):
            break
        page = {**page, asked: token}
    return names


@cache
def _page_tokens(service: str, operation: str) -> tuple[str, str]:
    """Return the parameter that asks for the next page, and the field of an answer that says how."""
    try:
        pages = botocore.loaders.create_loader().load_service_model(service, "paginators-1")["pagination"]
    except UnknownServiceError:
        return "", ""
    row = pages.get(operation, {})
    return row.get("input_token", ""), row.get("output_token", "")
