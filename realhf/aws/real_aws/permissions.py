"""Permissions on a real account: the reads that show no secret, and the operations that the
operator allows.

This is an allow list: operations of ``command_table`` that are not listed here are refused. An
operation is not a default read if it returns secrets or contents, such as secrets, parameters,
objects, items, log events, environment and stage variables, user data, the input of targets,
parameters and outputs of stacks, or client secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from botocore import xform_name

from realhf.aws.cli.command_table import ALLOWED

_READS = """
acm describe-certificate list-certificates list-tags-for-certificate
apigateway get-deployments get-method get-resources get-rest-api get-rest-apis get-usage-plans
apigatewayv2 get-api get-apis get-authorizers get-routes
athena get-data-catalog get-named-query get-work-group list-data-catalogs list-databases list-named-queries \
list-work-groups
autoscaling describe-auto-scaling-groups describe-policies
backup describe-backup-vault get-backup-plan get-backup-selection list-backup-plans list-backup-selections \
list-backup-vaults
batch describe-compute-environments describe-job-queues
cloudformation describe-stack-resources list-stack-resources list-stacks
cloudtrail describe-trails get-event-selectors get-trail get-trail-status list-trails
cloudwatch describe-alarms get-dashboard get-metric-statistics list-dashboards list-metrics list-tags-for-resource
codebuild list-projects
cognito-idp describe-user-pool get-group list-groups list-user-pool-clients list-user-pools
dynamodb describe-backup describe-continuous-backups describe-table describe-time-to-live list-backups list-tables \
list-tags-of-resource
ec2 describe-addresses describe-availability-zones describe-images describe-instance-types describe-instances \
describe-internet-gateways describe-key-pairs describe-launch-templates describe-nat-gateways describe-network-acls \
describe-network-interfaces describe-regions describe-route-tables describe-security-group-rules \
describe-security-groups describe-snapshots describe-subnets describe-tags describe-volumes describe-vpc-attribute \
describe-vpc-endpoints describe-vpcs
ecr describe-images describe-registry describe-repositories get-lifecycle-policy get-repository-policy \
list-images list-tags-for-resource
ecs describe-clusters describe-services list-clusters list-services list-tags-for-resource \
list-task-definition-families list-task-definitions list-tasks
efs describe-access-points describe-backup-policy describe-file-systems describe-lifecycle-configuration \
describe-mount-targets
elasticache describe-cache-clusters describe-cache-parameter-groups describe-cache-subnet-groups \
describe-replication-groups
elbv2 describe-listeners describe-load-balancer-attributes describe-load-balancers describe-target-group-attributes \
describe-target-groups
events describe-event-bus describe-rule list-event-buses list-rules list-tags-for-resource
firehose list-delivery-streams list-tags-for-delivery-stream
glue get-crawler get-crawlers get-database get-databases get-table get-tables list-crawlers list-jobs
iam get-account-password-policy get-account-summary get-group get-instance-profile get-login-profile get-policy \
get-policy-version get-role get-role-policy get-user get-user-policy list-access-keys list-account-aliases \
list-attached-group-policies list-attached-role-policies list-attached-user-policies list-groups list-groups-for-user \
list-instance-profiles list-policies list-role-policies list-role-tags list-roles list-user-policies list-user-tags \
list-users
kinesis describe-stream describe-stream-summary list-shards list-streams list-tags-for-stream
kms describe-key get-key-policy get-key-rotation-status list-aliases list-keys list-resource-tags
lambda get-alias get-event-source-mapping get-function-concurrency get-function-event-invoke-config \
get-function-url-config get-policy list-aliases list-event-source-mappings list-function-event-invoke-configs \
list-function-url-configs list-layers list-tags
logs describe-log-groups describe-log-streams describe-metric-filters describe-subscription-filters \
list-tags-for-resource list-tags-log-group
opensearch describe-domain describe-domain-config describe-domains list-domain-names list-versions
rds describe-db-clusters describe-db-engine-versions describe-db-instances describe-db-parameter-groups \
describe-db-snapshots describe-db-subnet-groups list-tags-for-resource
resourcegroupstaggingapi get-resources get-tag-keys get-tag-values
route53 get-health-check get-hosted-zone list-health-checks list-hosted-zones list-hosted-zones-by-name \
list-resource-record-sets list-tags-for-resource
s3 ls
s3api get-bucket-accelerate-configuration get-bucket-acl get-bucket-cors get-bucket-encryption \
get-bucket-lifecycle-configuration get-bucket-location get-bucket-logging get-bucket-notification-configuration \
get-bucket-ownership-controls get-bucket-policy get-bucket-request-payment get-bucket-tagging get-bucket-versioning \
get-bucket-website get-object-lock-configuration get-object-tagging get-public-access-block head-bucket head-object \
list-buckets list-object-versions list-objects list-objects-v2
scheduler get-schedule-group list-schedule-groups list-schedules
secretsmanager describe-secret get-resource-policy list-secret-version-ids list-secrets
ses get-identity-verification-attributes get-send-quota get-template list-configuration-sets list-identities \
list-templates
sns get-subscription-attributes get-topic-attributes list-subscriptions list-subscriptions-by-topic \
list-tags-for-resource list-topics
sqs get-queue-attributes get-queue-url list-dead-letter-source-queues list-queue-tags list-queues
ssm describe-document describe-parameters list-documents list-tags-for-resource
stepfunctions describe-activity list-activities list-executions list-state-machines list-tags-for-resource
sts get-caller-identity
wafv2 get-ip-set list-ip-sets list-rule-groups list-web-acls
"""
"""The operations that need no permission. Each line has a CLI service and its operations."""

DEFAULT_READS: Mapping[str, frozenset[str]] = MappingProxyType(
    {service: frozenset(names) for service, *names in map(str.split, _READS.strip().splitlines())}
)
"""The CLI operations that need no permission, by CLI service."""

_TRANSFER = (
    "HeadObject", "GetObject", "PutObject", "CopyObject", "ListObjectsV2", "CreateMultipartUpload", "UploadPart",
    "UploadPartCopy", "CompleteMultipartUpload", "AbortMultipartUpload", "GetObjectTagging", "PutObjectTagging",
)  # fmt: skip
_SENT_BY_S3: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ls": ("ListBuckets", "ListObjectsV2"),
        "mb": ("CreateBucket",),
        "rb": ("DeleteBucket", "ListObjectsV2", "DeleteObject"),
        "rm": ("ListObjectsV2", "DeleteObject"),
        "cp": _TRANSFER,
        "mv": (*_TRANSFER, "DeleteObject"),
        "sync": (*_TRANSFER, "DeleteObject"),
        "presign": (),
    }
)
"""API operations that each command of ``aws s3`` sends."""
_FINDS_THE_REGION = "HeadBucket"
"""Operation that S3 clients send to find a bucket's region."""


class RealAwsRefused(RuntimeError):
    """The account must not be used. The message states the reason."""


@dataclass(frozen=True)
class Permissions:
    """The default reads, and the operations that the operator allows."""

    named: frozenset[tuple[str, str]] = frozenset()
    """Operations that the operator allows, as (service, operation) in the CLI's spelling."""

    def permits(self, service: str, operation: str) -> bool:
        """Return whether a command may run. Service and operation are in the CLI's spelling."""
        return operation in DEFAULT_READS.get(service, ()) or (service, operation) in self.named


def is_default_read(service: str, operation: str) -> bool:
    """Return whether checks and inventory may send this operation, given in botocore's spelling.

    Operations that the operator allows may be writes or show secrets, so only agents may send them.
    """
    return xform_name(operation, "-") in DEFAULT_READS.get(
        "s3api" if service == "s3" else service, ()
    )


def operations_sent(service: str, operation: str) -> tuple[str, ...]:
    """Return the API operations that a permitted command may send, in the spelling of
    ``xform_name``."""
    if service == "s3":
        return tuple(xform_name(name, "-") for name in (*_SENT_BY_S3[operation], _FINDS_THE_REGION))
    return (operation, *((xform_name(_FINDS_THE_REGION, "-"),) if service == "s3api" else ()))


def read_allow_file(path: str) -> frozenset[tuple[str, str]]:
    """Return the (service, operation) pairs in the operator's file, which has one ``service
    operation`` pair per line; ``#`` starts a comment.

    Raises RealAwsRefused for an invalid line, and for an operation that no agent may run.
    """
    allowed = set()
    for number, line in enumerate(Path(path).read_text().splitlines() if path else (), start=1):
        words = line.partition("#")[0].split()
        if len(words) not in (0, 2):
            raise RealAwsRefused(f"{path}, line {number}: not 'service operation': {line!r}")
        if words and words[1] not in ALLOWED.get(words[0], ()):
            raise RealAwsRefused(
                f"{path}, line {number}: agents have no operation {' '.join(words)!r}"
            )
        if words:
            allowed.add((words[0], words[1]))
    return frozenset(allowed)
