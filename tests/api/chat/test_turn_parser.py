"""Whatever a policy writes becomes a message: reasoning, calls with reasons where they cannot be read, and the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.tool_parser import FAMILIES, MAX_CALLS, MAX_DEPTH, parse_turn
from realhf.aws.messages import extract_command
from tests.cheapest import cheapest

PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"x": 1}}', '{"name": "f"', "[",
    "\ud800", "\\ud800", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "<|python_tag|>", '"', "{",
    '{"name": "f", "parameters": {}}', ";", "aws s3 ls", "\n", " ", "1e999", "9" * 30, "NaN", "é", "\x00", ":", "}",
]  # fmt: skip
HOSTILE = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)
NAMES = st.text("abcdefg_.-0é", min_size=1, max_size=12)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["<think>", "</think>", "</tool_call>", "<tool_call>", '"}', "a\n</parameter", "\\"]
)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES: Any = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(TEXTS, VALUES, max_size=3)), min_size=1, max_size=4)


def hermes(calls):
    """As the templates of Qwen and Hermes write calls."""
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments in calls
    )


def problems(message):
    return [call.problem for call in message.tool_calls]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(HOSTILE, st.sampled_from(FAMILIES))
def test_no_text_raises_and_every_call_is_whole_or_has_a_reason(text, family):
    message = parse_turn(text, family, token_count=7)
    assert message.text == text and message.token_count == 7
    for number, call in enumerate(message.tool_calls):
        assert call.id == f"call_{number}"
        assert call.text in text and (call.text or call.problem)
        if call.problem:
            assert not call.arguments
        else:
            assert call.name.strip() and len(json.dumps(dict(call.arguments), ensure_ascii=False).encode()) < 10_000
    if family == "plain":
        assert not message.tool_calls


@pytest.mark.nightly
@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(CALLS, TEXTS.filter(lambda text: "<" not in text), TEXTS.filter(lambda text: "think>" not in text))
def test_calls_of_hermes_come_back_as_they_were_rendered(calls, said, thought):
    message = parse_turn(f"<think>{thought}</think>{said}\n{hermes(calls)}", "hermes")
    assert problems(message) == [""] * len(calls)
    assert [(call.name, call.arguments) for call in message.tool_calls] == calls
    assert (message.content, message.reasoning) == (said.strip(), thought.strip())


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(CALLS)
def test_calls_of_llama_come_back_as_they_were_rendered(calls):
    written = "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
    for text in (written, f"<|python_tag|>{written}"):
        message = parse_turn(text, "llama")
        assert [(call.name, call.arguments, call.problem) for call in message.tool_calls] == [(*c, "") for c in calls]
        assert message.content == ""


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "aws s3 ls", "\n", "```", "<", ">"]), max_size=12))
def test_reasoning_follows_the_rules_by_which_commands_are_found(pieces):
    """The command of a turn is that of its content; joined pieces that form a new tag are left to the other test."""
    text = "|".join(pieces)
    assert extract_command(parse_turn(text, "hermes").content) == extract_command(text)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>a</think>\n\nb", "a", "b"),
        ("a</think>b", "a", "b"),
        ("b<think>a", "a", "b"),
        (" b ", "", " b "),
        ("<think>a</think>b<think>c</think>d", "a\nc", "bd"),
        ('x <tool_call>{"name": "f"}</tool_call></think>b', 'x <tool_call>{"name": "f"}</tool_call>', "b"),
    ],
)
def test_reasoning_is_taken_out(text: str, reasoning: str, content: str) -> None:
    message = parse_turn(text, "hermes")
    assert (message.reasoning, message.content, message.tool_calls) == (reasoning, content, ())


def tagged(inner):
    return f"<tool_call>{inner}</tool_call>"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>{"name": "f", "arguments": {}}', "is missing"),
        ('<tool_call>{"name": "f", "argu', "is missing"),
        (tagged('{"name": "f", "arguments": "{}"}'), "arguments are a JSON object, not a text"),
        (tagged('{"name": "f", "arguments": [1]}'), "not a list"),
        (tagged('{"name": "f", "arguments": null}'), "not null"),
        (tagged('{"name": 3, "arguments": {}}'), "the name"),
        (tagged('{"arguments": {}}'), "the name"),
        (tagged('{"name": " "}'), "the name"),
        (tagged(json.dumps({"name": "f" * 300})), "the name"),
        (tagged('{"name": "f", "parameters": {}}'), "not 'parameters'"),
        (tagged('{"name": "f", "name": "g"}'), "the key 'name' is given twice"),
        (tagged('{"name": "f", "arguments": {"a": 1, "a": 1}}'), "given twice"),
        (tagged('{"name": "f", "arguments": {"a": 9223372036854775808}}'), "64 bits"),
        (tagged('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}"), "64 bits"),
        (tagged('{"name": "f", "arguments": {"a": 1e999}}'), "64 bits"),
        (tagged('{"name": "f", "arguments": {"a": NaN}}'), "no number"),
        (tagged('{"name": "f", "arguments": {"a": "\\ud800"}}'), "surrogate"),
        (tagged('{"name": "f", "arguments": {"\\ud800": 1}}'), "surrogate"),
        (tagged("[" * 100_000), "too deep"),
        (tagged("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2)), f"deeper than {MAX_DEPTH}"),
        (tagged("[]"), "not a list"),
        (tagged("3"), "not a number"),
        (tagged(""), "no JSON"),
        (tagged('{"name": "f"} and'), "does not follow"),
    ],
)
def test_a_call_that_cannot_be_read_has_a_reason(text: str, reason: str) -> None:
    message = parse_turn(f"so: {text}", "hermes")
    (call,) = message.tool_calls
    assert reason in call.problem and call.arguments == {} and call.text == text
    assert message.content == "so:"


def test_a_broken_call_does_not_swallow_the_next():
    good = tagged('{"name": "g"}')
    for bad in ("<tool_call>{", tagged("{"), '<tool_call>{"name": "'):
        message = parse_turn(bad + good, "hermes")
        assert [call.name for call in message.tool_calls] == ["", "g"]
        assert [bool(reason) for reason in problems(message)] == [True, False]


def test_several_calls_may_stand_in_one_tag():
    message = parse_turn(tagged('[{"name": "f", "arguments": {"a": 1}}, {"name": 1}, {"name": "g"}]'), "hermes")
    assert [(call.name, bool(call.problem)) for call in message.tool_calls] == [("f", False), ("", True), ("g", False)]


@pytest.mark.parametrize(
    "text", [tagged('{"name": "f"}') * 100, tagged("[" + ",".join(['{"name": "f"}'] * 100) + "]"), "<tool_call>" * 5000]
)
def test_the_number_of_calls_is_bounded(text: str) -> None:
    message = parse_turn(text, "hermes")
    assert len(message.tool_calls) == MAX_CALLS + 1 and f"at most {MAX_CALLS}" in message.tool_calls[-1].problem


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"name": "f", "parameters": {', "no JSON"),
        ('{"name": "f", "parameters": 3}', "parameters are a JSON object"),
        ('{"name": "f", "parameters": {}} is what I do', "text follows"),
        ("<|python_tag|>print(1)", "no JSON"),
        ("<|python_tag|>", "no JSON"),
        ('<|python_tag|>{"a": 1}', "the name"),
    ],
)
def test_a_broken_call_of_llama_has_a_reason(text, reason):
    message = parse_turn(text, "llama")
    assert reason in message.tool_calls[-1].problem


@pytest.mark.parametrize("text", ['{"answer": 3}', "{x}", 'I call {"name": "f", "parameters": {}}', "", "{"])
def test_what_is_no_call_of_llama_is_content(text):
    message = parse_turn(text, "llama")
    assert (message.content, message.tool_calls) == (text, ()) or text == "{"


XML_CALL = (
    "<tool_call>\n<function=move>\n<parameter=path>\na\nb\n</parameter>\n<parameter=times>\n3\n</parameter>\n"
    "<parameter=note>\n3\n</parameter>\n</function>\n</tool_call>"
)
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "times": {"type": "integer"}}},
    },
}


def test_the_schema_says_which_arguments_of_xml_are_no_text():
    for tools, times in (((MOVE,), 3), ((), "3")):
        (call,) = parse_turn(f"I move.\n{XML_CALL}", "xml", tools=tools).tool_calls
        assert (call.name, call.problem, call.text) == ("move", "", XML_CALL)
        assert call.arguments == {"path": "a\nb", "times": times, "note": "3"}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("\n3\n", "\nthree\n", "'times': no JSON"),
        ("\n3\n", "\n3 4\n", "'times': text follows"),
        ("<function=move>", "", "<function"),
        ("</function>", "", "</function>"),
        ("<parameter=note>", "<parameter=path>", "given twice"),
        ("</parameter>", "", "not closed"),
        ("</tool_call>", "", "is missing"),
    ],
)
def test_a_broken_call_of_xml_has_a_reason(old: str, new: str, reason: str) -> None:
    (call,) = parse_turn(XML_CALL.replace(old, new), "xml", tools=[MOVE]).tool_calls
    assert reason in call.problem and not call.arguments


def test_a_hostile_turn_takes_no_time():
    keys = ",".join(f'"{n}": 1' for n in range(5000))
    twice = f'<tool_call>{{{keys}, "4999": 1}}</tool_call>'
    for text in (
        twice,
        "<tool_call>" + " " * 50_000,
        "<think>" * 5000,
        "</think>" * 5000,
        '<tool_call>{"a": "' * 3000,
        "<tool_call><function=a>" * 2000,
    ):
        assert cheapest(lambda text=text: [parse_turn(text, family) for family in FAMILIES], 0.2) < 0.2, text[:20]
