"""Conversations with tools: the ids are those of the messages around the sampled ones, and the text
is the template's own, for templates in the style of known models and for that of the built-in
policy."""

from __future__ import annotations

import json
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.chat_template import ChatTemplateError, TemplateChat, detect_family
from realhf.api.tool_parser import FAMILIES, MAX_CALLS, MAX_DEPTH, parse_turn
from realhf.aws.messages import extract_command
from realhf.backends.builtin_policy import CHAT_TEMPLATE, train_tokenizer
from tests.api.chat.templates import DROPS, INSISTS, LLAMA3, QWEN3, QWEN25, SMOLLM2, tokenizer
from tests.cheapest import cheapest

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look somewhere.",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string"}},
                "required": ["where"],
            },
        },
    }
]
OPENING = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is <b>it</b>?"},
]
ANSWER = {
    "role": "tool",
    "name": "look",
    "tool_call_id": "call00000",
    "content": 'a "cup" é\nempty',
}


def chat_of(template, eos="<|im_end|>", **more):
    return TemplateChat(tokenizer(template, eos), system_prompt=None, **more)


def call(where):
    function = {"name": "look", "arguments": {"where": where}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "x", "function": function}],
    }


def written(family, where):
    key = "parameters" if family == "llama" else "arguments"
    body = json.dumps({"name": "look", key: {"where": where}}, ensure_ascii=False)
    return body if family == "llama" else f"<tool_call>\n{body}\n</tool_call>"


REAL = {
    "qwen25": (QWEN25, "<|im_end|>", {}),
    "qwen3": (QWEN3, "<|im_end|>", {}),
    "llama3": (LLAMA3, "<|eot|>", {}),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "none"])
def test_the_pieces_join_to_what_the_template_renders(name: str, tools: list[Any]) -> None:
    """Three turns: two calls with an answer each, then words. What was sampled is cut letter by
    letter, as no tokenizer would, and stays so."""
    template, eos, variables = REAL[name]
    chat = chat_of(template, eos, template_kwargs=variables)
    tok = chat._tokenizer
    stop = chat.stop_ids[0]
    family = detect_family(template)
    messages: list[dict[str, Any]] = list(OPENING)
    ids = chat.opening(messages, tools)
    for turn, where in enumerate(("under </tool_call>", "über", "")):
        said = written(family, where) if where else "It is there."
        sampled = [token for letter in said for token in chat.encode(letter)] + [stop]
        parsed = chat.parse(sampled)
        assert [(c.name, c.arguments, c.problem) for c in parsed.tool_calls] == (
            [("look", {"where": where}, "")] if where else []
        )
        assert parsed.token_count == len(sampled) and parsed.text == said
        before = ids
        ids = ids + sampled
        tail: list[dict[str, Any]] = [ANSWER if where else {"role": "user", "content": "Thanks."}]
        ids = ids + chat.following_messages(tail, ended=True, tools=tools)
        assert ids[: len(before) + len(sampled)] == before + sampled
        messages = [
            *messages,
            call(where) if where else {"role": "assistant", "content": said},
            *tail,
        ]
        whole = tok.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        assert tok.decode(ids, skip_special_tokens=False) == whole, turn


@pytest.mark.parametrize("name", REAL)
def test_the_tools_reach_the_opening(name):
    template, eos, _ = REAL[name]
    chat = chat_of(template, eos)
    with_tools, without = (
        chat._tokenizer.decode(chat.opening(OPENING, tools)) for tools in (TOOLS, [])
    )
    assert "Look somewhere." in with_tools and "Look somewhere." not in without
    for text in (with_tools, without):
        assert "Be brief." in text and "Where is <b>it</b>?" in text


def test_tools_are_refused_by_a_template_that_does_not_read_them():
    chat = chat_of(SMOLLM2)
    assert chat.opening(OPENING)
    with pytest.raises(ChatTemplateError, match="does not read tools"):
        chat.opening(OPENING, TOOLS)
    with pytest.raises(ChatTemplateError, match="does not read tools"):
        chat.following_messages([ANSWER], ended=True, tools=TOOLS)


@pytest.mark.parametrize(
    ("template", "family"),
    [(QWEN25, "hermes"), (QWEN3, "hermes"), (LLAMA3, "llama"), (SMOLLM2, "plain"), (CHAT_TEMPLATE, "hermes"),
     ("<tool_call>\n<function=x>", "xml"), ("{{ '<|python_tag|>' }}", "llama"), ("", "plain")],
)  # fmt: skip
def test_the_template_says_how_calls_are_written(template: str, family: str) -> None:
    assert detect_family(template) == family


def test_a_tokenizer_with_a_template_for_tools_uses_it():
    chat = TemplateChat(tokenizer({"default": SMOLLM2, "tool_use": QWEN25}, "<|im_end|>"))  # type: ignore[arg-type]
    assert chat.family == "hermes"
    assert "Look somewhere." in chat._tokenizer.decode(chat.opening(OPENING, TOOLS))


@pytest.mark.parametrize("number", [1, 3])
def test_a_template_that_insists_on_calls_gets_them(number):
    """Ids that the messages lack are made up; the call of the marker itself is no part of what
    follows."""
    chat = chat_of(INSISTS, "</s>")
    answers = [{"role": "tool", "content": f"r{n}"} for n in range(number)]
    text = chat._tokenizer.decode(chat.following_messages(answers, ended=True, tools=TOOLS))
    assert text == "".join(f"[R]r{n}[/R]" for n in range(number))
    more = [*answers, {"role": "user", "content": "go on"}]
    text = chat._tokenizer.decode(chat.following_messages(more, ended=False))
    assert text == "</s>" + "".join(f"[R]r{n}[/R]" for n in range(number)) + "[user]go on[/]"
    with pytest.raises(ChatTemplateError, match="9 characters"):
        chat.following_messages(
            [{"role": "tool", "tool_call_id": "short", "content": "r"}], ended=True
        )


@pytest.mark.parametrize("role", ["tool", "system", "nobody"])
def test_a_role_that_the_template_drops_is_an_error(role: str) -> None:
    chat = chat_of(DROPS, "</s>")
    with pytest.raises(ChatTemplateError, match=f"does not show a '{role}' message"):
        chat.following_messages([{"role": role, "content": "x"}], ended=True)
    assert chat.following_messages([{"role": "user", "content": "x"}], ended=True)


def test_what_a_template_refuses_is_an_error_of_ours():
    chat = chat_of(LLAMA3, "<|eot|>")
    twice = [{**call("x"), "tool_calls": call("x")["tool_calls"] * 2}]
    with pytest.raises(ChatTemplateError, match="single tool-calls"):
        chat.opening([*OPENING, *twice])


def test_what_comes_again_is_not_rendered_again_and_cannot_be_spoilt():
    chat = chat_of(QWEN25)
    rendered = 0
    inner = chat._tokenizer.apply_chat_template

    def counted(*args, **more):
        nonlocal rendered
        rendered += 1
        return inner(*args, **more)

    chat._tokenizer.apply_chat_template = counted
    first = chat.opening(OPENING, TOOLS)
    chat.following_messages([ANSWER], ended=False, tools=TOOLS)
    before = rendered
    again = chat.opening([dict(message) for message in OPENING], json.loads(json.dumps(TOOLS)))
    again += [1]
    assert chat.opening(OPENING, TOOLS) == first
    ended = chat.following_messages([ANSWER], ended=True, tools=TOOLS)
    assert chat.following_messages([ANSWER], ended=False, tools=TOOLS) == [chat.stop_ids[0], *ended]
    assert rendered == before
    assert chat.opening(OPENING) != first and rendered == before + 1


@pytest.mark.parametrize("kind", [MappingProxyType, OrderedDict])
def test_maps_of_any_kind_and_long_texts_are_rendered_alike(kind):
    chat = chat_of(QWEN25)
    for content in ("short", "long " * 10_000):
        message = {"role": "user", "content": content}
        tool = kind(TOOLS[0])  # type: ignore[call-arg]
        assert chat.opening([kind(message)], [tool]) == chat.opening([message], TOOLS)  # type: ignore[call-arg]


def test_arguments_may_be_the_json_text_of_the_chat_api():
    chat = chat_of(QWEN25)
    text = call("x")
    text["tool_calls"][0]["function"]["arguments"] = '{"where": "x"}'
    text["content"] = None
    assert chat.opening([*OPENING, text, ANSWER]) == chat.opening([*OPENING, call("x"), ANSWER])


def test_half_of_a_surrogate_pair_is_replaced():
    chat = chat_of(QWEN25)
    for made in (lambda text: chat.opening([{"role": "user", "content": text}]), chat.encode):
        assert made("a\ud800b\udcff") == made("a\ufffdb\ufffd")
        assert made("\ud83d\ude00") == made("\U0001f600")
    answer = {"role": "tool", "content": "\udcff"}
    assert "\ufffd" in chat._tokenizer.decode(chat.following_messages([answer], ended=True))


def test_reasoning_is_parsed_and_kept_in_the_ids():
    chat = chat_of(QWEN3)
    message = chat.parse(
        [*chat.encode(f"<think>\nhm\n</think>\n\n{written('hermes', 'x')}"), chat.stop_ids[0]]
    )
    assert (message.reasoning, message.content, message.tool_calls[0].name) == ("hm", "", "look")


def builtin(**variables):
    tok = train_tokenizer([m["content"] for m in [*OPENING, ANSWER]] * 3, 330, 512)
    return TemplateChat(tok, system_prompt=None, template_kwargs=variables)


def test_the_builtin_policy_reads_answers_of_tools_as_the_users_words_and_no_preamble():
    chat = builtin()
    decode = chat._tokenizer.decode
    assert chat.opening(OPENING, TOOLS) == chat.opening(OPENING[1:]), (
        "neither the system message nor the tools"
    )
    assert decode(chat.opening([*OPENING, call("x"), ANSWER], TOOLS)) == (
        f"<|user|>{OPENING[1]['content']}<|assistant|>"
        '<tool_call>{"name": "look", "arguments": {"where": "x"}}</tool_call><|end|>'
        f"<|user|>{ANSWER['content']}<|assistant|>"
    )
    said = [{"role": "user", "content": ANSWER["content"]}]
    assert chat.following_messages([ANSWER], ended=False) == chat.following_messages(
        said, ended=False
    )
    later = {"role": "system", "content": "Hurry."}
    assert decode(chat.following_messages([ANSWER, later], ended=True)).endswith(
        "<|user|>Hurry.<|assistant|>"
    )
    assert decode(chat.opening(OPENING[:1])) == "<|user|>Be brief.<|assistant|>", (
        "there is nothing else to read"
    )


def test_the_builtin_policy_reads_system_message_and_tools_when_told_to():
    chat = builtin(show_system=True, show_tools=True)
    assert chat._tokenizer.decode(chat.opening(OPENING, TOOLS)) == (
        f"<|user|>look(where)\n<|user|>Be brief.<|user|>{OPENING[1]['content']}<|assistant|>"
    )


def test_the_pieces_of_the_builtin_policy_join_to_its_templates_rendering():
    chat = builtin()
    ids = chat.opening(OPENING, TOOLS)
    for where in ("a", "b"):
        ids += [*chat.encode_turn(call(where)), *chat.closing()]
        ids += chat.following_messages([ANSWER], ended=True)
    messages = [*OPENING, call("a"), ANSWER, call("b"), ANSWER]
    assert chat._tokenizer.decode(ids) == chat._tokenizer.apply_chat_template(
        messages, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )


OLD_BUILTIN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>{% endif "
    "%}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_conversations_of_user_and_assistant_are_what_they_were():
    chat = builtin()
    said = {"role": "assistant", "content": "aws s3 ls"}
    for messages in (
        [*OPENING],
        [*OPENING, said],
        OPENING[1:],
        [*OPENING, said, *OPENING[1:], said, OPENING[1]],
    ):
        for cue in (True, False):
            new, old = (
                chat._tokenizer.apply_chat_template(
                    messages, chat_template=t, tokenize=False, add_generation_prompt=cue
                )
                for t in (CHAT_TEMPLATE, OLD_BUILTIN)
            )
            assert new == old


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("content", ["", "I look."])
def test_a_demonstrated_call_is_written_as_the_template_writes_it(variables, content):
    chat = chat_of(QWEN3, template_kwargs=variables)
    ids = chat.encode_turn({**call("x"), "content": content}, TOOLS)
    assert chat.decode(ids) == (f"{content}\n" if content else "") + written("hermes", "x")
    llama = chat_of(LLAMA3, "<|eot|>")
    assert llama.decode(llama.encode_turn(call("x"))) == written("llama", "x")
    assert chat.encode_turn({"role": "assistant", "content": "plain"}) == chat.encode("plain")
    with pytest.raises(ChatTemplateError, match="single tool-calls"):
        llama.encode_turn({**call("x"), "tool_calls": call("x")["tool_calls"] * 2})
    with pytest.raises(ChatTemplateError, match="as it cues one"):
        chat_of(DROPS.replace("{{ m.content }}</s>", "{{ m.content }}!"), "</s>").encode_turn(
            call("x")
        )


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"x": 1}}', '{"name": "f"', "[",
    "\ud800", "\\ud800", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "<|python_tag|>", '"', "{",
    '{"name": "f", "parameters": '
    '{}}', ";", "aws s3 ls", "<|channel|>", "<|message|>", " to=functions.f", "analysis", "<|start|>", "<|call|>",
    "<|tool_call>", "<tool_call|>", "call:f{", '<|"|>', "x:1,", "<|channel>thought", "<channel|>", "[TOOL_CALLS]",
    "f[ARGS]", "[THINK]", "[/THINK]", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<｜tool▁call▁begin｜>", "f<｜tool▁sep｜>", "```json", "<｜tool▁call▁end｜>",
    "<｜DSML｜invoke", ' name="f">', '<｜DSML｜parameter name="x" string="true">', "</｜DSML｜parameter>",
    "</｜DSML｜invoke>", "<arg_key>x</arg_key>", "<arg_value>", "</arg_value>", "[f(x=", "'", ")]",
    "<|tool_call_start|>", "<|tool_call_end|>", "\n", " ", "1e999", "9" * 30, "NaN", "é", "\x00", ":", "}",
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
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(TEXTS, VALUES, max_size=3)), min_size=1, max_size=4
)


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
        assert call.id == f"call_{number}" or (family == "kimi" and call.id in text)
        assert call.text in text and (call.text or call.problem)
        if call.problem:
            assert not call.arguments
        else:
            assert (
                call.name.strip()
                and len(json.dumps(dict(call.arguments), ensure_ascii=False).encode()) < 10_000
            )
    if family == "plain":
        assert not message.tool_calls


@pytest.mark.nightly
@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    CALLS,
    TEXTS.filter(lambda text: "<" not in text),
    TEXTS.filter(lambda text: "think>" not in text),
)
def test_calls_of_hermes_come_back_as_they_were_rendered(calls, said, thought):
    message = parse_turn(f"<think>{thought}</think>{said}\n{hermes(calls)}", "hermes")
    assert problems(message) == [""] * len(calls)
    assert [(call.name, call.arguments) for call in message.tool_calls] == calls
    assert (message.content, message.reasoning) == (said.strip(), thought.strip())


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(CALLS)
def test_calls_of_llama_come_back_as_they_were_rendered(calls):
    written = "; ".join(
        json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls
    )
    for text in (written, f"<|python_tag|>{written}"):
        message = parse_turn(text, "llama")
        assert [(call.name, call.arguments, call.problem) for call in message.tool_calls] == [
            (*c, "") for c in calls
        ]
        assert message.content == ""


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "a", "aws s3 ls", "\n", "```", "<", ">"]),
        max_size=12,
    )
)
def test_reasoning_follows_the_rules_by_which_commands_are_found(pieces):
    """The command of a turn is that of its content; joined pieces that form a new tag are left to
    the other test."""
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
        (
            'x <tool_call>{"name": "f"}</tool_call></think>b',
            'x <tool_call>{"name": "f"}</tool_call>',
            "b",
        ),
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
        (tagged('{"name": "f", "arguments": {"a": NaN}}'), "not a JSON number"),
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
    message = parse_turn(
        tagged('[{"name": "f", "arguments": {"a": 1}}, {"name": 1}, {"name": "g"}]'), "hermes"
    )
    assert [(call.name, bool(call.problem)) for call in message.tool_calls] == [
        ("f", False),
        ("", True),
        ("g", False),
    ]


@pytest.mark.parametrize(
    "text",
    [
        tagged('{"name": "f"}') * 100,
        tagged("[" + ",".join(['{"name": "f"}'] * 100) + "]"),
        "<tool_call>" * 5000,
    ],
)
def test_the_number_of_calls_is_bounded(text: str) -> None:
    message = parse_turn(text, "hermes")
    assert (
        len(message.tool_calls) == MAX_CALLS + 1
        and f"at most {MAX_CALLS}" in message.tool_calls[-1].problem
    )


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


@pytest.mark.parametrize(
    "text", ['{"answer": 3}', "{x}", 'I call {"name": "f", "parameters": {}}', "", "{"]
)
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
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "times": {"type": "integer"}},
        },
    },
}


def test_the_schema_says_which_arguments_of_xml_are_no_text():
    for tools, times in (((MOVE,), 3), ((), "3")):
        (call,) = parse_turn(f"I move.\n{XML_CALL}", "xml", tools=tools).tool_calls
        assert (call.name, call.problem, call.text) == ("move", "", XML_CALL)
        assert call.arguments == {"path": "a\nb", "times": times, "note": "3"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "integer", "nullable": True}, "None", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"$ref": "#/$defs/Optional"}, "None", None),
        ({"$ref": "#/$defs/Nothing"}, "None", "None"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "True", "True"),
        ({"type": "string", "nullable": True}, "nullable", "nullable"),
        ({}, "None", "None"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "True", True),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "array"}, "['a', None, True, 1.5]", ["a", None, True, 1.5]),
        ({"type": "object"}, "{'a': ['it\\'s']}", {"a": ["it's"]}),
    ],
)
def test_the_schema_says_what_an_untyped_argument_of_xml_is(
    schema: Any, text: str, value: Any
) -> None:
    """Templates write True, None and lists as Python does, or as JSON; a null that is allowed is no
    text."""
    definitions = {"Optional": {"type": ["string", "null"]}}
    parameters = {"type": "object", "properties": {"value": schema}, "$defs": definitions}
    tool = {"type": "function", "function": {"name": "set", "parameters": parameters}}
    written = f"<tool_call>\n<function=set>\n<parameter=value>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse_turn(written, "xml", tools=[tool]).tool_calls
    assert call.problem == ""
    assert call.arguments == {"value": value} and type(call.arguments["value"]) is type(value)


@pytest.mark.parametrize(
    "text", ["(1, 2)", "[(1, 2)]", "{1: 2}", "{1, 2}", "[f()]", "[1e999]", "[" * 300, "[b'x']"]
)
def test_a_literal_of_python_that_is_no_json_is_refused(text: str) -> None:
    parameters = {"type": "object", "properties": {"value": {"type": ["array", "object"]}}}
    tool = {"type": "function", "function": {"name": "set", "parameters": parameters}}
    written = f"<tool_call><function=set><parameter=value>{text}</parameter></function></tool_call>"
    (call,) = parse_turn(written, "xml", tools=[tool]).tool_calls
    assert "the parameter 'value': " in call.problem and call.arguments == {}


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
        assert (
            cheapest(lambda text=text: [parse_turn(text, family) for family in FAMILIES], 0.2) < 0.2
        ), text[:20]
