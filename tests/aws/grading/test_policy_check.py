"""Checks of policies in a state: by a call or of a resource, written in any way; no policy allows nothing."""

import json
from typing import Any

import pytest

from realhf.aws.cli.state_client import StateCallError
from realhf.aws.grading.check_parser import parse_check
from realhf.aws.tasks.task import TaskError

CALL = {"service": "iam", "operation": "GetRolePolicy", "params": {"RoleName": "r", "PolicyName": "app"}}
READ = {"action": "s3:GetObject", "resource": "arn:aws:s3:::data/*"}
ALLOW = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::data/*"}


class FakeState:
    """Answers by operation; what it does not know is absent."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def call(self, service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        if operation not in self.answers:
            raise StateCallError("NoSuchEntity", "absent")
        return self.answers[operation]

    def run(self, command: str) -> Any:
        raise AssertionError("no check here is a command")


def holds(statements: Any, **keys: Any) -> bool:
    check = parse_check({"call": CALL, "json_path": "PolicyDocument", **keys})
    return check.holds(FakeState(GetRolePolicy={"PolicyDocument": {"Statement": statements}}))


def test_allowed_refused_and_wider() -> None:
    wide = {**ALLOW, "Action": "s3:*"}
    assert holds(ALLOW, allows=[READ]) and holds([ALLOW], allows=[READ])
    assert not holds(wide, allows=[READ]) and holds(wide, allows=[READ], wider=True)
    assert not holds({**ALLOW, "Effect": "Deny"}, allows=[READ])
    assert holds(wide, allows=[READ], refuses=[{"action": "iam:PassRole"}], wider=True)
    assert not holds(wide, allows=[READ], refuses=[{**READ, "action": "s3:PutObject"}], wider=True)
    assert not holds("nonsense", allows=[READ])


def test_no_policy_is_right_where_nothing_may_be_allowed() -> None:
    for wanted, right in (
        ({"allows": []}, True),
        ({"refuses": [READ], "wider": True}, True),
        ({"allows": [READ]}, False),
    ):
        assert parse_check({"call": CALL, "json_path": "PolicyDocument", **wanted}).holds(FakeState()) is right


def test_the_policy_of_a_resource_is_found_by_its_path() -> None:
    trust = {"Effect": "Allow", "Principal": {"Service": ["ecs-tasks.amazonaws.com"]}, "Action": "sts:AssumeRole"}
    role = {"RoleName": "r", "Path": "/", "AssumeRolePolicyDocument": {"Statement": trust}}
    wanted = {"service": "iam", "type": "role", "name": "r", "json_path": "AssumeRolePolicyDocument"}
    wanted["allows"] = [{"principal": "ecs-tasks.amazonaws.com", "action": "sts:AssumeRole"}]
    assert parse_check(wanted).holds(FakeState(GetRole={"Role": role}))
    assert not parse_check(wanted | {"attributes": {"Path": "/x/"}}).holds(FakeState(GetRole={"Role": role}))
    assert not parse_check(wanted | {"allows": []}).holds(FakeState()), "a role that does not exist"


def test_a_policy_in_text_is_read_too() -> None:
    wanted = {"service": "s3", "type": "bucket", "name": "data", "json_path": "BucketPolicy", "allows": []}
    text = json.dumps({"Statement": ALLOW | {"Principal": "*"}})
    assert not parse_check(wanted).holds(FakeState(HeadBucket={}, GetBucketPolicy={"Policy": text}))
    assert parse_check(wanted).holds(FakeState(HeadBucket={}))


@pytest.mark.parametrize(
    "check",
    [
        {"call": CALL, "allows": [READ]},
        {"call": CALL, "json_path": "][", "allows": [READ]},
        {"call": CALL, "json_path": "x", "allows": READ},
        {"call": CALL, "json_path": "x", "allows": ["s3:GetObject"]},
        {"call": CALL, "json_path": "x", "allows": [{"actions": "s3:GetObject"}]},
        {"call": CALL, "json_path": "x", "allows": [READ], "expected": 1},
        {"call": CALL, "json_path": "x", "wider": True},
        {"call": {**CALL, "operation": "DeleteRolePolicy"}, "json_path": "x", "allows": [READ]},
        [],
        [[]],
        {"unchanged": {"call": CALL, "fields": ["x"]}},
        {"unchanged": {"service": "s3", "type": "bucket", "name": "b", "fields": ["]["]}},
        {"unchanged": {"service": "s3", "type": "moon", "name": "b"}},
        {"unchanged": "s3"},
    ],
)
def test_malformed_checks_are_task_errors(check: Any) -> None:
    with pytest.raises(TaskError):
        parse_check(check)
