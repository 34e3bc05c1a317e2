"""Names of the resources in an account, listed by service and type with one API request per type,
because the simulator has no inventory API.

Source: docs/reference/environment.md 2.1 (infra_state) and 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import botocore.loaders
import jmespath
from botocore.exceptions import UnknownServiceError

from realhf.aws.cli.state_client import StateCallError
from realhf.aws.grading.tracker import plain_name

MAX_NAMES = 100
"""Maximum number of names per type; the rest are dropped."""
MAX_PAGES = 50
"""Maximum number of pages read of one list."""


class ListingClient(Protocol):
    """The part of ``StateClient`` that an inventory uses."""

    def call(self, service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send an API request and return its response. See ``StateClient.call``."""
        ...


_PARAMS: Mapping[str, Mapping[str, Any]] = {
    "ListUserPools": {"MaxResults": 60},
    "ListPolicies": {"Scope": "Local"},
    "ListIPSets": {"Scope": "REGIONAL"},
    "ListWebACLs": {"Scope": "REGIONAL"},
}
"""Parameters of the list operations that need any."""
_ROWS = """
acm certificate ListCertificates CertificateSummaryList[].DomainName
apigateway rest-api GetRestApis items[].name
apigatewayv2 api GetApis Items[].Name
athena work-group ListWorkGroups WorkGroups[].Name
autoscaling group DescribeAutoScalingGroups AutoScalingGroups[].AutoScalingGroupName
autoscaling launch-configuration DescribeLaunchConfigurations LaunchConfigurations[].LaunchConfigurationName
backup plan ListBackupPlans BackupPlansList[].BackupPlanName
backup vault ListBackupVaults BackupVaultList[].BackupVaultName
batch compute-environment DescribeComputeEnvironments computeEnvironments[].computeEnvironmentName
batch job-queue DescribeJobQueues jobQueues[].jobQueueName
cloudformation stack DescribeStacks Stacks[].StackName
cloudtrail trail DescribeTrails trailList[].Name
cloudwatch alarm DescribeAlarms MetricAlarms[].AlarmName
codebuild project ListProjects projects
cognito-idp user-pool ListUserPools UserPools[].Name
dynamodb table ListTables TableNames
ec2 instance DescribeInstances Reservations[].Instances[].InstanceId
ec2 launch-template DescribeLaunchTemplates LaunchTemplates[].LaunchTemplateName
ec2 security-group DescribeSecurityGroups SecurityGroups[].GroupName
ec2 subnet DescribeSubnets Subnets[].SubnetId
ec2 volume DescribeVolumes Volumes[].VolumeId
ec2 vpc DescribeVpcs Vpcs[].VpcId
ecr repository DescribeRepositories repositories[].repositoryName
ecs cluster ListClusters clusterArns
ecs task-definition ListTaskDefinitionFamilies families
efs file-system DescribeFileSystems FileSystems[].CreationToken
elasticache cluster DescribeCacheClusters CacheClusters[].CacheClusterId
elasticache parameter-group DescribeCacheParameterGroups \
CacheParameterGroups[?!starts_with(CacheParameterGroupName,'default.')].CacheParameterGroupName
elbv2 load-balancer DescribeLoadBalancers LoadBalancers[].LoadBalancerName
elbv2 target-group DescribeTargetGroups TargetGroups[].TargetGroupName
events event-bus ListEventBuses EventBuses[].Name
events rule ListRules Rules[].Name
firehose delivery-stream ListDeliveryStreams DeliveryStreamNames
glue crawler GetCrawlers Crawlers[].Name
glue database GetDatabases DatabaseList[].Name
glue job GetJobs Jobs[].Name
iam group ListGroups Groups[].GroupName
iam instance-profile ListInstanceProfiles InstanceProfiles[].InstanceProfileName
iam policy ListPolicies Policies[].PolicyName
iam role ListRoles Roles[].RoleName
iam user ListUsers Users[].UserName
kinesis stream ListStreams StreamNames
kms alias ListAliases Aliases[?!starts_with(AliasName,'alias/aws/')].AliasName
kms key ListKeys Keys[].KeyId
lambda function ListFunctions Functions[].FunctionName
logs log-group DescribeLogGroups logGroups[].logGroupName
opensearch domain ListDomainNames DomainNames[].DomainName
rds db-instance DescribeDBInstances DBInstances[].DBInstanceIdentifier
rds db-parameter-group DescribeDBParameterGroups DBParameterGroups[].DBParameterGroupName
rds db-subnet-group DescribeDBSubnetGroups DBSubnetGroups[].DBSubnetGroupName
route53 hosted-zone ListHostedZones HostedZones[].Name
s3 bucket ListBuckets Buckets[].Name
scheduler schedule ListSchedules Schedules[].Name
scheduler schedule-group ListScheduleGroups ScheduleGroups[].Name
secretsmanager secret ListSecrets SecretList[].Name
ses identity ListIdentities Identities
sns subscription ListSubscriptions Subscriptions[].Endpoint
sns topic ListTopics Topics[].TopicArn
sqs queue ListQueues QueueUrls
ssm parameter DescribeParameters Parameters[].Name
stepfunctions activity ListActivities activities[].name
stepfunctions state-machine ListStateMachines stateMachines[].name
wafv2 ip-set ListIPSets IPSets[].Name
wafv2 web-acl ListWebACLs WebACLs[].Name
"""
"""Rows of ``LISTINGS``, sorted: service (botocore's name), type, list operation, JMESPath of the
names in the response."""
Listing = tuple[str, str, Mapping[str, Any], str]
"""(type, list operation, parameters of the operation, JMESPath of the names in the response)."""
LISTINGS: Mapping[str, tuple[Listing, ...]] = {
    service: tuple(
        (kind, operation, _PARAMS.get(operation, {}), path) for _, kind, operation, path in rows
    )
    for service, rows in groupby(map(str.split, _ROWS.strip().splitlines()), itemgetter(0))
}
"""The list operations, by service."""


class Inventory:
    """Cached names of an account's resources in some services, read on demand.

    Use it from one thread at a time and not from an event loop: it sends blocking requests.
    """

    def __init__(self, caller: ListingClient, services: Iterable[str] = ()) -> None:
        self._caller = caller
        self._services = set(services)
        self._known: dict[str, dict[str, list[str]]] = {}

    def touch(self, service: str, *, changed: bool) -> None:
        """Add ``service`` to the services that are listed. ``changed``: a request may have changed
        the service's state, so its cached names are dropped."""
        self._services.add(service)
        if changed:
            self._known.pop(service, None)

    def forget(self) -> None:
        """Drop all cached names, because anything may have changed."""
        self._known.clear()

    def read(self) -> dict[str, dict[str, list[str]]]:
        """Return the names as {service: {type: names}}. Types without names and services that
        cannot be listed are left out.

        Raises ConnectionError if the simulator does not answer.
        """
        for service in self._services & LISTINGS.keys():
            if service not in self._known:
                self._known[service] = self._list(service)
        return {
            service: dict(self._known[service])
            for service in sorted(self._known)
            if self._known[service]
        }

    def _list(self, service: str) -> dict[str, list[str]]:
        names_by_type = {}
        for kind, *_ in LISTINGS[service]:
            try:
                names = sorted(list_names(self._caller, service, kind, limit=MAX_NAMES))
            except StateCallError:
                continue
            if names:
                names_by_type[kind] = names[:MAX_NAMES]
        return names_by_type


def list_names(
    caller: ListingClient, service: str, kind: str, limit: int | None = None
) -> set[str]:
    """Return the names that the account lists for one type of ``LISTINGS``.

    Reads page by page until there are ``limit`` names. If ``limit`` is None, it reads up to
    MAX_PAGES pages. Raises StateCallError or ConnectionError.
    """
    _, operation, params, path = next(row for row in LISTINGS[service] if row[0] == kind)
    input_token, output_token = _page_tokens(service, operation)
    page = dict(params)
    names = set()
    for _ in range(MAX_PAGES):
        answer = caller.call(service, operation, page)
        names |= {plain_name(name) for name in jmespath.search(path, answer) or () if name}
        token = answer.get(output_token)
        if not token or (limit is not None and len(names) >= limit):
            break
        page = {**page, input_token: token}
    return names


@cache
def _page_tokens(service: str, operation: str) -> tuple[str, str]:
    """Return (parameter that requests the next page, response field with that page's token).

    Both are "" for an operation without pages.
    """
    try:
        pages = botocore.loaders.create_loader().load_service_model(service, "paginators-1")[
            "pagination"
        ]
    except UnknownServiceError:
        return "", ""
    row = pages.get(operation, {})
    return row.get("input_token", ""), row.get("output_token", "")
