"""Every syntax of tool calls: calls are written as the chat templates of its models write them, and
parsed back equal; other texts never raise."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from realhf.api.chat_template import ChatTemplateError, TemplateChat
from realhf.api.tool_parser import FAMILIES, MAX_CALLS, parse_turn
from realhf.api.tool_syntax.calls import CallProblem
from realhf.api.tool_syntax.table import SYNTAXES
from tests.api.chat.families import FAMILIES_OF_MODELS, family_chat, family_tokenizer
from tests.api.chat.templates import tokenizer
from tests.cheapest import cheapest

WRITERS = {
    models: (syntax, write)
    for syntax in SYNTAXES.values()
    for models, write in syntax.writers.items()
}
FORMS = {
    "gpt-oss": "gpt-oss",
    "gemma4": "Gemma 4",
    "gemma4-first": "Gemma 4, first templates",
    "kimi-k2": "Kimi K2",
    "deepseek3.2": "DeepSeek V3.2",
    "deepseek4": "DeepSeek V4",
    "deepseek3.1": "DeepSeek V3.1",
    "deepseek3": "DeepSeek V3, R1",
    "mistral13": "Mistral, tokenizer version 13 and later",
    "mistral11": "Mistral, tokenizer version 11",
    "mistral3": "Mistral, tokenizer version 3 and 7",
    "glm4.6": "GLM 4.5 and 4.6",
    "glm4.7": "GLM 4.7 and 5",
    "qwen3-coder": "Qwen3-Coder",
    "qwen3.5": "Qwen 3.5, Nemotron 3",
    "qwen3.6": "Qwen 3.6",
    "qwen2.5": "Hermes, Qwen 2.5 and 3, SmolLM",
    "lfm2.5": "LFM 2 and 2.5",
    "llama4": "Llama 3.2 and 4 with a template for it",
    "llama3.2": "Llama 3.1, 3.2 and 4",
}
"""The families whose template writes a form."""
ONE_CALL = {"gpt-oss", "llama3.2"}
"""Families whose template writes one call a turn."""
QUOTED_KEYS = {"harmony", "mistral", "deepseek", "kimi", "hermes", "llama"}
"""Syntaxes in which arguments are JSON, so that their names may be any text."""
TAGS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|call|>", "<|end|>", "<|message|>",
    '<|"|', "<tool_call|>", "[TOOL_CALLS]", "[ARGS]", "<arg_key>", "</arg_value", "</parameter",
    "</｜DSML｜invoke>", "<｜tool▁call▁end｜>", "```", "<|tool_call_end|>", ")]", '",', "\\n", "\n", "\t",
    '"', "{", "}", ":", "\u2028", "\x00", "null", "None", "true", "1", " ", "é", "😀", "\\u0041", "\\",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(TAGS) | st.text("abc ", max_size=3), max_size=5).map("".join)
IDENTIFIERS = st.from_regex(r"\A[A-Za-z][A-Za-z0-9_]{0,7}\Z")
NAMES = st.from_regex(r"\A[A-Za-z][A-Za-z0-9_.\-]{0,9}\Z")
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)


def values(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Random JSON values whose objects have ``keys``."""
    return st.recursive(
        st.none() | st.booleans() | NUMBERS | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


JSON_ARGUMENTS = st.dictionaries(TEXTS, values(TEXTS), max_size=3)
NAMED_ARGUMENTS = st.dictionaries(IDENTIFIERS, values(IDENTIFIERS), max_size=3)


@st.composite
def turns(
    draw: st.DrawFn, families: st.SearchStrategy[str] | None = None
) -> tuple[str, list[tuple[str, dict[str, Any]]], str]:
    """One of ``families`` (None: of all), calls, and their text."""
    family = draw(st.sampled_from([*FORMS]) if families is None else families)
    syntax, write = WRITERS[FORMS[family]]
    arguments = JSON_ARGUMENTS if syntax.name in QUOTED_KEYS else NAMED_ARGUMENTS
    n_calls = 1 if family in ONE_CALL else draw(st.integers(1, 3))
    names = draw(st.lists(NAMES, min_size=n_calls, max_size=n_calls, unique=True))
    calls = [(name, draw(arguments)) for name in names]
    try:
        return family, calls, write(calls)
    except CallProblem:  # A syntax without escapes cannot express them.
        reject()


def schemas(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Schemas of tools that take exactly these arguments."""
    kinds = {
        str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array",
        dict: "object",
    }  # fmt: skip
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {k: {"type": kinds[type(v)]} for k, v in arguments.items()},
                },
            },
        }
        for name, arguments in calls
    ]


def canonical(calls: Any) -> list[tuple[str, str]]:
    """Calls in a form that distinguishes true from 1."""
    return [(name, json.dumps(dict(arguments), sort_keys=True)) for name, arguments in calls]


def parsed(text: str, family: str, tools: Any = ()) -> list[tuple[str, str]]:
    """The calls of a text that have no problem."""
    turn = parse_turn(text, family, tools=tools)
    return canonical((call.name, call.arguments) for call in turn.tool_calls if not call.problem)


@cache
def chat_of(family: str) -> TemplateChat:
    """The chat of a family, made once."""
    return family_chat(family)


def render(chat: TemplateChat, messages: list[dict[str, Any]], *, cue: bool) -> str:
    """What the template writes. Control words in arguments are not broken by spaces."""
    return chat._tokenizer.apply_chat_template(
        chat._format_arguments(chat._normalise_messages(messages)),
        tokenize=False,
        add_generation_prompt=cue,
    )


def rendered_turn(chat: TemplateChat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The turn as the policy would sample it, without its end."""
    user = {"role": "user", "content": "task"}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": f"call_{number}",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(calls)
        ],
    }
    whole = render(chat, [user, turn], cue=False)
    cued = render(chat, [user], cue=True)
    start = len(cued) if whole.startswith(cued) else len(render(chat, [user], cue=False))
    return whole[start : chat._find_turn_end(whole)]


def test_every_form_is_held_against_a_template() -> None:
    assert sorted(FORMS.values()) == sorted(WRITERS)
    assert all(FAMILIES_OF_MODELS[name].parser == WRITERS[FORMS[name]][0].name for name in FORMS)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(turns())
def test_calls_are_written_as_the_template_does_and_parsed_back(turn: Any) -> None:
    family, calls, written = turn
    chat = chat_of(family)
    text = rendered_turn(chat, calls)
    assert written in text
    tools = schemas(calls)
    for each in (text, written):
        read = parse_turn(each, chat.family, tools=tools)
        assert [call.problem for call in read.tool_calls] == [""] * len(calls)
        assert canonical((c.name, c.arguments) for c in read.tool_calls) == canonical(calls)


@pytest.mark.parametrize("family", FORMS)
def test_plain_calls_come_back(family: str) -> None:
    calls = [("look", {"where": "a 'q' \"é\"\n</think>", "n": 3, "o": {"a": [1, 2.5, True, None]}})]
    calls += [] if family in ONE_CALL else [("f.g-1", {})]
    if family == "lfm2.5":
        calls[0][1]["where"] = "é\n</think>"
    assert WRITERS[FORMS[family]][1](calls) in (text := rendered_turn(chat_of(family), calls))
    assert parsed(text, chat_of(family).family, schemas(calls)) == canonical(calls)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(turns())
def test_a_turn_that_is_cut_has_no_other_calls(turn: Any) -> None:
    """Every beginning of a turn can be parsed, as it comes when sampling is cut."""
    family, calls, written = turn
    expected = canonical(calls)
    tools = schemas(calls)
    for end in range(len(written)):
        found = parsed(written[:end], chat_of(family).family, tools)
        assert found == expected[: len(found)]


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("words", [("<think>", "</think>"), ("</think>", "<think>")])
@pytest.mark.parametrize("reasoning", ["", "hm</think>", "<think>a</think>\n<think>b</think>"])
def test_tags_of_reasoning_in_a_cut_call_are_words(
    family: str, words: tuple[str, str], reasoning: str
) -> None:
    """Without what is between them, the rest of a call would be another one."""
    syntax, write = WRITERS[FORMS[family]]
    nested = syntax.name in QUOTED_KEYS
    arguments = {words[0]: {words[1]: None}} if nested else {"x": words[0], "y": words[1]}
    calls = [("f", arguments)]
    written = write(calls)
    if syntax.name in {"harmony", "gemma", "mistral"}:  # They have tags of their own.
        reasoning = ""
    for end in range(len(written) + 1):
        found = parsed(reasoning + written[:end], chat_of(family).family, schemas(calls))
        assert found == canonical(calls)[: len(found)]
    assert found == canonical(calls)


LLAMA_F = '{"name": "f", "parameters": {}}'


@pytest.mark.parametrize(
    ("family", "text", "reasoning"),
    [
        ("llama", '{"name": "f", "parameters": {"<think>": {"</think>": 1}}', ""),
        ("llama", 'hm</think>{"name": "f", "parameters": {"<think>": {"</think>": 1}}', "hm"),
        ("llama", f'{{"name": "f", "parameters": {{"x": "</think>{LLAMA_F}', ""),
        ("llama", f'{LLAMA_F}; {{"name": "g", "parameters": {{"x": "</think>{LLAMA_F}', ""),
        ("pythonic", "[f(x='<think>b'y='</think>')]", ""),
        ("pythonic", "<think>hm</think>[f(x='<think>b'y='</think>')]", "hm"),
        ("pythonic", "[f(x='</think>[g(y=1)]", ""),
        ("pythonic", "hm</think>[f(x='</think>[g(y=1)]", "hm"),
    ],
)
def test_a_malformed_call_is_not_mended_by_its_tags(family: str, text: str, reasoning: str) -> None:
    turn = parse_turn(text, family)
    assert turn.tool_calls[-1].problem and "think>" in turn.tool_calls[-1].text
    assert {call.name for call in turn.tool_calls} <= {"f", ""}
    assert turn.reasoning == reasoning


@pytest.mark.parametrize(
    ("before", "after", "reasoning"),
    [
        ("", "", ""),
        ("hm</think>", "", "hm"),
        ("<think>hm</think>\n", "", "hm"),
        ("<think>a</think>\n<think>b</think>", "", "a\nb"),
        ("Hm <think>a</think> b</think>", "", "Hm <think>a</think> b"),
        ("x</think>y<think>z</think>w</think>", "", "x</think>y<think>z</think>w"),
        ("[g(x=1)]</think>", "", "[g(x=1)]"),
        ("[g(x=1)] it is</think>", "", "[g(x=1)] it is"),
        (f"{LLAMA_F}</think>", "", LLAMA_F),
        ("", "<think>ok</think>", "ok"),
        ("", "\n<think>ok", "ok"),
        ("<think>a</think>", "\n<think>b", "a\nb"),
    ],
)
@pytest.mark.parametrize(
    ("family", "call"),
    [("llama", LLAMA_F), ("pythonic", "[f(x='a</think>b')]"), ("pythonic", "[f(x=1)]")],
)
def test_reasoning_before_and_after_a_call_without_a_tag(
    family: str, call: str, before: str, after: str, reasoning: str
) -> None:
    turn = parse_turn(before + call + after, family)
    assert [(found.name, found.problem) for found in turn.tool_calls] == [("f", "")]
    assert (turn.content, turn.reasoning) == ("", reasoning)


@pytest.mark.parametrize(("family", "call"), [("llama", LLAMA_F), ("pythonic", "[f(x=1)]")])
def test_calls_in_reasoning_are_not_made(family: str, call: str) -> None:
    for text in (f"{call}</think>", f"{call}</think>no", f"<think>{call}</think>no"):
        turn = parse_turn(text, family)
        assert not turn.tool_calls and turn.content in {"", "no"} and call in turn.reasoning


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(turns(), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), TEXTS), max_size=3))
def test_a_damaged_turn_does_not_raise(turn: Any, edits: list[tuple[float, float, str]]) -> None:
    family, calls, text = turn
    for first, second, new in edits:
        start, end = sorted((round(first * len(text)), round(second * len(text))))
        text = text[:start] + new + text[end:]
    read = parse_turn(text, chat_of(family).family, tools=schemas(calls))
    for call in read.tool_calls:
        assert call.text in text and (call.text or call.problem)
        assert not (call.problem and call.arguments)
        json.dumps(dict(call.arguments), allow_nan=False)


REPEATED = [
    "<|channel|>commentary to=functions.f<|message|>{<|end|>", "<|message|>", "<|start|>", "to=f ",
    "<|tool_call>call:f{a:[", "<|tool_call>call:f{", "<|channel>thought", "<channel|>", '<|"|>',
    '<|tool_call>call:f{a:<|"|>', "<|tool_call_begin|>f:0", "<|tool_call_argument_begin|>",
    "<|tool_calls_section_begin|>", "<｜DSML｜invoke name=\"f\">", '<｜DSML｜parameter name="x" string="true">',
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS][", "[THINK]",
    "<tool_call>f<arg_key>x</arg_key><arg_value></think>",
    "<tool_call>f<arg_key>", "<tool_call>f<arg_key>x</arg_key><arg_value>", "[f(", "[f(x=[", "f(x='", "[f(), ",
    "<|tool_call_start|>[f(", "<tool_call>", "</tool_call>", '<tool_call>{"a": "', "{", "[", '"', "\\", "'", "(", " ",
    "\n", "a", "<", "é", "functions.", ":1", ",", "<think>", "</think>", "<think></think>", "</think>{",
    "</think>[f(", "<think>a</think> ",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_turns_of_200_kb_take_no_time(family: str) -> None:
    """Of one word many times, also after the opening of each syntax, in linear time."""
    openings = ["", *(words for words in REPEATED if words.startswith(("<|", "<｜", "[", "<t")))]
    find_end = SYNTAXES[family].find_reasoning_end
    for number, word in enumerate(REPEATED):
        body = word * (200_000 // len(word))
        for opening in ("", "[f(x='", openings[number % len(openings)]):
            text = opening + body
            assert cheapest(lambda text=text: parse_turn(text, family), 0.3) < 0.3, (opening, word)
            assert cheapest(lambda text=text: find_end(text), 0.3) < 0.3, (opening, word)


HARMONY = [
    (
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.look <|constrain|>json<|message|>{"where":"x"}<|call|>',
        "Need it.",
        "",
        [("look", {"where": "x"})],
    ),
    (
        "<|channel|>commentary<|message|>First, then.<|end|><|start|>assistant to=functions.look"
        "<|channel|>commentary<|constrain|>json<|message|>{}",
        "",
        "First, then.",
        [("look", {})],
    ),
    ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
     "hm", "Yes.", []),
    ("<|channel|>analysis<|message|>cut", "cut", "", []),
    ("It is there.", "", "It is there.", []),
    ("<|channel|>fin", "", "<|channel|>fin", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), HARMONY)
def test_channels_of_harmony_are_reasoning_content_and_calls(
    text: str, reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    read = parse_turn(text, "harmony")
    assert (read.reasoning, read.content) == (reasoning, content)
    assert canonical((c.name, c.arguments) for c in read.tool_calls) == canonical(calls)
    assert not any(call.problem for call in read.tool_calls)


@pytest.mark.parametrize(
    ("family", "text", "reason"),
    [
        ("harmony", " to=functions.f<|channel|>commentary json<|message|>{", "no JSON"),
        ("harmony", " to=functions.f<|channel|>commentary<|message|>{} so", "text follows"),
        ("harmony", " to=functions.f<|channel|>commentary<|message|>[1]", "a JSON object"),
        ("harmony", " to=python<|channel|>analysis<|message|>print(1)", "no JSON"),
        ("gemma", "<|tool_call>call:f{x:abc}<tool_call|>", "no JSON"),
        ("gemma", '<|tool_call>call:f{x:<|"|>abc}<tool_call|>', "not closed"),
        ("gemma", "<|tool_call>call:f{x:1,x:2}<tool_call|>", "given twice"),
        ("gemma", "<|tool_call>f{}<tool_call|>", "call:NAME"),
        ("gemma", f"<|tool_call>call:f{{x:{'[' * 40}{']' * 40}}}<tool_call|>", "nested deeper"),
        ("kimi", "<|tool_call_begin|>f<|tool_call_end|>", "functions.NAME:NUMBER"),
        ("kimi", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}", "is missing"),
        ("dsml", '<｜DSML｜invoke name="f"></｜DSML｜parameter>', "is missing"),
        (
            "dsml",
            '<｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="false">a'
            "</｜DSML｜parameter></｜DSML｜invoke>",
            "the parameter 'x': no JSON",
        ),
        ("deepseek", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "no name"),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}<｜tool▁call▁end｜>",
            "not closed",
        ),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", "no JSON"),
        ("mistral", '[TOOL_CALLS][{"name": 3}]', "the name"),
        ("glm", "<tool_call><arg_key>x</arg_key></tool_call>", "no name"),
        ("glm", "<tool_call>f<arg_key>x</arg_key><arg_value>1</tool_call>", "not closed"),
        ("pythonic", "[f(x=y)]", "no JSON"),
        ("pythonic", "<|python_start|>[f(1)]<|python_end|>", "no argument with a name"),
        ("pythonic", "[f(x=1)] so", "text follows"),
        ("pythonic", "<|tool_call_start|>f(x=1)<|tool_call_end|>", "no list"),
        ("pythonic", "<|tool_call_start|>[f(x=1)]", "is missing"),
    ],
)
def test_a_call_that_cannot_be_parsed_has_a_reason(family: str, text: str, reason: str) -> None:
    call = parse_turn(text, family).tool_calls[-1]
    assert reason in call.problem and not call.arguments


@pytest.mark.parametrize("family", FORMS)
def test_the_number_of_calls_is_bounded(family: str) -> None:
    syntax, write = WRITERS[FORMS[family]]
    turn = syntax.parse(write([("f", {})] * (MAX_CALLS + 20)), ())
    assert [bool(call.problem) for call in turn.calls] == [False] * MAX_CALLS + [True]
    assert f"at most {MAX_CALLS}" in turn.calls[-1].problem


def test_the_ids_of_kimi_are_those_that_the_policy_wrote() -> None:
    call = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    text = "".join(call.format(each) for each in ("functions.f:3", "functions.f:3", "g", "h:4"))
    calls = parse_turn(text, "kimi").tool_calls
    assert [c.name for c in calls] == ["f", "f", "g", "h"]
    assert [c.id for c in calls] == ["functions.f:3", "call_1", "g", "h:4"]


@pytest.mark.parametrize(
    ("family", "shown"),
    [("kimi-k2", "## Return of functions.look:7\n"), ("mistral3", '"call_id": "c')],
)
def test_the_answer_of_a_tool_names_the_call_as_the_template_expects(
    family: str, shown: str
) -> None:
    answer = {"role": "tool", "name": "look", "tool_call_id": "functions.look:7", "content": "a"}
    chat = chat_of(family)
    ids = chat.following_messages([answer], ended=True, tools=schemas([("look", {})]))
    assert shown in chat._decode_all(ids)


@pytest.mark.parametrize(
    "text",
    ["[see(1)] shows it.", "[see(1), see(2)]", "[f() and g()] are equal", "[see(above)]", "[a(b"],
)
def test_prose_that_begins_like_a_list_of_calls_is_text(text: str) -> None:
    assert parse_turn(text, "pythonic", tools=schemas([("look", {})])).content == text
    assert not parse_turn(text, "pythonic").tool_calls


def test_a_list_that_begins_with_a_tool_or_a_named_argument_is_meant_as_calls() -> None:
    tools = schemas([("see", {"n": 1})])
    for text, reason in (
        ("[see(1)] shows it.", "no argument with a name"),
        ("[look(n=1)] shows it.", "text follows the calls"),
        ("[see(", "no argument with a name"),
    ):
        read = parse_turn(text, "pythonic", tools=tools)
        assert reason in read.tool_calls[-1].problem and not read.content
    assert parsed("[look()]", "pythonic", tools) == canonical([("look", {})])


LEADING = [
    ("hermes", "<think>hm</think>\n\n", "ls"),
    ("plain", "hm</think>\n", "ls"),
    ("kimi", "<think>hm</think>", "<|tool_calls_section_begin|>"),
    ("kimi", "", "<|tool_call_begin|>f:0</think>"),
    ("deepseek", "hm</think>", "<｜tool▁calls▁begin｜>"),
    ("mistral", "[THINK]hm <think>[/THINK]\n", "[TOOL_CALLS]f[ARGS]{}"),
    ("mistral", "hm[/THINK]", "ls"),
    ("mistral", "<think>\nhm [THINK]\n</think>\n", "ls"),
    ("mistral", "", "so <think> hm </think> is no reasoning"),
    ("mistral", "", "[TOOL_CALLS]f[ARGS]{}[/THINK]"),
    ("gemma", "<|channel>thought\nhm\n<channel|>", "<|tool_call>call:f{}<tool_call|>"),
    ("gemma", "", "so <think>hm</think> ls"),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant",
        "<|channel|>final<|message|>ls",
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
        " to=functions.f<|channel|>commentary json<|message|>{}",
    ),
    ("harmony", "", "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=f"),
    ("harmony", "", "<|channel|>analysis<|message|>cut<|end|>"),
]
"""Syntax, leading reasoning, and the words after it."""


@pytest.mark.parametrize(("family", "reasoning", "words"), LEADING)
def test_the_leading_reasoning_ends_where_the_syntax_says(
    family: str, reasoning: str, words: str
) -> None:
    assert SYNTAXES[family].find_reasoning_end(reasoning + words) == len(reasoning)
    read = parse_turn(reasoning + words, family)
    if reasoning:
        assert "hm" in read.reasoning and "hm" not in read.content
        after = parse_turn(words, family)
        assert (read.content, len(read.tool_calls)) == (after.content, len(after.tool_calls))


@pytest.mark.parametrize("family", ["gpt-oss", "gemma4", "mistral13", "kimi-k2"])
def test_what_remains_of_a_turn_are_its_sampled_ids(family: str) -> None:
    chat = chat_of(family)
    reasoning, words = next(
        (first, rest) for name, first, rest in LEADING if name == chat.family and first
    )
    ids = [*chat.encode(reasoning + words), *chat.closing()[:1]]
    assert chat.without_reasoning(ids) == ids[len(chat.encode(reasoning)) :]
    assert chat.without_reasoning(chat.encode(words)) is None


def test_gpt_oss_forgets_the_reasoning_before_its_last_words() -> None:
    """Its template reads reasoning under a key of its own."""
    template = FAMILIES_OF_MODELS["gpt-oss"].template
    words = "<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    assert words in template
    thinking = (
        "{%- if message.thinking and loop.last and not add_generation_prompt %}"
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
        "{%- endif %}{{- '"
    )
    made = family_tokenizer("gpt-oss")
    made.chat_template = template.replace("{{- '" + words, thinking + words)
    chat = TemplateChat(made)
    assert chat.find_forgotten_turns((("user",), ("user",)), ()) == (True,)
    assert chat_of("gpt-oss").find_forgotten_turns((("user",), ("user",)), ()) == (False,)


def test_the_ids_of_mistral_are_those_that_the_policy_wrote() -> None:
    listed = [("f", "abcdef123"), ("g", "abcdef123"), ("h", "short"), ("i", "Zz0000009")]
    items = [{"name": name, "arguments": {}, "id": each} for name, each in listed]
    kept = ["abcdef123", "call_1", "call_2", "Zz0000009"]
    calls = parse_turn(f"[TOOL_CALLS]{json.dumps(items)}", "mistral").tool_calls
    assert [call.id for call in calls] == kept
    text = "".join(f"[TOOL_CALLS]{name}[CALL_ID]{each}[ARGS]{{}}" for name, each in listed)
    assert [call.id for call in parse_turn(text, "mistral").tool_calls] == kept


@pytest.mark.parametrize("family", ["mistral3", "mistral11"])
def test_the_answer_to_a_call_of_mistral_has_the_sampled_id(family: str) -> None:
    """So the ids of the history are those of the whole conversation in the template."""
    chat = chat_of(family)
    user = {"role": "user", "content": "task"}
    call = {
        "type": "function",
        "id": "abcdef123",
        "function": {"name": "look", "arguments": {}},
    }
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = schemas([("look", {})])
    sampled = [*chat.encode_turn(said, tools), *chat.closing(with_calls=True)[:1]]
    (read,) = chat.parse(sampled, tools).tool_calls
    answer = {"role": "tool", "name": "look", "tool_call_id": read.id, "content": "a cup"}
    ids = [*chat.opening([user], tools), *sampled]
    ids += chat.following_messages([answer], ended=True, end=sampled[-1], tools=tools)
    assert chat._decode_all(ids) == chat._render([user, said, answer], tools, generation=True)


def test_an_argument_of_python_gets_the_type_of_its_schema() -> None:
    """Some templates write all arguments in quotes."""
    tools = schemas([("f", {"n": 1, "s": "x", "o": {}})])
    read = parse_turn("""[f(n="3", s="3", o="{'a': 1}")]""", "pythonic", tools=tools)
    assert dict(read.tool_calls[0].arguments) == {"n": 3, "s": "3", "o": {"a": 1}}


def refused_without_ends(family: str, **more: Any) -> tuple[str, str]:
    """The refusal of a tokenizer without the control words of a family, and the word it names."""
    with pytest.raises(ChatTemplateError, match="the tokenizer has no token") as caught:
        TemplateChat(tokenizer(FAMILIES_OF_MODELS[family].template, "</s>"), **more)
    return str(caught.value), SYNTAXES[FAMILIES_OF_MODELS[family].parser].ends[0]


@pytest.mark.parametrize("family", ["gpt-oss", "glm4.6", "gemma4"])
def test_a_chosen_syntax_needs_the_ends_of_its_turns(family: str) -> None:
    """The end of a call would not be found in what is sampled."""
    problem, word = refused_without_ends(family, tool_parser=FAMILIES_OF_MODELS[family].parser)
    assert word in problem and "actor.tool_parser=plain" in problem


def test_a_tokenizer_with_no_end_of_turns_at_all_is_refused() -> None:
    problem, word = refused_without_ends("glm4.6")
    assert word in problem


@pytest.mark.parametrize(
    ("family", "control"),
    [("gpt-oss", ()), ("gemma4", ()), ("glm4.6", ("<|user|>",))],
    ids=["gpt-oss", "gemma4", "glm4.6"],
)
def test_with_a_detected_syntax_other_ends_are_enough(
    family: str, control: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A model with the template of a family and a vocabulary of its own."""
    chat = TemplateChat(tokenizer(FAMILIES_OF_MODELS[family].template, "</s>", control=control))
    word = SYNTAXES[chat.family].ends[0]
    assert f"no token {word!r}" in caplog.text
    assert chat._tokenizer.eos_token_id in chat.stop_ids
    assert all(chat._tokenizer.encode(each)[0] in chat.stop_ids for each in control)
    assert chat.closing(with_calls=True)


@pytest.mark.parametrize(
    ("family", "after_calls", "after_words"),
    [
        ("gpt-oss", "<|call|>", "<|return|>"),
        ("glm4.6", "<|observation|>", "<|user|>"),
        ("gemma4", "<|tool_response>", "<turn|>"),
        ("kimi-k2", "<|im_end|>", "<|im_end|>"),
    ],
)
def test_turns_end_with_the_words_of_the_syntax(
    family: str, after_calls: str, after_words: str
) -> None:
    chat = chat_of(family)
    for with_calls, word in ((True, after_calls), (False, after_words)):
        end = chat.closing(with_calls=with_calls)[0]
        assert chat._decode_all([end]) == word and end in chat.stop_ids
    assert family_tokenizer(family).eos_token_id in chat.stop_ids


def test_a_turn_of_glm_that_ended_with_the_next_message_is_not_continued_twice() -> None:
    chat = chat_of("glm4.6")
    answer = {"role": "tool", "name": "look", "tool_call_id": "x", "content": "a cup"}
    tools = schemas([("look", {})])
    for word, expected in (("<|observation|>", ""), ("<|endoftext|>", "<|observation|>")):
        (end,) = chat._tokenizer.encode(word, add_special_tokens=False)
        ids = chat.following_messages([answer], ended=True, end=end, tools=tools)
        assert chat._decode_all(ids).startswith(f"{expected}\n<tool_response>\na cup")
