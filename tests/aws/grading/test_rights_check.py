"""An identity has the run of the account whatever condition it hangs on, and by whichever way it got there."""

import json
from typing import Any

import pytest

from realhf.aws.episode.world import SlotState
from realhf.aws.grading.iam_policy import exceeds, parse_grant, parse_policy
from realhf.aws.grading.policy_check import PolicyCheck
from realhf.aws.grading.rights_check import RightsCheck
from realhf.aws.grading.verifier import CallCheck, Expectation
from realhf.aws.simulator.slot import Slot

ACCOUNT = "000000000000"
EVERYTHING = {"Effect": "Allow", "Action": "*", "Resource": "*"}
MODEST = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::data/*"}
FOREIGN = {"StringNotEquals": {"aws:PrincipalAccount": ACCOUNT}}
SOMEBODY = {"StringLike": {"aws:PrincipalArn": "*"}}
WIDE: list[Any] = [
    {**EVERYTHING, "Condition": SOMEBODY},
    {**EVERYTHING, "Condition": {"StringEquals": {"aws:PrincipalAccount": ACCOUNT}}},
    {**EVERYTHING, "Condition": {"Null": {"aws:PrincipalArn": "false"}}},
    {**EVERYTHING, "Condition": {"Bool": {"aws:SecureTransport": "true"}}},
    [EVERYTHING, {**EVERYTHING, "Effect": "Deny", "Condition": FOREIGN}],
    [EVERYTHING, {**EVERYTHING, "Effect": "Deny", "Condition": {"StringNotEqualsIfExists": {"aws:x": "y"}}}],
    [{**EVERYTHING, "Condition": SOMEBODY}, {**EVERYTHING, "Effect": "Deny", "Condition": FOREIGN}],
]
NARROW: list[Any] = [
    MODEST,
    {**MODEST, "Condition": SOMEBODY},
    [EVERYTHING, {**EVERYTHING, "Effect": "Deny"}],
    [EVERYTHING, {**EVERYTHING, "Effect": "Deny", "Condition": {"Bool": {"aws:SecureTransport": "true"}}}],
]


class FakeState:
    """One user with an inline policy, in one group with another."""

    def __init__(self, own: Any, of_group: Any = MODEST) -> None:
        self.documents = {"User": {"Statement": own}, "Group": {"Statement": of_group}}

    def call(self, service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        kind = "Group" if "GroupName" in params else "User"
        answers: dict[str, dict[str, Any]] = {
            f"List{kind}Policies": {"PolicyNames": ["p"]},
            f"Get{kind}Policy": {"PolicyDocument": self.documents[kind]},
            f"ListAttached{kind}Policies": {"AttachedPolicies": []},
            "ListGroupsForUser": {"Groups": [{"GroupName": "g"}]},
        }
        return answers[operation]

    def run(self, command: str) -> Any:
        raise AssertionError("no check here is a command")


@pytest.mark.parametrize("statements", WIDE)
def test_a_condition_makes_no_wide_right_modest(statements: Any) -> None:
    assert not RightsCheck("user", "u").holds(FakeState(statements))
    assert not RightsCheck("user", "u").holds(FakeState(MODEST, statements)), "of a group"
    assert exceeds(parse_policy({"Statement": statements}), [parse_grant({"action": "s3:*"})]) is not None


@pytest.mark.parametrize("statements", NARROW)
def test_modest_rights_stay_modest_under_a_condition(statements: Any) -> None:
    assert RightsCheck("user", "u").holds(FakeState(statements, statements))


QUEUE, TOPIC = f"arn:aws:sqs:us-east-1:{ACCOUNT}:q", f"arn:aws:sns:us-east-1:{ACCOUNT}:t"
SEND = {"principal": "sns.amazonaws.com", "action": "sqs:SendMessage", "resource": QUEUE}
FROM_TOPIC = {**SEND, "context": {"aws:SourceArn": TOPIC, "aws:SourceAccount": ACCOUNT}}


@pytest.mark.parametrize(
    ("condition", "right"),
    [
        ({"ArnEquals": {"aws:SourceArn": TOPIC}}, True),
        ({"StringEquals": {"aws:SourceAccount": ACCOUNT}}, True),
        ({"StringLike": {"aws:SourceAccount": "*"}}, False),
        ({"ArnLike": {"aws:SourceArn": ["?*"]}}, False),
    ],
)
def test_what_is_refused_without_a_context_is_refused_under_a_condition_that_is_always_met(
    condition: Any, right: bool
) -> None:
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": "sns.amazonaws.com"},
        "Action": "sqs:SendMessage",
        "Resource": QUEUE,
        "Condition": condition,
    }
    source = CallCheck("sqs", "GetQueueAttributes", {}, Expectation())
    check = PolicyCheck(source, "Policy", (parse_grant(FROM_TOPIC),), (parse_grant(SEND),))
    assert check._right(json.dumps({"Statement": statement})) is right


@pytest.mark.parametrize("shape", ["conditions", "patterns"])
def test_a_policy_that_takes_long_is_too_wide(shape: str) -> None:
    """Were each of these tried out, it would take tens of millions of comparisons."""
    statement: dict[str, Any] = {
        **MODEST,
        "Action": [f"s3:{i}" for i in range(60)],
        "Resource": [f"arn:aws:s3:::{i}" for i in range(60)],
    }
    if shape == "conditions":
        keys = {f"k{i}": [str(n) for n in range(40)] for i in range(40)}
        statement = {**MODEST, "Condition": {"StringEquals": keys}}
    found = exceeds(parse_policy({"Statement": statement}), [parse_grant({"action": "s3:*"})])
    assert (found is None) is (shape == "conditions")


@pytest.mark.sim
def test_the_policies_of_a_users_groups_are_read_from_the_simulator(slot: Slot) -> None:
    for operation, params in (
        ("CreateUser", {"UserName": "u"}),
        ("CreateGroup", {"GroupName": "g"}),
        ("AddUserToGroup", {"UserName": "u", "GroupName": "g"}),
    ):
        slot.state.call("iam", operation, params)
    check = RightsCheck("user", "u")
    assert check.holds(SlotState(slot))
    arn = "arn:aws:iam::aws:policy/AdministratorAccess"
    slot.state.call("iam", "AttachGroupPolicy", {"GroupName": "g", "PolicyArn": arn})
    assert not check.holds(SlotState(slot))
