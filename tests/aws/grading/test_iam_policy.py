"""Policies as AWS would take them, and the patterns in them."""

from typing import Any

import pytest

from realhf.aws.grading.policy_comparison import Names, PolicyError, matches, parse_policy

ALLOW = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::data/*"}


def test_one_form_whatever_the_notation() -> None:
    (one,) = parse_policy(
        {"Statement": {**ALLOW, "Principal": {"AWS": ["123456789012"], "Service": "x.amazonaws.com"}}}
    )
    assert one.principals == Names(("AWS:arn:aws:iam::123456789012:root", "Service:x.amazonaws.com"))
    assert (one.allow, one.actions.patterns, one.conditions) == (True, ("s3:getobject",), ())
    (other,) = parse_policy('{"Statement": [{"Effect": "Deny", "NotAction": "*", "NotPrincipal": "*"}]}')
    assert not other.allow and other.actions.inverted and other.principals.inverted and other.resources == Names()


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


def test_no_pattern_takes_long() -> None:
    """Patterns that are hard to compare; were it tried out, this would not end."""
    for number in range(150):
        assert not matches("*a" * (20 + number % 7) + f"*{number}", "a" * 2000 + "b")
