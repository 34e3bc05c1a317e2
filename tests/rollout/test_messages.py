"""Messages are equal when they say the same, however a client writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.environment import AssistantMessage, ToolCall
from realhf.rollout.openai_requests import Call, Message, answer, canonical_json

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e6, 1e6) | st.text(max_size=5)
VALUES: Any = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
UTF8 = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_json_is_the_same_in_any_way_of_writing(value: Any, escaped: bool, indent: int | None) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    other = json.dumps(dict(reversed(value.items())) if isinstance(value, dict) else value, indent=indent)
    assert canonical_json(json.dumps(value, ensure_ascii=escaped)) == canonical_json(f" {other}\n")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES)
def test_json_of_different_values_differs(one: Any, other: Any) -> None:
    def tagged(value: Any) -> Any:
        """Python finds True == 1; JSON does not."""
        if isinstance(value, dict):
            return {key: tagged(item) for key, item in value.items()}
        if isinstance(value, list):
            return [tagged(item) for item in value]
        return (isinstance(value, bool), value)

    if tagged(one) != tagged(other):
        assert canonical_json(json.dumps(one)) != canonical_json(json.dumps(other))


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"a": 1', "", "{} {}", '{"a": NaN}', "[" * 10_000, "9" * 5000])
def test_what_programs_may_read_differently_is_compared_as_text(text: str) -> None:
    assert canonical_json(text) == text


def test_a_number_may_lose_its_fraction_of_nothing() -> None:
    assert Call("a", "f", '{"x": 100.0}') == Call("a", "f", '{"x":100}')
    assert Call("a", "f", '{"x": 1}') != Call("a", "f", '{"x": true}')


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(UTF8, SCALARS, max_size=2)), max_size=3))
def test_an_answer_has_ids_of_its_own_that_the_tokens_decide(calls: list[tuple[str, dict[str, Any]]]) -> None:
    said = AssistantMessage("words", tuple(ToolCall(name, arguments) for name, arguments in calls), text="all")
    message = answer(said, [1, 2], [3])
    assert message == answer(said, [1, 2], [3])
    assert message.content == ("words" if calls else "all")
    ids = [call.id for call in message.calls]
    others = [call.id for other in (answer(said, [1], [2, 3]), answer(said, [1, 2], [4])) for call in other.calls]
    assert len({*ids, *others}) == 3 * len(calls)
    assert all(len(name) == 9 and name.isalnum() for name in ids)


def test_what_could_not_be_read_stays_in_the_content() -> None:
    broken = ToolCall("", {}, "call_1", "<tool_call>{</tool_call>", "no JSON")
    both = AssistantMessage("words", (ToolCall("f"), broken), text="all")
    assert answer(both, [1], [2]).content == f"words\n{broken.text}"
    assert answer(AssistantMessage("words", (broken,), text="all"), [1], [2]) == Message("assistant", "all")
