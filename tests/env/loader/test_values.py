"""Plain values become what type hints ask for, or are refused with a sentence that says what was
expected."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.env.loader.validation import coerce, format_value, json_problem


class Colour(enum.Enum):
    RED = "red"
    ONE = 1


@dataclass
class Point:
    x: int
    y: float = 0.5
    names: list[str] = field(default_factory=list)


class Range(TypedDict, total=False):
    low: int


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, int, 3),
        ("3", int, 3),
        (" -3 ", int, -3),
        (3.0, int, 3),
        (3, float, 3.0),
        ("1e3", float, 1000.0),
        ("2.5", float, 2.5),
        (True, bool, True),
        ("False", bool, False),
        ("x", str, "x"),
        (5, str, "5"),
        (True, str, "true"),
        (None, None, None),
        (None, int | None, None),
        ("7", int | None, 7),
        ("7", int | str, "7"),
        (7, float | str, 7.0),
        ([1, "2"], list[int], [1, 2]),
        ([1, "a"], list, [1, "a"]),
        ([1, "a"], tuple[int, str], (1, "a")),
        (["1", "2"], tuple[int, ...], (1, 2)),
        ({"a": "1"}, dict[str, int], {"a": 1}),
        ({"a": [1]}, dict, {"a": [1]}),
        ("red", Colour, Colour.RED),
        ("1", Colour, Colour.ONE),
        ("b", Literal["a", "b"], "b"),
        ("1", Literal[1, 2], 1),
        (1, Literal[True, 1], 1),
        (3, Annotated[int, "more"], 3),
        ({"x": "1", "names": ["a"]}, Point, Point(1, 0.5, ["a"])),
        ([{"x": 1}], list[Point], [Point(1)]),
        ({"low": "1"}, Range, {"low": 1}),
        ({}, Range, {}),
        ("a/b", Path, Path("a/b")),
        ({"any": object}, Any, {"any": object}),
    ],
)
def test_a_value_that_fits_is_converted(value: Any, hint: Any, expected: Any) -> None:
    found = coerce(value, hint, "it")
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "sentence"),
    [
        ("three", int, "it must be a whole number, not 'three'"),
        ("٣", int, "it must be a whole number"),
        ("1_000", int, "it must be a whole number"),
        ("9" * 5000, int, "it must be a whole number"),
        (True, int, "it must be a whole number, not True"),
        (2.5, int, "it must be a whole number, not 2.5"),
        (float("inf"), int, "it must be a whole number, not inf"),
        (float("nan"), float, "it must be a number, not nan"),
        ("nan", float, "it must be a number, not 'nan'"),
        ("1e999", float, "it must be a number, not '1e999'"),
        (10**400, float, "it must be a number, not a number of 1329 bits"),
        (1, bool, "it must be true or false, not 1"),
        ("yes", bool, "it must be true or false"),
        ({}, str, "it must be text, not {}"),
        (None, str, "it must be text, not None"),
        (0, None, "it must be null, not 0"),
        ("x", int | None, "it must be a whole number, not 'x'"),
        ({}, int | str, "it must be a whole number or text, not {}"),
        ("abc", list[str], "it must be a list, not 'abc'"),
        ([1, "x"], list[int], r"it\[1\] must be a whole number"),
        ([1], tuple[int, int], r"it must be a list of 2 values, not \[1\]"),
        ([], dict, r"it must be an object, not \[\]"),
        ({"a": "x"}, dict[str, int], r"it\['a'\] must be a whole number"),
        ("green", Colour, "it must be one of 'red', 1, not 'green'"),
        ("c", Literal["a", "b"], "it must be one of 'a', 'b', not 'c'"),
        (True, Literal[1], "it must be one of 1, not True"),
        ({}, Point, r"it\.x is missing"),
        ({"x": 1, "z": 2}, Point, r"it\.z is unknown.*\(known: x, y, names\)"),
        ({"x": 1, 5: 2}, Point, r"it\.5 is unknown"),
        ({"x": [1]}, Point, r"it\.x must be a whole number"),
        (3, Point, "it must be an object, not 3"),
        ({"high": 1}, Range, r"it\.high is unknown"),
        (3, type, "it: values of type <class 'type'> cannot be given"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(value: Any, hint: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        coerce(value, hint, "it")
    assert len(str(caught.value)) < 300


DEEP: Any = 1j
for _ in range(60):
    DEEP = {"key": DEEP}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [1, None, {"b": "é"}]}, ""),
        (float("nan"), "nan is not JSON"),
        ({"a": [0, {"b": {1}}]}, "set is not JSON (at ['a'][1]['b']): {1}"),
        ([{"x": {2: 3}}], "the key 2 is not a string, so this is not JSON (at [0]['x'])"),
        ({"a": "\ud800"}, "text with '\\ud800', half a character, is not JSON (at ['a'])"),
        (DEEP, "complex is not JSON (at ..." + "['key']" * 29 + "): 1j"),
    ],
)
def test_what_is_not_json_is_named_with_its_place(value: Any, problem: str) -> None:
    assert json_problem(value) == problem


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
SOME_HINTS = st.sampled_from(
    [
        int,
        float,
        bool,
        str,
        list[int],
        dict[str, float],
        Colour,
        Literal["a", 1],
        Point,
        Range,
        int | list[str] | None,
    ]
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(JSON, SOME_HINTS)
def test_any_json_is_taken_or_refused_and_a_taken_value_is_taken_again(
    value: Any, hint: Any
) -> None:
    """Nothing but ValueError is raised, and what came out has the type, so it goes in again
    unchanged."""
    try:
        found = coerce(value, hint, "it")
    except ValueError:
        return
    if hint not in (Point, Colour):
        assert coerce(found, hint, "it", strict=True) == found


@pytest.mark.slow
@given(JSON)
def test_what_is_shown_is_short_whatever_it_is(value: Any) -> None:
    assert len(format_value(value)) < 2000
    assert len(format_value([10**5000, "x" * 10**6, {"a": [[[[1]]]]}])) < 300
