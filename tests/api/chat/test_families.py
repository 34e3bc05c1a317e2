"""Histories of conversations are what the template itself renders, for templates made like those of
known families."""

from __future__ import annotations

from typing import Any

import pytest

from realhf.api.chat_template import ChatTemplateError, TemplateChat
from tests.api.chat.families import FAMILIES_OF_MODELS, family_chat
from tests.api.chat.templates import QWEN25, tokenizer
from tests.api.chat.test_tool_conversations import TOOLS, call

OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is it?"}]
SAID = {"role": "assistant", "content": "Behind the house."}
USER = {"role": "user", "content": "And now?"}
ANSWER = {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": "a cup"}
ENDS = [
    ("qwen2.5", "<|im_end|>", "<|im_end|>"),
    ("qwen3", "<|im_end|>", "<|im_end|>"),
    ("qwen3-coder", "<|im_end|>", "<|im_end|>"),
    ("llama3.2", "<|eot_id|>", "<|eot_id|>"),
    ("lfm2.5", "<|im_end|>", "<|im_end|>"),
    ("gpt-oss", "<|return|>", "<|end|>"),
    ("gpt-oss", "<|call|>", "<|end|>"),
    ("cohere", "<|END_RESPONSE|>", "<|END_RESPONSE|>"),
    ("cohere", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    ("cohere", "<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
]
"""A family, the end that a policy samples, and what the template writes in its place. A sampled end
stays as it is."""


def rendered(chat: TemplateChat, messages: list[dict[str, Any]]) -> str:
    """What the template renders, with ids of calls in the form that it expects."""
    return chat._tokenizer.apply_chat_template(
        chat._format_arguments(chat._normalise_messages(messages)),
        tools=TOOLS,
        tokenize=False,
        add_generation_prompt=True,
    )


@pytest.mark.parametrize(("name", "sampled", "written"), ENDS)
def test_a_sampled_end_of_a_turn_is_not_written_a_second_time(
    name: str, sampled: str, written: str
) -> None:
    chat = family_chat(name)
    end = chat._tokenizer.encode(sampled, add_special_tokens=False)
    turn = [*chat.encode_turn(SAID, TOOLS), *end]
    ids = [*chat.opening(OPENING, TOOLS), *turn]
    ids += chat.following_messages([USER], ended=True, end=end[-1], tools=TOOLS)
    whole = rendered(chat, [*OPENING, SAID, USER])
    words = str(SAID["content"])
    rest = whole.partition(words)[2]
    assert rest.startswith(written)
    # What was sampled is never replaced, so the whole text differs by the end that the policy
    # chose.
    expected = whole.partition(words)[0] + words + sampled + rest.removeprefix(written)
    assert chat._decode_all(ids) == expected


@pytest.mark.parametrize("name", FAMILIES_OF_MODELS)
def test_a_turn_that_was_cut_gets_the_end_that_the_template_writes(name: str) -> None:
    """In the families whose cue opens reasoning, the template itself leaves the reasoning out of
    earlier turns."""
    chat = family_chat(name)
    ids = [*chat.opening(OPENING, TOOLS), *chat.encode_turn(SAID, TOOLS)]
    ids += chat.following_messages([USER], ended=False, tools=TOOLS)
    whole = rendered(chat, [*OPENING, SAID, USER])
    assert (
        chat._decode_all(ids).partition(str(SAID["content"]))[2]
        == whole.partition(str(SAID["content"]))[2]
    )


@pytest.mark.parametrize("name", FAMILIES_OF_MODELS)
def test_the_answer_of_a_tool_follows_as_the_template_writes_it(name: str) -> None:
    """Also in gpt-oss' template, which raises for one without a call before it, and ends the call
    with another id."""
    chat = family_chat(name)
    history = rendered(chat, [*OPENING, call("there"), ANSWER])
    end = {"cohere": "<|END_OF_TURN_TOKEN|>"}.get(
        name, chat._decode_all(chat.closing(with_calls=True)[:1])
    )
    ids = chat.following_messages(
        [ANSWER], ended=True, end=chat._tokenizer.convert_tokens_to_ids(end), tools=TOOLS
    )
    tail = chat._decode_all(ids)
    assert "a cup" in tail and end not in tail.partition("a cup")[0]
    assert history.endswith(end + tail)


def test_a_sampled_end_that_no_template_writes_stands_for_its_own() -> None:
    """A policy may end a turn with the end of a document, which the tokenizer's authors name as
    one."""
    chat = TemplateChat(tokenizer(QWEN25, "</s>"))
    (other,) = chat._tokenizer.encode("</s>", add_special_tokens=False)
    assert other in chat.stop_ids
    following = chat.following_messages([USER], ended=True, end=other)
    assert (
        chat._decode_all(following)
        == "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", FAMILIES_OF_MODELS)
def test_a_demonstrated_call_is_what_the_parser_reads_or_is_refused(name: str) -> None:
    chat = family_chat(name)
    if not FAMILIES_OF_MODELS[name].parser:
        with pytest.raises(
            ChatTemplateError, match=r"the chat template (writes the call|does not write)"
        ):
            chat.encode_turn(call("there"), TOOLS)
        return
    assert chat.family == FAMILIES_OF_MODELS[name].parser
    (read,) = chat.parse(chat.encode_turn(call("there"), TOOLS), TOOLS).tool_calls
    assert (read.name, read.arguments, read.problem) == ("look", {"where": "there"}, "")


def test_another_parser_than_the_templates_can_be_chosen() -> None:
    chat = family_chat("qwen2.5", tool_parser="llama")
    with pytest.raises(
        ChatTemplateError, match=r"the parser 'llama' finds no call; .*actor\.tool_parser"
    ):
        chat.encode_turn(call("there"), TOOLS)
    assert family_chat("qwen2.5", tool_parser="auto").family == "hermes"


@pytest.mark.parametrize(("name", "before"), [
    ("qwen3", ""), ("qwen3.5", "\n</think>\n\n"), ("nemotron3", "</think>"), ("llama3.2", ""),
    ("gpt-oss", "<|channel|>final<|message|>"), ("cohere", "<|START_RESPONSE|>"),
])  # fmt: skip
def test_demonstrated_words_begin_as_the_template_begins_them(name: str, before: str) -> None:
    chat = family_chat(name)
    assert chat.decode(chat.encode_turn(SAID, TOOLS)) == before + str(SAID["content"])
    assert chat.parse(chat.encode_turn(SAID, TOOLS)).content.endswith(str(SAID["content"]))


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron3"])
def test_demonstrated_reasoning_takes_the_place_of_the_one_that_the_cue_opens(name: str) -> None:
    chat = family_chat(name)
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nBehind the house."}
    text = chat.decode(chat.encode_turn(thought, TOOLS))
    assert text == "hm\n</think>\n\nBehind the house."
    parsed = chat.parse(chat.encode_turn(thought, TOOLS))
    assert (parsed.reasoning, parsed.content) == ("hm", "Behind the house.")


def test_spaces_before_punctuation_stay_whatever_the_tokenizer_says_of_itself() -> None:
    """A tokenizer of pieces of words leaves them out where its configuration asks for it, so that
    the text was another than what was sampled."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "[END]", "so", ",", "it", "'", "s", ".", "task"]
    inner = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="[END]", clean_up_tokenization_spaces=True
    )
    made.chat_template = "{% for m in messages %}{{ m.content }}[END]{% endfor %}"
    chat = TemplateChat(made)
    ids = chat.encode("so , it ' s .")
    assert made.decode(ids) != "so , it ' s ."
    assert chat.decode(ids) == chat._decode_all(ids) == "so , it ' s ."
