"""The schema of a tool is the one that transformers makes of the same function, which is what TRL
shows a policy."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Optional, TypedDict, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from realhf.env.loader.tool_schemas import json_schema


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Point:
    x: int
    y: float = 0.0


class Range(TypedDict, total=False):
    low: int
    high: int


HINTS: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "Any": Any,
    "None": None,
    "list": list,
    "dict": dict,
    "tuple": tuple,
    "list of int": list[int],
    "list of lists": list[list[str]],
    "pair": tuple[int, str],
    "dict of float": dict[str, float],
    "dict of lists": dict[str, list[int]],
    "Optional": Optional[int],  # noqa: UP045
    "Union": Union[int, str],  # noqa: UP007
    "new union": int | str | None,
    "union of lists": list[int] | str,
    "union of one type": list | tuple,
    "union with bool": bool | float,
    "Literal": Literal["a", "b"],
    "mixed Literal": Literal["a", 1, None, True],
    "optional Literal": Literal[1, 2] | None,
    "Enum": Colour,
    "IntEnum": Level,
    "list of Enum": list[Colour],
}


def function_of(hint: Any, *, default: bool = False, returns: Any = str) -> Callable[..., Any]:
    """A function with one argument of this type."""

    def tool(value, other: int):  # type: ignore[no-untyped-def]
        """Do something with a value.

        Args:
            value: what is used
            other: a number
        """

    tool.__annotations__ = {"value": hint, "other": int, "return": returns}
    if default:
        tool.__defaults__ = (None, 3)
    return tool


@pytest.mark.parametrize("name", HINTS)
@pytest.mark.parametrize("default", [False, True])
def test_a_type_has_the_schema_that_transformers_gives_it(name: str, default: bool) -> None:
    """As argument with and without default, and as result; what the schema says can be said in
    JSON."""
    function = function_of(HINTS[name], default=default, returns=HINTS[name])
    assert json_schema(function) == get_json_schema(function)
    assert json.loads(json.dumps(json_schema(function))) == json_schema(function)


def leaf() -> st.SearchStrategy[Any]:
    return st.sampled_from(
        [str, int, float, bool, Any, list, dict, Colour, Literal["a", "b"], Literal[1, "x"]]
    )


TYPES = st.recursive(
    leaf(),
    lambda inner: st.one_of(
        inner.map(lambda kind: list[kind]),
        inner.map(lambda kind: dict[str, kind]),
        st.tuples(inner, inner).map(lambda kinds: tuple[kinds]),
        st.tuples(inner, inner).map(lambda kinds: Union[kinds]),  # noqa: UP007
        inner.map(lambda kind: Optional[kind]),  # noqa: UP045
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(TYPES)
def test_nested_types_have_the_schema_that_transformers_gives_them(hint: Any) -> None:
    function = function_of(hint, returns=hint)
    assert json_schema(function) == get_json_schema(function)


def plain(a: int) -> str:
    """Do it.

    Args:
        a: a number
    """
    return ""


def long(first: str, second: int = 3, *, third: bool = False) -> dict:
    """
    Do it in several lines.

    The second paragraph has a colon: here, and an indented

        block.

    Args:
        first: what comes first, described
            in two lines: with a colon

        second: what comes second
        third: what is third (choices: ["yes ", "no"])

    Returns:
        A map, described
        in two lines.

    Raises:
        ValueError: sometimes
    """
    return {}


def without_arguments() -> None:
    """Do nothing."""


def one_line(a: str):
    """Short. Args: are named here, but below.

    Args:
        a: it
    """


@pytest.mark.parametrize("function", [plain, long, without_arguments])
def test_a_docstring_is_read_as_transformers_reads_it(function: Callable[..., Any]) -> None:
    assert json_schema(function) == get_json_schema(function)


def test_a_heading_is_a_line_of_its_own() -> None:
    """Here this project is stricter than transformers, which cuts the description at the word."""
    assert (
        json_schema(one_line)["function"]["description"]
        == "Short. Args: are named here, but below."
    )
    assert get_json_schema(one_line)["function"]["description"] == "Short."


def test_a_method_is_described_without_its_instance() -> None:
    class Holder:
        def tool(self, a: int) -> str:
            """Do it.

            Args:
                a: a number
            """
            return ""

    assert json_schema(Holder.tool) == get_json_schema(Holder().tool)


def test_dataclasses_and_typed_dictionaries_are_objects() -> None:
    """transformers refuses them."""
    parameters = json_schema(function_of(Point))["function"]["parameters"]["properties"]
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "number"}},
        "required": ["x"],
    }
    assert parameters["value"] == {**point, "description": "what is used"}
    parameters = json_schema(function_of(Range))["function"]["parameters"]["properties"]
    assert parameters["value"]["properties"] == {
        "low": {"type": "integer"},
        "high": {"type": "integer"},
    }
    assert "required" not in parameters["value"]


@pytest.mark.parametrize(
    ("hint", "sentence"),
    [
        (object, "argument 'value' has the type object, which has no JSON schema"),
        (bytes, "has the type bytes"),
        (set[int], "has the type set"),
        (tuple[int, ...], "has the type tuple"),
        (list[complex], "has the type complex"),
        (Callable[[int], int], "has the type Callable"),
        (enum.Enum("Empty", []), "choices that are not text, numbers, booleans or None"),
        ("Nowhere", "type hints cannot be read: name 'Nowhere' is not defined"),
    ],
)
def test_a_type_that_json_cannot_say_is_refused(hint: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        json_schema(function_of(hint))


def test_choices_that_are_no_list_are_refused() -> None:
    def tool(a: str) -> str:
        """Do it.

        Args:
            a: one (choices: yes, no)
        """
        return a

    with pytest.raises(
        ValueError, match="the choices of the argument 'a' are no JSON list: yes, no"
    ):
        json_schema(tool)
