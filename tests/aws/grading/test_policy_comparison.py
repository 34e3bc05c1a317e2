"""Policies as AWS would take them, the patterns in them, and policies compared by what they mean:
against every request there is, and as people write them."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.aws.grading.policy_comparison import (
    Budget,
    Gain,
    Names,
    Policies,
    PolicyError,
    Statement,
    TooManySteps,
    combinations,
    compare_policies,
    matches,
    parse_policy,
)

ALLOW = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::data/*"}


def test_one_form_whatever_the_notation() -> None:
    (one,) = parse_policy(
        {
            "Statement": {
                **ALLOW,
                "Principal": {"AWS": ["123456789012"], "Service": "x.amazonaws.com"},
            }
        }
    )
    assert one.principals == Names(
        ("AWS:arn:aws:iam::123456789012:root", "Service:x.amazonaws.com")
    )
    assert (one.allow, one.actions.patterns, one.conditions) == (True, ("s3:getobject",), ())
    (other,) = parse_policy(
        '{"Statement": [{"Effect": "Deny", "NotAction": "*", "NotPrincipal": "*"}]}'
    )
    assert (
        not other.allow
        and other.actions.inverted
        and other.principals.inverted
        and other.resources == Names()
    )


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


LONGER_NAMES = [
    "".join(chars) for size in range(1, 7) for chars in itertools.product("abz", repeat=size)
]
"""z stands for all that no pattern names."""


def matched(patterns: list[str], name: str) -> int:
    """The combination, by the regular expressions of Python."""
    expressions = [re.escape(p).replace(r"\*", ".*").replace(r"\?", ".") for p in patterns]
    return sum(1 << i for i, one in enumerate(expressions) if re.fullmatch(one, name, re.DOTALL))


@pytest.mark.slow
@pytest.mark.parametrize("chars", ["ab*?", "ab*"])
def test_the_combinations_are_those_of_all_names(chars: str) -> None:
    """The names of up to six letters are tried one by one, without the automata."""

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.text(chars, max_size=3), min_size=1, max_size=3))
    def check(patterns: list[str]) -> None:
        found = combinations(patterns, Budget(1_000_000))
        for mask, name in found.items():
            assert name
            assert matched(patterns, name) == mask
        assert {matched(patterns, name) for name in LONGER_NAMES} <= found.keys()

    check()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.builds(str.__add__, st.text("ab", max_size=4), st.sampled_from(["", "*"])), max_size=6
    )
)
def test_patterns_with_a_star_at_the_end_need_no_automaton_and_get_the_same(
    patterns: list[str],
) -> None:
    """A pattern that matches nothing but a ? sends the same patterns through the automata."""
    quick = combinations(patterns, Budget(1_000_000))
    for mask, name in quick.items():
        assert matched(patterns, name) == mask
    last = 1 << len(patterns)
    assert quick.keys() == {
        mask & ~last for mask in combinations([*patterns, "?"], Budget(1_000_000))
    }


def test_what_a_variable_stands_for_is_left_open() -> None:
    masks = combinations(["home/${aws:username}/*", "home/*"], Budget(10_000)).keys()
    assert masks == {0b00, 0b10, 0b11}, (
        "within home/* both what the variable names and what it does not"
    )


@pytest.mark.parametrize(
    "patterns",
    [
        ["*".join("ab"[n >> bit & 1] for bit in range(8)) + "*" for n in range(200)],
        [f"*{n}*" for n in range(60)],
        ["?*" * 1000, "*?" * 1000, "*a" * 1000],
        [f"{n}*" for n in range(5_000)] + [f"{n}" + "x" * n + "*" for n in range(1_000)],
        ["${" + str(n) + "}" for n in range(40)],
    ],
)
def test_patterns_that_take_long_are_given_up(patterns: list[str]) -> None:
    budget = Budget(100_000)
    with pytest.raises(TooManySteps):
        combinations(patterns, budget)


def equal(one: Policies, other: Policies, budget: Budget) -> bool:
    return compare_policies(one, other, budget).equal


def gains(one: Policies, other: Policies, budget: Budget) -> tuple[Gain, ...]:
    return compare_policies(one, other, budget).gains


@dataclass(frozen=True)
class Request:
    """What somebody asks for; ``context`` holds condition keys."""

    principal: str
    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)


def applies(statement: Statement, request: Request) -> bool:
    """Whether a statement is about a request, worked out one by one; conditions on numbers are
    never met."""
    return (
        statement.principals.has(request.principal)
        and statement.actions.has(request.action)
        and statement.resources.has(request.resource)
        and all(
            condition_met(*condition, request.context.get(condition[1]))
            for condition in statement.conditions
        )
    )


def condition_met(operator: str, _key: str, values: tuple[str, ...], found: str | None) -> bool:
    negated = "not" in operator
    kind = operator.replace("not", "").removesuffix("ifexists")
    if kind not in ("stringequals", "stringlike"):
        return False
    if found is None:
        return negated or operator.endswith("ifexists")
    return (
        any(found == value if kind == "stringequals" else matches(value, found) for value in values)
        is not negated
    )


NAMES = ["".join(chars) for size in range(1, 5) for chars in itertools.product("abz", repeat=size)]
WHO = ["AWS:a", "AWS:b", "Service:a"]
CONTEXTS: list[dict[str, str]] = [{}, {"k": "1"}, {"k": "2"}, {"k": "11"}, {"k": "3"}]
CONDITIONS = [
    ("stringequals", "k", ("1",)),
    ("stringequals", "k", ("1", "2")),
    ("stringlike", "k", ("1*",)),
    ("stringnotequals", "k", ("1",)),
    ("stringequalsifexists", "k", ("2",)),
    ("numericgreaterthan", "n", ("1",)),
]
some_names = st.builds(
    Names,
    st.lists(st.text("ab*?", min_size=1, max_size=2), min_size=1, max_size=2).map(tuple),
    st.sampled_from([False, False, True]),
)
principals = st.sampled_from(
    [Names(), Names(), Names(("AWS:a",)), Names(("AWS:a", "AWS:b")), Names(("AWS:a",), True)]
)


def policies(conditions: int, boundaries: bool = True) -> st.SearchStrategy[Policies]:
    held = st.lists(st.sampled_from(CONDITIONS[:5]), max_size=conditions).map(tuple)
    statements = st.lists(
        st.builds(
            Statement,
            st.sampled_from([True, True, False]),
            principals,
            some_names,
            some_names,
            held,
        ),
        max_size=3,
    ).map(tuple)
    return st.builds(Policies, statements, st.none() | statements if boundaries else st.none())


def kinds(names: list[Names], tried: list[str]) -> set[tuple[bool, ...]]:
    return {tuple(one.has(name) for one in names) for name in tried}


def every_answer(one: Policies, other: Policies) -> Iterator[tuple[str, str]]:
    """The answers of both to every request of short names, by way of what each statement says to it
    alone."""
    parts = [one.statements, one.boundary or (), other.statements, other.boundary or ()]
    statements = [statement for part in parts for statement in part]
    starts = [0, *itertools.accumulate(map(len, parts))]
    each = [
        kinds([s.principals for s in statements], WHO),
        kinds([s.actions for s in statements], NAMES),
        kinds([s.resources for s in statements], NAMES),
        {tuple(conditions_met(s, context) for s in statements) for context in CONTEXTS},
    ]
    for chosen in itertools.product(*each):
        about = [all(dimension[n] for dimension in chosen) for n in range(len(statements))]
        effects = [
            {statements[n].allow for n in range(begin, end) if about[n]}
            for begin, end in itertools.pairwise(starts)
        ]
        yield answer(effects[0], effects[1], one), answer(effects[2], effects[3], other)


def conditions_met(statement: Statement, context: dict[str, str]) -> bool:
    return applies(Statement(True, conditions=statement.conditions), Request("", "a", "a", context))


def answer(effects: set[bool], limits: set[bool], of: Policies) -> str:
    if False in effects | limits:
        return "deny"
    return "allow" if True in effects and (of.boundary is None or True in limits) else "nothing"


@pytest.mark.nightly
@settings(max_examples=150, deadline=None)
@given(policies(0), policies(0))
def test_without_conditions_the_comparison_is_exact(one: Policies, other: Policies) -> None:
    answers = list(every_answer(one, other))
    assert equal(one, other, Budget(100_000)) is all(first == second for first, second in answers)
    found = gains(one, other, Budget(100_000))
    assert (
        bool(gains(other, one, Budget(100_000)))
        is compare_policies(one, other, Budget(100_000)).loses
    )
    assert bool(found) is any(first != "allow" and second == "allow" for first, second in answers)
    for gain in found:
        request = Request(*gain.example)
        assert says(other, request) == "allow"
        assert says(one, request) != "allow"


def says(of: Policies, request: Request) -> str:
    effects = {statement.allow for statement in of.statements if applies(statement, request)}
    return answer(
        effects,
        {statement.allow for statement in of.boundary or () if applies(statement, request)},
        of,
    )


@pytest.mark.nightly
@settings(max_examples=150, deadline=None)
@given(policies(2), policies(2))
def test_under_conditions_nothing_is_overlooked(one: Policies, other: Policies) -> None:
    answers = list(every_answer(one, other))
    if equal(one, other, Budget(100_000)):
        assert all(first == second for first, second in answers)
    if not gains(one, other, Budget(100_000)):
        assert not any(first != "allow" and second == "allow" for first, second in answers)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(policies(2), st.randoms(use_true_random=False))
def test_order_repetition_and_lists_change_nothing(one: Policies, random: Any) -> None:
    pieces = [
        Statement(s.allow, s.principals, Names((action,)), s.resources, s.conditions)
        for s in one.statements
        if not s.actions.inverted
        for action in s.actions.patterns
    ] + [s for s in one.statements if s.actions.inverted]
    random.shuffle(pieces)
    assert equal(one, Policies((*pieces, *pieces[:1]), one.boundary), Budget(100_000))


QUEUE = "arn:aws:sqs:us-east-1:000000000000:q"
TOPIC = "arn:aws:sns:us-east-1:000000000000:t"
ROOT = "arn:aws:iam::000000000000:root"
READ = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::data/*"}
SEND: dict[str, Any] = {
    "Effect": "Allow",
    "Principal": {"Service": "sns.amazonaws.com"},
    "Action": "sqs:SendMessage",
    "Resource": QUEUE,
    "Condition": {"ArnEquals": {"aws:SourceArn": TOPIC}},
}
INSECURE = {"Bool": {"aws:SecureTransport": "false"}}

ARNS = [("ArnLike", "arn:aws:sns:*:t"), ("ArnEquals", "arn:aws:sns:us-east-1:1:t")]
"""A star of ArnLike stays within its part of the name."""


def of(statements: Any, owner: str = "") -> Policies:
    return Policies(parse_policy({"Version": "2012-10-17", "Statement": statements}), None, owner)


@pytest.mark.parametrize(
    ("wanted", "found", "owner"),
    [
        (
            READ,
            [{**READ, "Sid": "x", "Action": ["S3:getobject"], "Resource": ["arn:aws:s3:::data/*"]}],
            "",
        ),
        (READ, [READ, {**READ, "Resource": "arn:aws:s3:::data/reports/*"}], ""),
        (
            {**READ, "Action": ["s3:GetObject", "s3:PutObject"]},
            [{**READ, "Action": "s3:PutObject"}, READ],
            "",
        ),
        (READ, [READ, {**READ, "Effect": "Deny", "Action": "s3:*", "Condition": INSECURE}], ""),
        (SEND, {**SEND, "Resource": "*"}, QUEUE),
        (SEND, {**SEND, "Condition": {"StringEquals": {"AWS:sourcearn": [TOPIC]}}}, QUEUE),
        (SEND, {**SEND, "Condition": {"ArnLike": {"aws:SourceArn": TOPIC}}}, QUEUE),
        ({**SEND, "Action": "*"}, {**SEND, "Action": "SQS:*"}, QUEUE),
        (
            {**SEND, "Condition": {"StringEquals": {"k": ["x", "y"]}}},
            [{**SEND, "Condition": {"StringEquals": {"k": one}}} for one in ("y", "x")],
            QUEUE,
        ),
        (
            {**SEND, "Condition": {"ArnLike": {"aws:SourceArn": TOPIC[:-1] + "*"}}},
            [SEND, {**SEND, "Condition": {"ArnLike": {"aws:SourceArn": TOPIC[:-1] + "*"}}}],
            QUEUE,
        ),
        ({**SEND, "Principal": "*"}, {**SEND, "Principal": {"AWS": ["*"]}}, QUEUE),
        (
            {**SEND, "Principal": {"AWS": "000000000000"}},
            {**SEND, "Principal": {"AWS": ROOT}},
            QUEUE,
        ),
    ],
)
def test_one_policy_written_twice(wanted: Any, found: Any, owner: str) -> None:
    assert equal(of(wanted, owner), of(found, owner), Budget(10_000))
    assert not gains(of(wanted, owner), of(found, owner), Budget(10_000))


@pytest.mark.parametrize(
    ("wanted", "found", "more"),
    [
        (READ, {**READ, "Action": "s3:Get*"}, True),
        (READ, {**READ, "Resource": "arn:aws:s3:::data*"}, True),
        (READ, {**READ, "Resource": "arn:aws:s3:::data/?*"}, False),
        (READ, [READ, {**READ, "Effect": "Deny", "Resource": "arn:aws:s3:::data/secret"}], False),
        ([READ, {**READ, "Effect": "Deny", "Condition": INSECURE}], READ, True),
        (READ, {**READ, "Condition": {"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}}, False),
        (READ, {**READ, "NotAction": "iam:*", "Action": None}, True),
        (READ, {**READ, "Resource": "arn:aws:s3:::data/${aws:username}/*"}, False),
        ({**READ, "Resource": "arn:aws:s3:::data/${aws:username}/*"}, READ, True),
        (SEND, {**SEND, "Condition": {"ArnLike": {"aws:SourceArn": TOPIC[:-1] + "*"}}}, True),
        (
            SEND,
            {**SEND, "Condition": {"StringEquals": {"aws:SourceArn": [TOPIC, TOPIC + "2"]}}},
            True,
        ),
        (
            {**SEND, "Condition": {"StringLike": {"k": "a*"}}},
            [{**SEND, "Condition": {"StringLike": {"k": one}}} for one in ("a*", "b")],
            True,
        ),
        (
            {**SEND, "Condition": {"ArnLike": {"k": "arn:aws:sns:*:t"}}},
            [{**SEND, "Condition": {operator: {"k": one}}} for operator, one in ARNS],
            True,
        ),
        (
            {**SEND, "Principal": {"AWS": ROOT}},
            {**SEND, "Principal": {"AWS": ROOT[:-4] + "user/x"}},
            True,
        ),
        (
            {**SEND, "Principal": {"AWS": ROOT[:-4] + "role/x"}},
            {**SEND, "Principal": {"AWS": ROOT}},
            True,
        ),
    ],
)
def test_policies_that_differ(wanted: Any, found: Any, more: bool) -> None:
    found = (
        {key: value for key, value in found.items() if value is not None}
        if isinstance(found, dict)
        else found
    )
    assert not equal(of(wanted), of(found), Budget(10_000))
    assert bool(gains(of(wanted), of(found), Budget(10_000))) is more


def test_a_denial_of_an_account_is_one_of_its_members() -> None:
    """A user of an account that was shut out gains by another denial that names somebody else."""
    user = {**SEND, "Principal": {"AWS": ROOT[:-4] + "user/x"}}
    shut = {**SEND, "Effect": "Deny", "Condition": {}, "Principal": {"AWS": ROOT}}
    other = {**shut, "Principal": {"AWS": ROOT[:-4] + "user/y"}}
    assert gains(of([user, shut]), of([user, other]), Budget(10_000))
    session = {**SEND, "Principal": {"AWS": "arn:aws:sts::000000000000:assumed-role/r/s"}}
    role = {**shut, "Principal": {"AWS": ROOT[:-4] + "role/r"}}
    assert not gains(of([session, role]), of([role]), Budget(10_000))
    assert gains(of([session, role]), of([session]), Budget(10_000))


def test_a_gain_says_who_may_do_what() -> None:
    found = gains(
        of(SEND, QUEUE),
        of([SEND, {**SEND, "Principal": "*", "Action": "sqs:Send*"}], QUEUE),
        Budget(10_000),
    )
    (gain,) = found
    assert gain.principal == "*"
    assert str(gain) == f"sqs:send* on {QUEUE} where aws:sourcearn equals {TOPIC}"
    assert gain.example[1].startswith("sqs:send")
    assert gain.example[2] == QUEUE


def test_a_long_policy_of_plain_names_is_answered() -> None:
    many = {
        **READ,
        "Action": [f"s3:{i}" for i in range(400)],
        "Resource": [f"arn:{i}*" for i in range(400)],
    }
    assert not equal(of(READ), of(many), Budget(20_000))


@pytest.mark.parametrize(
    "statements",
    [
        [{**READ, "Action": f"s3:{i}", "Resource": f"arn:{i}"} for i in range(200)],
        [{**READ, "Action": f"*{i}*", "Resource": f"*{i}?"} for i in range(200)],
        [{**READ, "Condition": {"StringLike": {f"k{i}": ["x", "y"]}}} for i in range(150)],
        [{**READ, "Resource": "*".join("abcdefgh") * 80}, {**READ, "Resource": "*" + "?*" * 400}],
    ],
)
def test_policies_that_take_long_are_given_up(statements: list[Any]) -> None:
    with pytest.raises(TooManySteps):
        equal(of(READ), of(statements), Budget(20_000))
