"""Old reasoning: which turns a template forgets, and the ids that are left of a turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.chat_template import TemplateChat, reasoning_end
from tests.api.chat.templates import INSISTS, LLAMA3, QWEN3, QWEN25, SMOLLM2, tokenizer

QWEN3_KEY = QWEN3.replace(
    "{%- if '</think>' in content %}",
    "{%- if message.reasoning_content %}{%- set thought = message.reasoning_content %}"
    "{%- elif '</think>' in content %}",
)
"""Reads ``reasoning_content`` too, as the real one does."""
U, T = ("user",), ("tool",)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def chat(template, merges=()):
    return TemplateChat(tokenizer(template, "<|im_end|>", merges), system_prompt=None)


@pytest.mark.parametrize("template", [QWEN3, QWEN3_KEY])
@pytest.mark.parametrize(
    ("shape", "forgotten"),
    [
        ((U, U), (True,)),
        ((("system", "user"), U, U), (True, True)),
        ((U, T), (False,)),
        ((U, T, T), (False, False)),
        ((U, T, U), (True, True)),
        ((U, U, T), (True, False)),
        ((U, ("tool", "tool"), U, T), (True, True, False)),
    ],
)
def test_reasoning_before_the_last_word_of_a_user_is_forgotten(
    template: str, shape: tuple[tuple[str, ...], ...], forgotten: tuple[bool, ...]
) -> None:
    assert chat(template).forgotten(shape, TOOLS) == forgotten


@pytest.mark.parametrize("template", [QWEN25, SMOLLM2, LLAMA3, INSISTS])
def test_templates_that_know_of_no_reasoning_forget_none(template):
    assert not any(chat(template).forgotten((U, U, U)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<think>\nhm\n</think>\n\nls", "ls"),
        ("hm\n</think>\n\nls", "ls"),
        ("<think>\n\n</think>\n\n", ""),
        ("<think>a</think> b <think>c</think> d", " b <think>c</think> d"),
        ("ls", None),
        ("<think>never closed", None),
        ("ls <think>late</think>", None),
        ('<tool_call>{"name": "say", "arguments": {"x": "</think>"}}</tool_call>', None),
    ],
)
def test_the_leading_reasoning_of_a_turn_goes_with_its_line_breaks(text: str, words: str | None) -> None:
    made = chat(QWEN3)
    ids = [*made.encode(text), made.stop_ids[0]]
    expected = None if words is None else [*made.encode(words), made.stop_ids[0]]
    assert made.without_reasoning(ids) == expected


def test_what_is_left_are_the_ids_that_were_sampled_unless_a_token_holds_both():
    made = chat(QWEN3, (("l", "s"), ("Ċ", "w")))
    thought, stop = made.encode("<think>a</think>\n\n"), made.stop_ids[0]
    spelt = [*made.encode("l"), *made.encode("s")]
    assert made.encode("ls") != spelt and made.without_reasoning([*thought, *spelt, stop]) == [*spelt, stop]
    crossing = made.encode("<think>a</think>\n\nwls")
    assert made.decode(crossing[-2:]) == "\nwls" and len(crossing) < len(thought) + 3
    assert made.without_reasoning([*crossing, stop]) == [*made.encode("wls"), stop]


def test_a_cue_that_opens_the_reasoning_goes_with_it():
    made = chat(QWEN3)
    assert made.without_open_reasoning(made.encode("x\n<think>\n")) == made.encode("x\n")
    assert made.without_open_reasoning(made.encode("x <think> y")) == made.encode("x <think> y")


@given(st.lists(st.sampled_from([*"<>/ab\n ", "<think>", "</think>", "<tool_call>"]), max_size=30))
def test_any_words_of_a_policy_have_an_end_of_reasoning(parts: list[str]) -> None:
    text = "".join(parts)
    place = reasoning_end(text)
    assert 0 <= place <= len(text) and (place == 0 or "</think>" in text[:place])
