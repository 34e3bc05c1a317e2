"""Allow list for agents: the services, operations and waiters of the AWS CLI that they may use.
Everything else is refused.

Source: docs/reference/environment.md 5.

A waiter only repeats a read operation of this table; the CLI worker limits how long it may take.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

READ_PREFIXES = (
    "Get", "List", "Describe", "Head", "BatchGet", "Query", "Scan", "Search", "Lookup", "Filter", "TransactGet",
    "AdminGet", "AdminList", "AssumeRole",
)  # fmt: skip
"""Prefixes of the names of read-only operations, in the API's spelling."""
_OPERATIONS = {
    "acm": "request-certificate list-certificates describe-certificate delete-certificate "
    "add-tags-to-certificate "
    "list-tags-for-certificate remove-tags-from-certificate update-certificate-options",
    "apigateway": "create-rest-api get-rest-apis get-rest-api delete-rest-api update-rest-api "
    "get-resources "
    "create-resource delete-resource put-method get-method create-deployment get-deployments "
    "create-stage "
    "get-stages get-stage create-api-key get-api-keys create-usage-plan get-usage-plans "
    "put-method-response "
    "delete-api-key delete-deployment delete-stage delete-usage-plan delete-method "
    "delete-method-response "
    "update-api-key update-usage-plan update-resource update-method update-deployment update-stage",
    "apigatewayv2": "create-api get-apis get-api delete-api update-api create-stage get-stages "
    "create-route "
    "get-routes delete-route create-authorizer get-authorizers delete-authorizer delete-stage "
    "update-authorizer "
    "update-route update-stage",
    "athena": "create-work-group list-work-groups get-work-group delete-work-group "
    "update-work-group "
    "list-data-catalogs get-data-catalog list-databases create-named-query list-named-queries "
    "get-named-query "
    "delete-named-query",
    "autoscaling": "describe-auto-scaling-groups create-auto-scaling-group "
    "update-auto-scaling-group "
    "delete-auto-scaling-group describe-launch-configurations create-launch-configuration "
    "delete-launch-configuration put-scaling-policy describe-policies delete-policy "
    "set-desired-capacity",
    "backup": "create-backup-vault list-backup-vaults describe-backup-vault delete-backup-vault "
    "list-backup-plans create-backup-plan get-backup-plan delete-backup-plan "
    "create-backup-selection "
    "list-backup-selections get-backup-selection delete-backup-selection update-backup-plan",
    "batch": "describe-compute-environments describe-job-queues describe-job-definitions",
    "cloudformation": "create-stack describe-stacks list-stacks delete-stack update-stack "
    "list-stack-resources "
    "describe-stack-resources describe-stack-events get-template validate-template list-exports "
    "update-termination-protection",
    "cloudtrail": "create-trail describe-trails list-trails get-trail get-trail-status "
    "delete-trail "
    "start-logging stop-logging put-event-selectors get-event-selectors update-trail",
    "cloudwatch": "put-metric-alarm describe-alarms delete-alarms list-metrics put-metric-data "
    "get-metric-statistics put-dashboard list-dashboards get-dashboard delete-dashboards "
    "enable-alarm-actions "
    "disable-alarm-actions set-alarm-state tag-resource list-tags-for-resource untag-resource",
    "codebuild": "list-projects batch-get-projects create-project delete-project update-project",
    "cognito-idp": "create-user-pool list-user-pools describe-user-pool delete-user-pool "
    "update-user-pool "
    "create-user-pool-client list-user-pool-clients describe-user-pool-client create-group "
    "list-groups get-group "
    "admin-create-user admin-get-user admin-delete-user list-users admin-add-user-to-group "
    "admin-list-groups-for-user admin-disable-user admin-enable-user list-users-in-group "
    "delete-group "
    "delete-user-pool-client admin-remove-user-from-group update-user-pool-client "
    "admin-update-user-attributes "
    "admin-set-user-password set-user-pool-mfa-config",
    "dynamodb": "create-table list-tables describe-table delete-table update-table put-item "
    "get-item delete-item "
    "update-item scan query update-time-to-live describe-time-to-live tag-resource untag-resource "
    "list-tags-of-resource update-continuous-backups describe-continuous-backups batch-write-item "
    "batch-get-item "
    "create-backup list-backups describe-backup delete-backup transact-write-items "
    "transact-get-items "
    "execute-statement batch-execute-statement execute-transaction",
    "ec2": "describe-vpcs describe-vpc-attribute create-vpc delete-vpc modify-vpc-attribute "
    "describe-subnets "
    "create-subnet delete-subnet describe-security-groups create-security-group "
    "delete-security-group "
    "authorize-security-group-ingress revoke-security-group-ingress "
    "authorize-security-group-egress "
    "revoke-security-group-egress describe-security-group-rules describe-instances run-instances "
    "terminate-instances stop-instances start-instances describe-volumes create-volume "
    "delete-volume "
    "describe-key-pairs create-key-pair delete-key-pair describe-internet-gateways "
    "create-internet-gateway "
    "attach-internet-gateway detach-internet-gateway delete-internet-gateway describe-route-tables "
    "create-route-table delete-route-table create-route delete-route associate-route-table "
    "create-tags delete-tags "
    "describe-tags describe-regions describe-availability-zones describe-addresses "
    "allocate-address release-address "
    "describe-images describe-network-acls describe-vpc-endpoints describe-snapshots "
    "create-snapshot "
    "delete-snapshot describe-nat-gateways describe-instance-types describe-launch-templates "
    "describe-launch-template-versions create-launch-template delete-launch-template "
    "describe-network-interfaces "
    "disassociate-route-table modify-launch-template create-launch-template-version "
    "delete-launch-template-versions "
    "modify-volume modify-subnet-attribute modify-security-group-rules replace-route "
    "replace-route-table-association "
    "attach-volume detach-volume associate-address disassociate-address",
    "ecr": "create-repository describe-repositories delete-repository put-lifecycle-policy "
    "get-lifecycle-policy "
    "delete-lifecycle-policy list-images describe-images put-image-scanning-configuration "
    "put-image-tag-mutability "
    "set-repository-policy get-repository-policy delete-repository-policy tag-resource "
    "list-tags-for-resource "
    "describe-registry untag-resource",
    "ecs": "create-cluster list-clusters describe-clusters delete-cluster register-task-definition "
    "list-task-definitions describe-task-definition deregister-task-definition create-service "
    "list-services "
    "describe-services update-service delete-service list-tasks tag-resource "
    "list-tags-for-resource "
    "list-task-definition-families untag-resource update-cluster update-cluster-settings "
    "put-cluster-capacity-providers",
    "efs": "create-file-system describe-file-systems delete-file-system describe-mount-targets "
    "put-lifecycle-configuration describe-lifecycle-configuration create-access-point "
    "describe-access-points delete-access-point update-file-system update-file-system-protection "
    "put-backup-policy "
    "describe-backup-policy",
    "elasticache": "create-cache-cluster describe-cache-clusters delete-cache-cluster "
    "describe-replication-groups "
    "create-cache-subnet-group describe-cache-subnet-groups describe-cache-parameter-groups "
    "create-cache-parameter-group delete-cache-parameter-group delete-cache-subnet-group "
    "modify-cache-cluster "
    "modify-cache-subnet-group modify-cache-parameter-group reset-cache-parameter-group "
    "describe-cache-parameters",
    "elbv2": "create-load-balancer describe-load-balancers delete-load-balancer "
    "create-target-group "
    "describe-target-groups delete-target-group create-listener describe-listeners delete-listener "
    "modify-listener "
    "modify-target-group set-security-groups set-subnets set-ip-address-type "
    "describe-load-balancer-attributes "
    "modify-load-balancer-attributes describe-target-group-attributes "
    "modify-target-group-attributes",
    "events": "put-rule list-rules describe-rule delete-rule enable-rule disable-rule put-targets "
    "list-targets-by-rule remove-targets create-event-bus list-event-buses describe-event-bus "
    "delete-event-bus "
    "put-events tag-resource list-tags-for-resource untag-resource update-event-bus",
    "firehose": "create-delivery-stream list-delivery-streams describe-delivery-stream "
    "delete-delivery-stream "
    "tag-delivery-stream list-tags-for-delivery-stream untag-delivery-stream put-record "
    "put-record-batch "
    "update-destination start-delivery-stream-encryption stop-delivery-stream-encryption",
    "glue": "create-database get-databases get-database delete-database create-table get-tables "
    "get-table "
    "delete-table get-jobs list-jobs create-job get-job delete-job get-crawlers list-crawlers "
    "create-crawler get-crawler delete-crawler update-database update-table update-job "
    "update-crawler",
    "iam": "create-role list-roles get-role delete-role update-role update-assume-role-policy "
    "create-user "
    "list-users get-user delete-user create-group list-groups get-group delete-group "
    "add-user-to-group "
    "remove-user-from-group list-groups-for-user create-policy list-policies get-policy "
    "get-policy-version "
    "delete-policy attach-role-policy detach-role-policy attach-user-policy detach-user-policy "
    "attach-group-policy "
    "detach-group-policy list-attached-role-policies list-attached-user-policies "
    "list-attached-group-policies "
    "put-role-policy get-role-policy delete-role-policy list-role-policies put-user-policy "
    "get-user-policy "
    "delete-user-policy list-user-policies create-instance-profile list-instance-profiles "
    "get-instance-profile "
    "delete-instance-profile add-role-to-instance-profile remove-role-from-instance-profile "
    "create-access-key "
    "list-access-keys delete-access-key update-access-key tag-role untag-role list-role-tags "
    "tag-user untag-user "
    "list-user-tags get-account-summary list-account-aliases create-account-alias "
    "update-account-password-policy "
    "get-account-password-policy create-login-profile get-login-profile delete-login-profile "
    "create-policy-version "
    "delete-policy-version list-policy-versions delete-account-alias "
    "delete-account-password-policy "
    "update-role-description put-role-permissions-boundary delete-role-permissions-boundary "
    "put-user-permissions-boundary delete-user-permissions-boundary update-login-profile",
    "kinesis": "create-stream list-streams describe-stream describe-stream-summary delete-stream "
    "put-record "
    "increase-stream-retention-period decrease-stream-retention-period add-tags-to-stream "
    "list-tags-for-stream "
    "update-shard-count list-shards put-records get-shard-iterator get-records "
    "remove-tags-from-stream "
    "start-stream-encryption stop-stream-encryption",
    "kms": "create-key list-keys describe-key create-alias list-aliases delete-alias update-alias "
    "enable-key-rotation disable-key-rotation get-key-rotation-status disable-key enable-key "
    "schedule-key-deletion cancel-key-deletion put-key-policy get-key-policy tag-resource "
    "untag-resource list-resource-tags update-key-description encrypt decrypt",
    "lambda": "create-function list-functions get-function get-function-configuration "
    "update-function-configuration delete-function invoke add-permission remove-permission "
    "get-policy "
    "create-event-source-mapping list-event-source-mappings get-event-source-mapping "
    "delete-event-source-mapping put-function-concurrency get-function-concurrency "
    "delete-function-concurrency create-alias list-aliases get-alias delete-alias publish-version "
    "list-versions-by-function tag-resource untag-resource list-tags list-layers update-alias "
    "update-event-source-mapping update-function-code create-function-url-config "
    "get-function-url-config "
    "list-function-url-configs update-function-url-config delete-function-url-config "
    "put-function-event-invoke-config "
    "get-function-event-invoke-config list-function-event-invoke-configs "
    "delete-function-event-invoke-config",
    "logs": "create-log-group describe-log-groups delete-log-group put-retention-policy "
    "delete-retention-policy "
    "create-log-stream describe-log-streams delete-log-stream put-log-events get-log-events "
    "filter-log-events "
    "put-metric-filter describe-metric-filters delete-metric-filter tag-log-group "
    "list-tags-log-group tag-resource "
    "list-tags-for-resource put-subscription-filter describe-subscription-filters "
    "delete-subscription-filter "
    "untag-log-group untag-resource",
    "opensearch": "list-domain-names describe-domain describe-domains describe-domain-config "
    "create-domain "
    "delete-domain list-versions update-domain-config",
    "rds": "create-db-instance describe-db-instances delete-db-instance modify-db-instance "
    "describe-db-clusters "
    "create-db-subnet-group describe-db-subnet-groups delete-db-subnet-group "
    "create-db-parameter-group "
    "describe-db-parameter-groups delete-db-parameter-group describe-db-snapshots "
    "describe-db-engine-versions "
    "add-tags-to-resource list-tags-for-resource remove-tags-from-resource modify-db-subnet-group "
    "modify-db-parameter-group reset-db-parameter-group describe-db-parameters",
    "resourcegroupstaggingapi": "get-resources get-tag-keys get-tag-values tag-resources "
    "untag-resources",
    "route53": "create-hosted-zone list-hosted-zones get-hosted-zone delete-hosted-zone "
    "list-hosted-zones-by-name change-resource-record-sets list-resource-record-sets "
    "create-health-check list-health-checks get-health-check delete-health-check "
    "change-tags-for-resource list-tags-for-resource update-health-check "
    "update-hosted-zone-comment",
    "s3": "ls mb rb cp mv rm sync presign",
    "s3api": "create-bucket list-buckets head-bucket delete-bucket get-bucket-location "
    "list-objects list-objects-v2 "
    "put-object get-object head-object delete-object delete-objects copy-object put-object-tagging "
    "get-object-tagging delete-object-tagging put-bucket-versioning get-bucket-versioning "
    "put-bucket-tagging "
    "get-bucket-tagging delete-bucket-tagging put-bucket-policy get-bucket-policy "
    "delete-bucket-policy "
    "put-bucket-encryption get-bucket-encryption delete-bucket-encryption put-public-access-block "
    "get-public-access-block delete-public-access-block put-bucket-lifecycle-configuration "
    "get-bucket-lifecycle-configuration delete-bucket-lifecycle put-bucket-cors get-bucket-cors "
    "delete-bucket-cors "
    "put-bucket-website get-bucket-website delete-bucket-website put-bucket-acl get-bucket-acl "
    "put-bucket-logging "
    "get-bucket-logging put-bucket-notification-configuration "
    "get-bucket-notification-configuration "
    "list-object-versions put-bucket-ownership-controls get-bucket-ownership-controls "
    "delete-bucket-ownership-controls put-bucket-accelerate-configuration "
    "get-bucket-accelerate-configuration "
    "put-bucket-request-payment get-bucket-request-payment put-object-lock-configuration "
    "get-object-lock-configuration create-multipart-upload upload-part upload-part-copy "
    "complete-multipart-upload "
    "abort-multipart-upload list-multipart-uploads list-parts",
    "scheduler": "create-schedule list-schedules get-schedule update-schedule delete-schedule "
    "create-schedule-group list-schedule-groups get-schedule-group delete-schedule-group",
    "secretsmanager": "create-secret list-secrets describe-secret get-secret-value "
    "put-secret-value "
    "update-secret delete-secret restore-secret tag-resource untag-resource put-resource-policy "
    "get-resource-policy delete-resource-policy rotate-secret list-secret-version-ids "
    "update-secret-version-stage",
    "ses": "verify-email-identity list-identities delete-identity get-send-quota create-template "
    "list-templates "
    "get-template delete-template create-configuration-set list-configuration-sets "
    "get-identity-verification-attributes verify-domain-identity delete-configuration-set "
    "update-template",
    "sns": "create-topic list-topics get-topic-attributes set-topic-attributes delete-topic "
    "subscribe "
    "list-subscriptions list-subscriptions-by-topic get-subscription-attributes "
    "set-subscription-attributes "
    "unsubscribe publish tag-resource untag-resource list-tags-for-resource publish-batch "
    "add-permission "
    "remove-permission",
    "sqs": "create-queue list-queues get-queue-url get-queue-attributes set-queue-attributes "
    "delete-queue "
    "purge-queue send-message receive-message delete-message tag-queue untag-queue list-queue-tags "
    "list-dead-letter-source-queues change-message-visibility add-permission remove-permission "
    "send-message-batch "
    "delete-message-batch change-message-visibility-batch",
    "ssm": "put-parameter get-parameter get-parameters get-parameters-by-path describe-parameters "
    "delete-parameter delete-parameters get-parameter-history add-tags-to-resource "
    "remove-tags-from-resource list-tags-for-resource list-documents describe-document",
    "stepfunctions": "create-state-machine list-state-machines describe-state-machine "
    "delete-state-machine "
    "update-state-machine list-executions tag-resource list-tags-for-resource create-activity "
    "list-activities "
    "describe-activity delete-activity untag-resource start-execution describe-execution "
    "stop-execution "
    "get-execution-history",
    "sts": "get-caller-identity assume-role",
    "wafv2": "list-web-acls create-ip-set list-ip-sets get-ip-set delete-ip-set list-rule-groups "
    "update-ip-set",
}
ALLOWED: Mapping[str, frozenset[str]] = MappingProxyType(
    {service: frozenset(operations.split()) for service, operations in _OPERATIONS.items()}
)
"""Allowed CLI operations, by CLI service."""
MINISTACK_MODULES = (
    "acm", "alb", "apigateway", "apigateway_v1", "athena", "autoscaling", "backup", "batch", "cloudformation",
    "cloudtrail", "cloudwatch", "cloudwatch_logs", "codebuild", "cognito", "dynamodb", "ec2", "ecr", "ecs",
    "efs", "elasticache", "eventbridge", "firehose", "glue", "iam", "kinesis", "kms", "lambda_durable", "lambda_svc",
    "opensearch", "rds", "route53", "s3", "scheduler", "secretsmanager", "ses", "sns", "sqs", "ssm",
    "stepfunctions", "sts", "tagging", "transfer", "waf",
)  # fmt: skip
"""MiniStack modules that implement the services in the table; imported before the simulators are
forked."""
MINISTACK_SERVICES = (
    "acm", "apigateway", "athena", "autoscaling", "backup", "batch", "cloudformation", "cloudtrail", "codebuild",
    "cognito-idp", "dynamodb", "ec2", "ecr", "ecs", "elasticache", "elasticfilesystem", "elasticloadbalancing",
    "events", "firehose", "glue", "iam", "kinesis", "kms", "lambda", "logs", "monitoring", "opensearch", "rds",
    "route53", "s3", "scheduler", "secretsmanager", "ses", "sns", "sqs", "ssm", "states", "sts", "tagging",
    "wafv2",
)  # fmt: skip
"""MiniStack's names for the services in the table."""


_BY_OPERATION = {
    "acm": {"describe-certificate": "certificate-validated"},
    "cloudformation": {
        "describe-stacks": "stack-create-complete stack-delete-complete stack-exists "
        "stack-import-complete "
        "stack-rollback-complete stack-update-complete",
    },
    "cloudwatch": {"describe-alarms": "alarm-exists composite-alarm-exists"},
    "dynamodb": {"describe-table": "table-exists table-not-exists"},
    "ec2": {
        "describe-images": "image-available image-exists",
        "describe-instances": "instance-exists instance-running instance-stopped "
        "instance-terminated",
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
    "elbv2": {
        "describe-load-balancers": "load-balancer-available load-balancer-exists "
        "load-balancers-deleted"
    },
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
        service: MappingProxyType(
            {name: operation for operation, names in table.items() for name in names.split()}
        )
        for service, table in _BY_OPERATION.items()
    }
)
"""For each CLI service, the CLI operation that each of its waiters sends."""
