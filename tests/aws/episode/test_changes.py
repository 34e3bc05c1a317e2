"""What an episode changed in its account, from the requests that it sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from realhf.aws.episode import account_changes
from realhf.aws.episode.account_changes import AccountChanges
from realhf.aws.grading.tracker import Evidence, resource_name


def deed(operation: str, params: Mapping[str, Any], *, ok: bool = True) -> Evidence:
    return Evidence(
        0, operation, params, resource_name(operation.partition(":")[0], params), ok, ""
    )


def told(
    *deeds: Evidence, present: frozenset[tuple[str, str]] = frozenset()
) -> list[tuple[str, ...]]:
    found = AccountChanges(present)
    found.record(deeds)
    return [
        tuple(one[key] for key in ("service", "type", "name", "before", "after"))
        for one in found.describe()
    ]


def test_what_was_made_changed_and_removed_is_told_by_resource() -> None:
    bucket = {"Bucket": "b"}
    role = {"RoleName": "r"}
    versioning = {**bucket, "VersioningConfiguration": {"Status": "Enabled"}}
    assert told(deed("s3:CreateBucket", bucket), deed("s3:PutBucketVersioning", versioning)) == [
        ("s3", "bucket", "b", "none", "there")
    ]
    assert told(deed("s3:PutBucketVersioning", versioning)) == [
        ("s3", "bucket", "b", "there", "changed")
    ]
    assert told(deed("s3:DeleteBucketPolicy", bucket)) == [
        ("s3", "bucket", "b", "there", "changed")
    ]
    assert told(deed("s3:DeleteBucket", bucket)) == [("s3", "bucket", "b", "there", "gone")]
    made_and_removed = told(deed("iam:CreateRole", role), deed("iam:DeleteRole", role))
    assert made_and_removed == [("iam", "role", "r", "none", "none")]
    again = told(deed("iam:CreateRole", role), present=frozenset({("iam", "r")}))
    assert again == [("iam", "role", "r", "there", "changed")], (
        "what the set-up made was there before"
    )


def test_names_of_one_service_are_told_apart_by_their_type() -> None:
    assert told(
        deed("iam:CreateRole", {"RoleName": "x"}), deed("iam:CreateUser", {"UserName": "x"})
    ) == [
        ("iam", "role", "x", "none", "there"),
        ("iam", "user", "x", "none", "there"),
    ]
    queue = {
        "QueueUrl": "http://localhost/000000000000/q",
        "Attributes": {"VisibilityTimeout": "5"},
    }
    assert told(
        deed("sqs:CreateQueue", {"QueueName": "q"}), deed("sqs:SetQueueAttributes", queue)
    ) == [("sqs", "queue", "q", "none", "there")]


def test_what_only_looked_or_failed_changed_nothing() -> None:
    assert (
        told(
            deed("s3:ListObjectsV2", {"Bucket": "b"}),
            deed("s3:CreateBucket", {"Bucket": "b"}, ok=False),
        )
        == []
    )
    assert told(deed("s3:CreateBucket", {})) == [], "a request without a name"


def test_calls_say_what_was_set_and_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account_changes, "MAX_RESOURCES", 3)
    found = AccountChanges()
    found.record([deed("s3:PutBucketTagging", {"Bucket": "b", "Tagging": "\ud800" * 10_000})] * 9)
    found.record([deed("s3:CreateBucket", {"Bucket": "c" * 10_000})])
    found.record([deed("s3:CreateBucket", {"Bucket": f"d{number}"}) for number in range(4)])
    first, second, third, more = found.describe({("s3", "b")})
    assert (
        len(first["calls"]) == account_changes.MAX_CALLS + 2
        and first["calls"][0] == "3 calls, then"
    )
    assert (
        first["calls"][1].startswith('PutBucketTagging {"Tagging": ')
        and first["calls"][-1] == account_changes.DISTURBED
    )
    assert (
        len(second["name"]) == account_changes.LONGEST
        and third["name"] == "d0"
        and more == {"more": 3}
    )
    assert len(json.dumps(found.describe()).encode()) < 4000
