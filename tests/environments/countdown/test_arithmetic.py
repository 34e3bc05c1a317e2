"""Steps of arithmetic: what they come to, agreed with Python's own parser, and hostile text."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.environments.countdown import DEEPEST, LONGEST_ANSWER, ArithmeticRefused, evaluate
from tests.cheapest import cheapest

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def reference(node: ast.AST) -> tuple[Fraction, list[int]]:
    """The value of a parsed expression and the numbers in it: the independent formula."""
    if isinstance(node, ast.Expression):
        return reference(node.body)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), [node.value]
    assert isinstance(node, ast.BinOp), ast.dump(node)
    (left, used), (right, too) = reference(node.left), reference(node.right)
    return OPERATORS[type(node.op)](left, right), used + too


def python_says(text: str) -> tuple[Fraction, list[int]] | None:
    try:
        return reference(ast.parse(text, mode="eval"))
    except (SyntaxError, AssertionError, KeyError, ZeroDivisionError):
        return None


numbers = st.integers(0, 30)
expressions = st.recursive(
    numbers.map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map("".join), inner.map(lambda text: f"({text})")
    ),
    max_leaves=8,
)


@given(expressions)
def test_an_expression_comes_to_what_python_says(text: str):
    """Random expressions, with every number they need in the pool: the same exact fraction, or a refusal by both."""
    expected = python_says(text)
    assert len(text) <= LONGEST_ANSWER
    if expected is None:
        with pytest.raises(ArithmeticRefused):
            evaluate(text, range(31))
        return
    found = evaluate(text, expected[1])
    assert found.value == expected[0]
    assert found.operations == len(expected[1]) - 1


@given(expressions, st.data())
def test_a_number_too_few_is_refused(text: str, data: st.DataObject):
    """Without one of the numbers that an expression uses, it is refused."""
    expected = python_says(text)
    if expected is None:
        return
    less = list(expected[1])
    less.remove(data.draw(st.sampled_from(less)))
    with pytest.raises(ArithmeticRefused):
        evaluate(text, less)


@given(st.text(alphabet="0123456789+-*/()=, \n", max_size=30), st.lists(numbers, max_size=5))
def test_random_text_is_accepted_only_as_python_would(text: str, pool: list[int]):
    """Any text is refused or evaluated. One expression without a stated value is evaluated as Python does, and uses
    only what the pool holds."""
    try:
        found = evaluate(text, pool)
    except ArithmeticRefused:
        return
    if "," not in text and "=" not in text and "\n" not in text.strip():
        expected = python_says(text.strip())
        assert expected is not None
        assert found.value == expected[0]
        assert not Counter(expected[1]) - Counter(pool)


@given(st.lists(st.integers(1, 20), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_a_chain_of_steps_comes_to_what_its_nested_form_does(pool: list[int], rng):
    """Steps that hand their values on equal the one expression in which every value is replaced by its step."""
    steps, nested = [], [(value, str(value)) for value in pool]
    while len(nested) > 1:
        (left, first), (right, second) = (nested.pop(rng.randrange(len(nested))) for _ in range(2))
        if left < right:
            (left, first), (right, second) = (right, second), (left, first)
        sign = rng.choice("+-*")
        value = {"+": left + right, "-": left - right, "*": left * right}[sign]
        steps.append(f"{left}{sign}{right}={value}")
        nested.append((value, f"({first}{sign}{second})"))
    assert evaluate(", ".join(steps), pool).value == evaluate(nested[0][1], pool).value == nested[0][0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3*4=12, 12+5=17", 17),
        ("3 * 4 = 12,\n12 + 5 = 17", 17),
        ("3*4=12\n\n12+5", 17),
        ("3*4+5=17", 17),
        ("5-4=1, 3-1", 2),
        ("4-5=-1", -1),
        ("3/4=3/4", Fraction(3, 4)),
        ("3/4=6/8", Fraction(3, 4)),
        ("5*(3/4)", Fraction(15, 4)),
        ("3-4-5", -6),
        ("3/4/5", Fraction(3, 20)),
    ],
)
def test_right_steps(text: str, value: Fraction):
    assert evaluate(text, [3, 4, 5]).value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ",",
        "3,",
        ",3",
        "3+",
        "+3",
        "-3+4",
        "3 4",
        "3(4)",
        "(3)4",
        "3+4=8",
        "3+4=",
        "3+4==7",
        "3+4=7=7",
        "=7",
        "3*4=12, 3+5=8",
        "3*4=12, 12+5=17, 12+1",
        "4-5=-1, -1+3",
        "3/4=3/4, 3/4",
        "3/0",
        "3/(4-4)",
        "3/4=3/0",
        "3**4",
        "3^4",
        "3//4",
        "3%4",
        "3e4",
        "3.0+4",
        "0x3+4",
        "3_4",
        "03+4",
        "3+4#",
        "3+4;",
        "a+3",
        "__import__('os')",
        "3+4 if 1 else 5",
        "٣+٤",  # Arabic digits
        "３+４",  # full-width digits
        "³+4",
        "3−4",  # the minus sign of typography
        "3×4",
        "3\x004",
        "3+\u200b4",
        "3+4\x0b",
        "\ud800",
        "(3+4",
        "3+4)",
        "()",
        "(" * (DEEPEST + 1) + "3" + ")" * (DEEPEST + 1),
        "(" * 100_000,
        "9" * 19,
        "9" * 200,
        "3+" * 100 + "3",
        "3*" * 1_000_000,
        "9" * 5_000_000,
    ],
)
def test_what_is_no_right_step_is_refused_at_once(text: str):
    def step() -> None:
        with pytest.raises(ArithmeticRefused) as refused:
            evaluate(text, [3, 4, 5])
        assert len(str(refused.value)) < 120

    assert cheapest(step, 0.1) < 0.1


def test_a_given_number_may_be_large_and_depth_may_be_used_up():
    """The limits stand where the text is longer than arithmetic needs, not before."""
    most = 10**18 - 1
    assert evaluate(f"{most}*{most}", [most, most]).value == most * most
    assert evaluate("(" * DEEPEST + "3" + ")" * DEEPEST, [3]).value == 3
    with pytest.raises(ArithmeticRefused, match="characters"):
        evaluate(" " * LONGEST_ANSWER + "3", [3])


def test_a_number_that_is_given_twice_may_be_used_twice():
    assert evaluate("7*7", [7, 7]).value == 49
    with pytest.raises(ArithmeticRefused, match="used up"):
        evaluate("7*7", [7, 8])
