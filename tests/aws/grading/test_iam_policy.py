"""What a policy permits does not depend on how it is written, and nothing that is too wide is overlooked."""

from typing import Any

import pytest

from realhf.aws.grading.iam_policy import PolicyError, Request, allows, exceeds, matches, parse_grant, parse_policy

READ = {"action": "s3:GetObject", "resource": "arn:aws:s3:::data/*"}
ALLOW = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::data/*"}
LAMBDA = {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
TRUST = {"principal": "lambda.amazonaws.com", "action": "sts:AssumeRole"}


def grants_exactly(statements: Any, *wanted: dict[str, Any], owner: str = "") -> tuple[bool, bool]:
    """(everything wanted is allowed, nothing else is)."""
    policy, grants = parse_policy({"Statement": statements}, owner), [parse_grant(data) for data in wanted]
    given = all(allows(policy, request) for grant in grants for request in grant.requests())
    return given, exceeds(policy, grants) is None


@pytest.mark.parametrize(
    "statements",
    [
        ALLOW,
        [ALLOW],
        [{**ALLOW, "Action": ["s3:GetObject"], "Resource": ["arn:aws:s3:::data/*"]}],
        [{**ALLOW, "Sid": "one"}, {**ALLOW, "Sid": "two", "Action": "S3:getobject"}],
        [ALLOW, {**ALLOW, "Resource": "arn:aws:s3:::data/reports/*"}],
        [ALLOW, {"Effect": "Deny", "Action": "s3:DeleteObject", "Resource": "*"}],
        [{**ALLOW, "Action": "s3:*"}, {"Effect": "Deny", "NotAction": "s3:GetObject", "Resource": "*"}],
        [ALLOW, {"Effect": "Deny", "Action": "*", "Condition": {"Bool": {"aws:SecureTransport": "false"}}}],
    ],
)
def test_equivalent_policies_are_one_policy(statements: Any) -> None:
    assert grants_exactly(statements, READ) == (True, True)


@pytest.mark.parametrize(
    ("statements", "given"),
    [
        ([{**ALLOW, "Action": ["s3:GetObject", "iam:*", "s3:*"]}], True),
        ([{**ALLOW, "Action": ["s3:GetObject", "iam:PassRole"]}], True),
        ([{**ALLOW, "Resource": ["arn:aws:s3:::data/*", "*"]}], True),
        ([{**ALLOW, "Resource": "arn:aws:s3:::data*"}], True),
        ([{**ALLOW, "Action": "s3:Get*"}], True),
        ([{"Effect": "Allow", "Action": "*", "Resource": "*"}], True),
        ([{"Effect": "Allow", "NotAction": "iam:*", "Resource": "*"}], True),
        ([{"Effect": "Allow", "Action": "s3:GetObject", "NotResource": "arn:aws:s3:::other/*"}], True),
        ([{"Effect": "Allow", "Action": "s3:GetObject"}], True),
        ([ALLOW, {"Effect": "Allow", "Action": "*", "Resource": "*", "Condition": {"Bool": {"aws:x": "true"}}}], True),
        ([ALLOW, {**ALLOW, "Action": "s3:Put*", "Condition": {"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}}], True),
        ([ALLOW, {**ALLOW, "Action": "s3:PutObject", "Condition": {"StringEqualsIfExists": {"aws:x": "y"}}}], True),
        ([ALLOW, {**ALLOW, "Action": "s3:PutObject", "Condition": {"StringEquals": {"aws:x": ["y", "z"]}}}], True),
        ([{**ALLOW, "Action": "s3:*"}, {"Effect": "Deny", "NotAction": "s3:Get*", "Resource": "*"}], True),
    ],
)
def test_what_is_too_wide_is_found(statements: Any, given: bool) -> None:
    assert grants_exactly(statements, READ) == (given, False)


@pytest.mark.parametrize(
    "statements",
    [
        [{**ALLOW, "Effect": "Deny"}],
        [ALLOW, {"Effect": "Deny", "Action": "s3:*", "Resource": "*"}],
        [ALLOW, {"Effect": "Deny", "NotAction": "s3:PutObject", "Resource": "*"}],
        [{**ALLOW, "Action": "s3:GetObjectAcl"}],
        [{**ALLOW, "Resource": "arn:aws:s3:::data/reports/*"}],
        [{**ALLOW, "Resource": "arn:aws:s3:::data"}],
        [{**ALLOW, "Condition": {"StringEquals": {"aws:SourceAccount": "999999999999"}}}],
        [{**ALLOW, "Condition": {"DateGreaterThan": {"aws:CurrentTime": "2999-01-01T00:00:00Z"}}}],
    ],
)
def test_what_does_not_let_the_request_through_is_no_grant(statements: Any) -> None:
    assert not grants_exactly(statements, READ)[0]


@pytest.mark.parametrize(
    ("principal", "given", "no_wider"),
    [
        ({"Service": "lambda.amazonaws.com"}, True, True),
        ({"Service": ["lambda.amazonaws.com"]}, True, True),
        ({"Service": ["lambda.amazonaws.com", "ec2.amazonaws.com"]}, True, False),
        ({"Service": "lambda.amazonaws.com", "AWS": "000000000000"}, True, False),
        ("*", True, False),
        ({"AWS": "*"}, True, False),
        ({"Service": "*"}, True, False),
        ({"AWS": "lambda.amazonaws.com"}, False, False),
        ("lambda.amazonaws.com", False, False),
        ({"Service": "not-lambda.amazonaws.com"}, False, False),
    ],
)
def test_principals_in_every_notation(principal: Any, given: bool, no_wider: bool) -> None:
    assert grants_exactly({**LAMBDA, "Principal": principal}, TRUST) == (given, no_wider)


def test_a_refusal_or_everybody_but_one_is_no_trust() -> None:
    assert not grants_exactly({**LAMBDA, "Effect": "Deny"}, TRUST)[0]
    everybody_else = {"Effect": "Allow", "NotPrincipal": LAMBDA["Principal"], "Action": "sts:AssumeRole"}
    assert grants_exactly(everybody_else, TRUST) == (False, False)
    assert grants_exactly([LAMBDA, {**LAMBDA, "Principal": "*", "Effect": "Deny"}], TRUST) == (False, True)


def test_an_account_is_its_root() -> None:
    wanted = {"principal": {"AWS": "123456789012"}, "action": "ecr:BatchGetImage"}
    for written in ("123456789012", ["arn:aws:iam::123456789012:root"]):
        statement = {"Effect": "Allow", "Principal": {"AWS": written}, "Action": ["ecr:BatchGetImage"]}
        assert grants_exactly(statement, wanted) == (True, True)


QUEUE, TOPIC = "arn:aws:sqs:us-east-1:000000000000:q", "arn:aws:sns:us-east-1:000000000000:t"
SEND = {
    "principal": "sns.amazonaws.com",
    "action": "sqs:SendMessage",
    "resource": QUEUE,
    "context": {"aws:SourceArn": TOPIC, "aws:SourceAccount": "000000000000"},
}


@pytest.mark.parametrize(
    ("principal", "condition", "no_wider"),
    [
        ({"Service": "sns.amazonaws.com"}, None, True),
        ({"Service": "sns.amazonaws.com"}, {"ArnEquals": {"aws:SourceArn": TOPIC}}, True),
        ({"Service": "sns.amazonaws.com"}, {"ArnLike": {"aws:SourceArn": "arn:aws:sns:*:*:*"}}, True),
        ("*", {"ArnLike": {"aws:SourceArn": TOPIC}, "StringEquals": {"aws:SourceAccount": "000000000000"}}, False),
        ("*", {"ArnEquals": {"aws:SourceArn": [TOPIC, TOPIC + "2"]}}, False),
        ("*", {"ArnLike": {"aws:SourceArn": "arn:aws:sns:*:*:*"}}, False),
        ("*", None, False),
    ],
)
def test_a_condition_may_say_where_a_call_comes_from(principal: Any, condition: Any, no_wider: bool) -> None:
    """It narrows what a policy gives; it does not make somebody else the one who was meant."""
    for resource in (QUEUE, "*"):
        statement = {"Effect": "Allow", "Principal": principal, "Action": "SQS:SendMessage", "Resource": resource}
        statement |= {"Condition": condition} if condition else {}
        assert grants_exactly(statement, SEND, owner=QUEUE) == (True, no_wider)


def test_nothing_wanted_means_that_nothing_may_be_allowed() -> None:
    assert grants_exactly({**ALLOW, "Effect": "Deny"}) == (True, True)
    assert grants_exactly(ALLOW) == (True, False)


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        "x",
        "{}",
        {"Statement": []},
        {"Statement": "x"},
        {"Statement": ["x"]},
        {"Statement": {**ALLOW, "Effect": "allow"}},
        {"Statement": {**ALLOW, "Action": []}},
        {"Statement": {**ALLOW, "NotAction": "*"}},
        {"Statement": {"Effect": "Allow", "Resource": "*"}},
        {"Statement": {**ALLOW, "Actions": "*"}},
        {"Statement": {**ALLOW, "Principal": {"Everyone": "*"}}},
        {"Statement": {**ALLOW, "Resource": "r" * 3000}},
        "[" * 20_000,
        {"Statement": [{**ALLOW, "Action": ["a" * 99 + str(i) for i in range(300)]}]},
    ],
)
def test_what_is_no_policy_is_refused(document: Any) -> None:
    with pytest.raises(PolicyError):
        parse_policy(document)


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("a*", "a", True),
        ("a*c", "abc", True),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        ("*", "", True),
        ("a*b*c", "axbxxc", True),
        ("ab*bc", "abc", False),
        ("a.c", "abc", False),
        ("a", "ab", False),
        ("", "a", False),
        ("*a", "ba\n", False),
        ("a*", "a\nb", True),
        ("?*", "", False),
    ],
)
def test_patterns(pattern: str, text: str, fits: bool) -> None:
    assert matches(pattern, text) is fits


def test_no_policy_takes_long_to_judge() -> None:
    """One of the greatest length, made of patterns that are hard to compare; were it tried out, this would not end."""
    patterns = ["*a" * (20 + i % 7) + f"*{i}" for i in range(150)]
    policy = parse_policy({"Statement": [{"Effect": "Allow", "Action": patterns, "Resource": patterns[:100]}]})
    assert exceeds(policy, [parse_grant(READ)]) is not None
    assert not allows(policy, Request("", "a" * 2000 + "b", "a" * 2000 + "b"))


def test_a_wanted_grant_is_checked_when_it_is_read() -> None:
    for wrong in ({"actions": "x"}, {"action": 5}, {"context": {"a": 1}}, {"principal": {"Nobody": "x"}}):
        with pytest.raises(PolicyError):
            parse_grant(wrong)
