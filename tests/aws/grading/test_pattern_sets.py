"""Every combination of patterns that some name matches is found, and none that no name does."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.aws.grading.policy_comparison import Budget, TooManySteps, combinations

NAMES = ["".join(chars) for size in range(1, 7) for chars in itertools.product("abz", repeat=size)]
"""z stands for all that no pattern names."""


def matched(patterns: list[str], name: str) -> int:
    """The combination, by the regular expressions of Python."""
    expressions = [re.escape(p).replace(r"\*", ".*").replace(r"\?", ".") for p in patterns]
    return sum(1 << i for i, one in enumerate(expressions) if re.fullmatch(one, name, re.DOTALL))


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
        assert {matched(patterns, name) for name in NAMES} <= found.keys()

    check()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.builds(str.__add__, st.text("ab", max_size=4), st.sampled_from(["", "*"])), max_size=6))
def test_patterns_with_a_star_at_the_end_need_no_automaton_and_get_the_same(patterns: list[str]) -> None:
    """A pattern that matches nothing but a ? sends the same patterns through the automata."""
    quick = combinations(patterns, Budget(1_000_000))
    for mask, name in quick.items():
        assert matched(patterns, name) == mask
    last = 1 << len(patterns)
    assert quick.keys() == {mask & ~last for mask in combinations([*patterns, "?"], Budget(1_000_000))}


def test_what_a_variable_stands_for_is_left_open() -> None:
    masks = combinations(["home/${aws:username}/*", "home/*"], Budget(10_000)).keys()
    assert masks == {0b00, 0b10, 0b11}, "within home/* both what the variable names and what it does not"


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
