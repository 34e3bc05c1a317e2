"""Lists the waiters that an agent may use (``aws SERVICE wait NAME``), and what each asks repeatedly.

A waiter sends only a read of the ``command_table``; how long it may ask is bounded where it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_BY_OPERATION = {
    "acm": {"describe-certificate": "certificate-validated"},
    "cloudformation": {
        "describe-stacks": "stack-create-complete stack-delete-complete stack-exists stack-import-complete "
        "stack-rollback-complete stack-update-complete",
    },
    "cloudwatch": {"describe-alarms": "alarm-exists composite-alarm-exists"},
    "dynamodb": {"describe-table": "table-exists table-not-exists"},
    "ec2": {
        "describe-images": "image-available image-exists",
        "describe-instances": "instance-exists instance-running instance-stopped instance-terminated",
        "describe-internet-gateways": "internet-gateway-exists",
        "describe-key-pairs": "key-pair-exists",
        "describe-nat-gateways": "nat-gateway-available nat-gateway-deleted",
        "describe-network-interfaces": "network-interface-available",
        "describe-security-groups": "security-group-exists",
        "describe-snapshots": "snapshot-completed",
        "describe-subnets": "subnet-available",
        "describe-volumes": "volume-available volume-deleted volume-in-use",
        "describe-vpcs": "vpc-available vpc-exists",
    },
    "ecs": {"describe-services": "services-inactive services-stable"},
    "elasticache": {
        "describe-cache-clusters": "cache-cluster-available cache-cluster-deleted",
        "describe-replication-groups": "replication-group-available replication-group-deleted",
    },
    "elbv2": {"describe-load-balancers": "load-balancer-available load-balancer-exists load-balancers-deleted"},
    "iam": {
        "get-instance-profile": "instance-profile-exists",
        "get-policy": "policy-exists",
        "get-role": "role-exists",
        "get-user": "user-exists",
    },
    "kinesis": {"describe-stream": "stream-exists stream-not-exists"},
    "lambda": {
        "get-function": "function-active-v2 function-exists function-updated-v2",
        "get-function-configuration": "function-active function-updated published-version-active",
    },
    "rds": {
        "describe-db-clusters": "db-cluster-available db-cluster-deleted",
        "describe-db-instances": "db-instance-available db-instance-deleted",
        "describe-db-snapshots": "db-snapshot-available db-snapshot-completed db-snapshot-deleted",
    },
    "s3api": {
        "head-bucket": "bucket-exists bucket-not-exists",
        "head-object": "object-exists object-not-exists",
    },
    "ses": {"get-identity-verification-attributes": "identity-exists"},
}

WAITERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        service: MappingProxyType({name: operation for operation, names in table.items() for name in names.split()})
        for service, table in _BY_OPERATION.items()
    }
)
"""For each CLI service and waiter, the CLI operation that it sends."""
