"""Whatever an agent can make, it can remove: for each served operation that makes something, one
that takes it back.

The pairs follow from the names in botocore's models; those that they do not tell are listed, and so
is what has no counterpart in AWS."""

from typing import Any

import botocore.session
import pytest
from botocore import xform_name

from realhf.aws.cli.command_table import ALLOWED

VERBS = {
    "AddTagsTo": ("RemoveTagsFrom",),
    "AdminAdd": ("AdminRemove",),
    "AdminCreate": ("AdminDelete",),
    "Add": ("Remove",),
    "Allocate": ("Release",),
    "Associate": ("Disassociate",),
    "Attach": ("Detach",),
    "Authorize": ("Revoke",),
    "Copy": ("Delete",),
    "Create": ("Delete",),
    "Enable": ("Disable",),
    "Import": ("Delete",),
    "Put": ("Delete", "Remove"),
    "Publish": ("Delete",),
    "Register": ("Deregister", "Delete"),
    "Request": ("Delete",),
    "Restore": ("Delete",),
    "Run": ("Terminate",),
    "Set": ("Delete",),
    "Start": ("Stop",),
    "Subscribe": ("Unsubscribe",),
    "Tag": ("Untag",),
    "Upload": ("Delete", "Abort"),
    "Verify": ("Delete",),
}
"""For each verb that makes something, those that remove it; the longest that fits counts."""
NAMED_OTHERWISE = {
    "autoscaling PutScalingPolicy": "DeletePolicy",
    "cloudwatch PutMetricAlarm": "DeleteAlarms",
    "cognito-idp AdminAddUserToGroup": "AdminRemoveUserFromGroup",
    "iam AddRoleToInstanceProfile": "RemoveRoleFromInstanceProfile",
    "iam AddUserToGroup": "RemoveUserFromGroup",
    "iam UpdateAccountPasswordPolicy": "DeleteAccountPasswordPolicy",
    "kms CreateKey": "ScheduleKeyDeletion",
    "lambda PublishVersion": "DeleteFunction",
    "route53 ChangeResourceRecordSets": "ChangeResourceRecordSets",
    "route53 ChangeTagsForResource": "ChangeTagsForResource",
    "s3api CreateMultipartUpload": "AbortMultipartUpload",
    "s3api UploadPart": "AbortMultipartUpload",
    "s3api UploadPartCopy": "AbortMultipartUpload",
    "s3api CompleteMultipartUpload": "DeleteObject",
    "s3api CopyObject": "DeleteObject",
    "secretsmanager PutSecretValue": "DeleteSecret",
    "ses VerifyDomainIdentity": "DeleteIdentity",
    "ses VerifyEmailIdentity": "DeleteIdentity",
    "sns Publish": "DeleteTopic",
    "sns PublishBatch": "DeleteTopic",
}
"""Operations whose counterpart has another name, and the one that is served."""
SETTING = "a setting that every such resource has: the same operation sets it back"
RECORD = "a record, which AWS lets nobody remove; it goes with what holds it, or by its retention"
WITHOUT_COUNTERPART = {
    "autoscaling SetDesiredCapacity": SETTING,
    "cloudtrail PutEventSelectors": SETTING,
    "cloudwatch PutMetricData": RECORD,
    "cloudwatch SetAlarmState": SETTING,
    "cognito-idp SetUserPoolMfaConfig": SETTING,
    "ecr PutImageScanningConfiguration": SETTING,
    "ecr PutImageTagMutability": SETTING,
    "ecs PutClusterCapacityProviders": SETTING,
    "efs PutBackupPolicy": SETTING,
    "efs PutLifecycleConfiguration": SETTING,
    "elbv2 SetIpAddressType": SETTING,
    "elbv2 SetSecurityGroups": SETTING,
    "elbv2 SetSubnets": SETTING,
    "events PutEvents": RECORD,
    "firehose PutRecord": RECORD,
    "firehose PutRecordBatch": RECORD,
    "kinesis PutRecord": RECORD,
    "kinesis PutRecords": RECORD,
    "kms PutKeyPolicy": SETTING,
    "logs PutLogEvents": RECORD,
    "s3api PutBucketAccelerateConfiguration": SETTING,
    "s3api PutBucketAcl": SETTING,
    "s3api PutBucketLogging": SETTING,
    "s3api PutBucketNotificationConfiguration": SETTING,
    "s3api PutBucketRequestPayment": SETTING,
    "s3api PutBucketVersioning": SETTING,
    "s3api PutObjectLockConfiguration": SETTING,
    "sns SetSubscriptionAttributes": SETTING,
    "sns SetTopicAttributes": SETTING,
    "sqs SetQueueAttributes": SETTING,
}
"""Operations that nothing takes back, with the reason."""


def served_operations() -> dict[str, tuple[dict[str, str], frozenset[str]]]:
    """Return, by service of the CLI, its served operations (word: API name) and all names of its
    model."""
    session = botocore.session.Session()
    found = {}
    for service, words in ALLOWED.items():
        if service != "s3":
            known: Any = session.get_service_model(
                "s3" if service == "s3api" else service
            ).operation_names
            names = {xform_name(name, "-"): name for name in known}
            found[service] = ({word: names[word] for word in words}, frozenset(known))
    return found


SERVED = served_operations()


def counterparts(service: str, operation: str) -> set[str] | None:
    """Return the names that a counterpart may have in the model of the service, None for what makes
    nothing."""
    verb = max((verb for verb in VERBS if operation.startswith(verb)), key=len, default="")
    if not verb:
        return None
    noun = operation.removeprefix(verb)
    nouns = {
        noun,
        f"{noun}s",
        noun.removesuffix("s"),
        noun.removesuffix("Configuration"),
        noun.removesuffix("Request"),
    }
    return {f"{inverse}{one}" for inverse in VERBS[verb] for one in nouns} & SERVED[service][1]


@pytest.mark.parametrize("service", sorted(SERVED))
def test_what_can_be_made_can_be_removed(service: str) -> None:
    """Tags, stages, plans, named queries, groups and aliases used to stay for ever, once made."""
    served = set(SERVED[service][0].values())
    missing = []
    for operation in sorted(served):
        label = f"{service} {operation}"
        found = counterparts(service, operation)
        if label in NAMED_OTHERWISE:
            found = {NAMED_OTHERWISE[label]}
        if found is not None and label not in WITHOUT_COUNTERPART and not found & served:
            missing.append(f"{label} has no served counterpart (known: {sorted(found)})")
    assert not missing


def test_no_exception_is_out_of_date() -> None:
    """Each names a served operation, and none hides a counterpart that botocore knows."""
    for label in (*NAMED_OTHERWISE, *WITHOUT_COUNTERPART):
        service, operation = label.split()
        assert operation in SERVED[service][0].values(), label
    for label in WITHOUT_COUNTERPART:
        assert not counterparts(*label.split()), label
    assert not NAMED_OTHERWISE.keys() & WITHOUT_COUNTERPART.keys()
