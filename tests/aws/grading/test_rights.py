"""Whoever may do more than before is found, by whatever way it came, and nobody else."""

import json
from typing import Any

import pytest

from realhf.aws.grading.policy_comparison import Budget, Policies, compare_policies
from realhf.aws.grading.rights import (
    MAX_STEPS,
    GainedRight,
    Resources,
    RightsChange,
    compare_rights,
    read_document,
    read_rights,
)

ACCOUNT = "000000000000"
QUEUE = f"arn:aws:sqs:us-east-1:{ACCOUNT}:jobs"
ADMIN = "arn:aws:iam::aws:policy/AdministratorAccess"
OWN = f"arn:aws:iam::{ACCOUNT}:policy/own"
ALL = {"Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}
READ = {
    "Statement": {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::data/*"}
}
LIST = {
    "Statement": {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "arn:aws:s3:::data"}
}


def trust(**principal: Any) -> dict[str, Any]:
    return {
        "Statement": [
            {"Effect": "Allow", "Principal": principal or "*", "Action": "sts:AssumeRole"}
        ]
    }


def send(principal: Any, **more: Any) -> dict[str, Any]:
    statement = {
        "Effect": "Allow",
        "Principal": principal,
        "Action": "sqs:SendMessage",
        "Resource": QUEUE,
        **more,
    }
    return {"Version": "2012-10-17", "Statement": [statement]}


class Account:
    """An account with a user, a group, a role, a policy and a queue, in the shape that MiniStack
    keeps them in."""

    def __init__(self) -> None:
        self.user: dict[str, Any] = {
            "Arn": f"arn:aws:iam::{ACCOUNT}:user/ann",
            "AttachedPolicies": [],
        }
        self.inline: dict[str, Any] = {}
        self.group: dict[str, Any] = {"Users": [], "AttachedPolicies": []}
        self.group_inline: dict[str, Any] = {}
        self.role: dict[str, Any] = {
            "Arn": f"arn:aws:iam::{ACCOUNT}:role/app",
            "AssumeRolePolicyDocument": json.dumps(trust(Service="lambda.amazonaws.com")),
            "InlinePolicies": {"app": json.dumps(READ)},
        }
        self.versions: dict[str, Any] = {"v1": {"Document": json.dumps(READ)}}
        self.default = "v1"
        self.queue: dict[str, Any] = {"attributes": {"QueueArn": QUEUE}}
        self.more: dict[tuple[str, str, str], Any] = {}

    def resources(self) -> Resources:
        return {
            ("iam", "users", "ann"): self.user,
            ("iam", "user_inline_policies", "ann"): self.inline,
            ("iam", "groups", "staff"): self.group,
            ("iam", "group_inline_policies", "staff"): self.group_inline,
            ("iam", "roles", "app"): self.role,
            ("iam", "policies", OWN): {
                "Arn": OWN,
                "Versions": self.versions,
                "DefaultVersionId": self.default,
            },
            ("sqs", "queues", "jobs"): self.queue,
            **self.more,
        }


def change(before: Account, after: Account) -> RightsChange:
    return compare_rights(read_rights(before.resources()), read_rights(after.resources()))


def openings(found: RightsChange) -> list[GainedRight]:
    """What lets somebody in from outside of the account."""
    return [one for one in found.gained if one.who in ("anybody", "another account")]


def same_policy(wanted: Any, found: Any) -> bool:
    one = Policies(read_document(wanted))
    other = Policies(read_document(found))
    return compare_policies(one, other, Budget(MAX_STEPS)).equal


def test_the_same_account_has_the_same_rights() -> None:
    assert change(Account(), Account()) == RightsChange()


def test_whoever_stays_administrator_through_a_group_is_seen() -> None:
    """The inline policy is gone, as was asked for, and the rights are there all the same."""
    wanted = Account()
    found = Account()
    found.group.update(Users=["ann"], AttachedPolicies=[ADMIN])
    (more,) = change(wanted, found).gained
    assert str(more) == f"{wanted.user['Arn']} may * on *"
    assert more.who == "the account"
    by_group = Account()
    by_inline = Account()
    by_group.group.update(Users=["ann"])
    by_group.group_inline["all"] = ALL
    by_inline.group.update(Users=["ann"])
    by_inline.inline["all"] = json.dumps(ALL)
    assert change(by_inline, by_group).changed == ("staff",), (
        "the user may do the same by either way"
    )


def test_a_group_without_members_gives_nobody_anything() -> None:
    before = Account()
    after = Account()
    after.group_inline["all"] = ALL
    assert not change(before, after).gained
    assert change(before, after).changed == ("staff",)


def test_the_version_that_counts_is_the_default() -> None:
    before = Account()
    after = Account()
    switched = Account()
    for one in (before, after, switched):
        one.user["AttachedPolicies"] = [OWN]
    for one in (after, switched):
        one.versions["v2"] = {"Document": json.dumps(ALL)}
    switched.default = "v2"
    assert change(before, after) == RightsChange()
    assert [one.holder for one in change(before, switched).gained] == [before.user["Arn"]]


def test_a_boundary_limits_and_its_end_is_a_gain() -> None:
    bound = Account()
    free = Account()
    for one in (bound, free):
        one.inline["all"] = ALL
    bound.user["PermissionsBoundary"] = OWN
    assert not change(free, bound).gained
    assert change(free, bound).changed == (free.user["Arn"],)
    assert len(change(bound, free).gained) == 1
    small = Account()
    small.inline["read"] = READ
    assert change(small, bound) == RightsChange(), (
        "what the boundary leaves of everything is what it names"
    )


def test_a_denial_of_what_nobody_allowed_changes_nothing_unless_a_resource_allows_it() -> None:
    before = Account()
    after = Account()
    after.inline["no"] = {"Statement": {"Effect": "Deny", "Action": "sqs:*", "Resource": "*"}}
    assert change(before, after) == RightsChange()
    for one in (before, after):
        one.queue["attributes"]["Policy"] = json.dumps(send({"AWS": one.user["Arn"]}))
    assert change(before, after).changed == (before.user["Arn"],)


def test_policies_of_aws_are_equal_to_themselves_only() -> None:
    before = Account()
    after = Account()
    before.user["AttachedPolicies"] = [ADMIN]
    after.user["AttachedPolicies"] = ["arn:aws:iam::aws:policy/ReadOnlyAccess"]
    assert not change(before, after).gained, "an administrator has it already"
    (more,) = change(Account(), after).gained
    assert str(more).endswith("where arn:aws:iam::aws:policy/ReadOnlyAccess says so")


@pytest.mark.parametrize(
    "document",
    ["{", "[]", '{"Statement": [{"Effect": "Perhaps"}]}', '{"Statement": 5}', "[" * 5000],
)
def test_what_cannot_be_read_may_be_anything(document: str) -> None:
    before = Account()
    after = Account()
    after.inline["odd"] = document
    assert len(change(before, after).gained) == 1
    assert change(after, after) == RightsChange()


@pytest.mark.parametrize(
    ("document", "who", "opening"),
    [
        (send("*"), "anybody", True),
        (
            send(
                {"AWS": "*"},
                Condition={"ArnEquals": {"aws:SourceArn": "arn:aws:sns:us-east-1:1:t"}},
            ),
            "anybody",
            True,
        ),
        (send({"AWS": "arn:aws:iam::*:root"}), "anybody", True),
        (send({"Federated": "accounts.example"}), "anybody", True),
        (send({"AWS": "111122223333"}), "another account", True),
        (send({"AWS": f"arn:aws:iam::{ACCOUNT}:user/x"}), "the account", False),
        (send({"Service": "sns.amazonaws.com"}), "a service", False),
    ],
)
def test_who_gains_by_the_policy_of_a_resource(document: Any, who: str, opening: bool) -> None:
    before = Account()
    after = Account()
    after.queue["attributes"]["Policy"] = document
    found = change(before, after)
    assert {one.who for one in found.gained} == {who}
    assert bool(openings(found)) is opening
    assert found.changed == ("sqs/queues/jobs/attributes/Policy",)
    assert not change(after, before).gained


def test_wider_trust_is_told_with_the_role() -> None:
    before = Account()
    after = Account()
    after.role["AssumeRolePolicyDocument"] = trust(
        Service=["lambda.amazonaws.com", "ec2.amazonaws.com"]
    )
    (more,) = change(before, after).gained
    assert (more.holder, more.who) == (f"trust in {before.role['Arn']}", "a service")
    after.role["AssumeRolePolicyDocument"] = trust()
    assert [one.who for one in openings(change(before, after))] == ["anybody"]


def test_policies_are_found_wherever_they_hang() -> None:
    before = Account()
    after = Account()
    function = f"arn:aws:lambda:us-east-1:{ACCOUNT}:function:f"
    statement = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "lambda:InvokeFunction",
        "Resource": function,
    }
    after.more = {
        ("s3", "bucket_policies", "data"): {
            "Statement": [
                {
                    "Effect": "Allow",
                    "Principal": "*",
                    "Action": "s3:*",
                    "Resource": "arn:aws:s3:::data",
                }
            ]
        },
        ("lambda", "functions", "f"): {
            "config": {"FunctionArn": function},
            "policy": {"Statement": [statement]},
        },
        ("kms", "grants", "g"): {
            "KeyId": "k",
            "GranteePrincipal": "arn:aws:iam::999988887777:root",
            "Operations": ["Decrypt"],
        },
    }
    found = change(before, after)
    assert [(one.holder, one.who, one.new) for one in openings(found)] == [
        ("kms/grants/g", "another account", True),
        ("lambda/functions/f/policy", "anybody", True),
        ("s3/bucket_policies/data", "anybody", True),
    ]


def test_documents_are_the_same_when_they_mean_the_same() -> None:
    assert same_policy(
        READ, json.dumps({"Version": "2012-10-17", "Statement": [READ["Statement"]] * 2})
    )
    assert same_policy(
        READ,
        {"Statement": [{**READ["Statement"], "Effect": ["Allow"], "Action": ["s3:getobject"]}]},
    )
    assert not same_policy(READ, ALL)
    assert not same_policy(READ, None)
    assert same_policy(None, {"Statement": []})
    home = {
        "Effect": "Allow",
        "Action": "s3:GetObject",
        "Resource": "arn:aws:s3:::home/${aws:username}/*",
    }
    assert same_policy({"Statement": home}, {"Version": "2008-10-17", "Statement": home})
    assert not same_policy({"Statement": home}, {"Version": "2012-10-17", "Statement": home}), (
        "a variable"
    )


def hostile(kind: str) -> dict[str, Any]:
    if kind == "statements":
        listed = [{"Effect": "Allow", "Action": f"a:{n}", "Resource": f"b{n}*"} for n in range(300)]
    elif kind == "stars":
        listed = [
            {
                "Effect": "Deny",
                "Action": "*",
                "Resource": "*".join(f"{n * k % 97}" for k in range(200)),
            }
            for n in range(20)
        ]
    else:
        listed = [
            {
                "Effect": "Allow",
                "Action": "*",
                "Resource": "*",
                "Condition": {"StringLike": {f"k{n}": "x"}},
            }
            for n in range(200)
        ]
    return {"Version": "2012-10-17", "Statement": listed}


@pytest.mark.parametrize("kind", ["statements", "stars", "conditions"])
def test_what_takes_long_is_named_and_never_taken_for_equal(kind: str) -> None:
    """Many holders of such policies cost no more than one: the steps are those of the whole
    account."""
    before = Account()
    after = Account()
    after.more = {
        ("iam", "users", f"u{n}"): {
            "Arn": f"arn:aws:iam::{ACCOUNT}:user/u{n}",
            "AttachedPolicies": [OWN],
        }
        for n in range(100)
    }
    after.versions["v1"] = {"Document": json.dumps(hostile(kind))}
    found = change(before, after)
    assert len(found.not_compared) + len(found.changed) == 100
    assert len(found.not_compared) > 90
