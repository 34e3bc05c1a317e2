"""Lists what there is in an account by service and type, and says for people what an episode changed.

The simulator has no inventory of its own. Source: docs/reference/environment.md 2.1 (infra_state) and 3.

It is read from the requests that were sent and succeeded, so that no further request is made. What a request changed
beside the resource that it names is not followed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import botocore.loaders
import jmespath
from botocore.exceptions import UnknownServiceError

from realhf.aws.cli.state_client import StateCallError
from realhf.aws.grading.tracker import Evidence, identifying, is_read, plain_name

MAX_NAMES = 100
"""Most names of one type; more are not shown."""
MAX_PAGES = 50
"""Most pages of one list that are read."""


class Caller(Protocol):
    """Is what an inventory needs of a slot; ``StateClient`` has it."""

    def call(self, service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        """See ``StateClient.call``."""
        ...


_PARAMS: Mapping[str, Mapping[str, Any]] = {
    "ListUserPools": {"MaxResults": 60},
    "ListPolicies": {"Scope": "Local"},
    "ListIPSets": {"Scope": "REGIONAL"},
    "ListWebACLs": {"Scope": "REGIONAL"},
}
"""Parameters of the lists that need some."""
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
"""Service (botocore's name), type, operation, and the JMESPath of the names in the response; sorted."""
Listing = tuple[str, str, Mapping[str, Any], str]
"""Type, operation, its parameters, and path."""
LISTINGS: Mapping[str, tuple[Listing, ...]] = {
    service: tuple((kind, operation, _PARAMS.get(operation, {}), path) for _, kind, operation, path in rows)
    for service, rows in groupby(map(str.split, _ROWS.strip().splitlines()), itemgetter(0))
}
"""By service, the lists that are taken."""


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


MOST_RESOURCES = 40
"""Resources that are shown of one episode; it says how many more there are."""
MOST_CALLS = 6
"""Calls that are shown of one resource, the last ones."""
LONGEST = 160
"""Characters that are shown of a name, and of what a call set."""
NONE, THERE, CHANGED, GONE = "none", "there", "changed", "gone"
DISTURBED = "(disturbed by the environment)"
_MAKES = ("Create", "Put", "Register", "Request")
_UNMAKES = ("Delete", "Deregister")
_KEY_ENDINGS = ("Name", "Arn", "ARN", "Url", "URL", "Identifier", "Id")
_OTHER_NOUNS = frozenset({"cachecluster", "autoscalinggroup", "metricalarm"})
"""Resources whose operations call them by a longer word than lists of them do."""


@dataclass
class _Resource:
    before: str
    after: str
    calls: list[str] = field(default_factory=list)
    n_calls: int = 0

    def told(self) -> list[str]:
        """Return the last calls, behind a word about those before."""
        left = self.n_calls - len(self.calls)
        return [*([f"{left} calls, then"] if left else []), *self.calls]


class AccountChanges:
    """Follows one episode. ``present``: (service, name) of what the set-up made."""

    def __init__(self, present: frozenset[tuple[str, str]] = frozenset()) -> None:
        self._present = present
        self._known: dict[tuple[str, str, str], _Resource] = {}
        self._left_out = 0

    def record(self, deeds: Iterable[Evidence]) -> None:
        """Take the requests of a command."""
        for deed in deeds:
            if deed.ok and deed.resource and not is_read(deed.operation):
                self._take(deed)

    def described(self, disturbed: Collection[tuple[str, str]] = ()) -> list[dict[str, Any]]:
        """Return the changes so far: ``service``, ``type`` ("" where it is not known), ``name``, ``before`` (none or
        there), ``after`` (there, changed, gone or none), ``calls``. The last entry counts calls that are left out, if
        there are any: ``more``. ``disturbed``: (service, name) of what the environment itself changed, which is told
        among the calls."""
        found: list[dict[str, Any]] = [
            {
                "service": service,
                "type": kind,
                "name": name[:LONGEST],
                "before": one.before,
                "after": one.after,
                "calls": one.told() + ([DISTURBED] if (service, name) in disturbed else []),
            }
            for (service, kind, name), one in sorted(self._known.items())
        ]
        return found + ([{"more": self._left_out}] if self._left_out else [])

    def _take(self, deed: Evidence) -> None:
        key, name = identifying(deed.service, deed.params)
        operation = deed.operation.partition(":")[2]
        kind = _kind(deed.service, key)
        made, unmade = _is_about(operation, _MAKES, deed.service), _is_about(operation, _UNMAKES, deed.service)
        known = self._known.get((deed.service, kind, name))
        if known is None:
            if len(self._known) >= MOST_RESOURCES:
                self._left_out += 1
                return
            was = THERE if not made or (deed.service, name) in self._present else NONE
            known = self._known[deed.service, kind, name] = _Resource(was, was)
        if unmade:
            known.after = GONE if known.before == THERE else NONE
        else:
            known.after = CHANGED if known.before == THERE else THERE
        known.n_calls += 1
        known.calls = [*known.calls, _said(operation, deed.params, key)][-MOST_CALLS:]


def _is_about(operation: str, verbs: tuple[str, ...], service: str) -> bool:
    """Return whether an operation makes (or removes) a whole resource of the service, rather than a part of one."""
    verb = next((verb for verb in verbs if operation.startswith(verb)), None)
    if verb is None:
        return False
    noun = operation.removeprefix(verb).lower()
    return noun in _OTHER_NOUNS or noun in {kind.replace("-", "") for kind in _kinds(service)}


def _kind(service: str, key: str) -> str:
    """Return the type of the resource that a parameter names; "" where that is open."""
    ending = next((ending for ending in _KEY_ENDINGS if key.endswith(ending)), "")
    noun = key.removesuffix(ending).lower()
    kinds = _kinds(service)
    found = [kind for kind in kinds if kind.replace("-", "") == noun]
    return found[0] if found else next(iter(kinds)) if len(kinds) == 1 else ""


@cache
def _kinds(service: str) -> frozenset[str]:
    return frozenset(row[0] for row in LISTINGS.get(service, ()))


def _said(operation: str, params: Mapping[str, Any], key: str) -> str:
    """Return a call with what it set beside the name."""
    rest = {name: value for name, value in params.items() if name != key.partition(".")[0]}
    text = json.dumps(rest, ensure_ascii=True, default=ascii, separators=(", ", ": ")) if rest else ""
    return f"{operation} {text if len(text) <= LONGEST else text[: LONGEST - 3] + '...'}".rstrip()
