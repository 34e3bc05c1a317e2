"""A conversation grows by ids around what the policy sampled, through any chat template."""

import pytest
from transformers import AutoTokenizer

from realhf.api.chat_template import ChatTemplateError, TemplateChat
from tests.api.chat.templates import tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2_LIKE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(("template", "eos"), [(CHATML, "<|im_end|>"), (LLAMA2_LIKE, "</s>")])
def test_pieces_join_to_the_templates_own_rendering(template, eos):
    tok = tokenizer(template, eos)
    chat = TemplateChat(tok, system_prompt=None)
    turn = [*chat.encode("aws s3 ls"), chat.stop_ids[0]]
    pieces = [*chat.first("List the buckets"), *turn, *chat.following("none", ended=True), *chat.encode("aws sts x")]
    whole = (
        tok.apply_chat_template(
            [
                {"role": "user", "content": "List the buckets"},
                {"role": "assistant", "content": "aws s3 ls"},
                {"role": "user", "content": "none"},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        + "aws sts x"
    )
    assert tok.decode(pieces, skip_special_tokens=False) == whole


def test_a_turn_cut_by_length_is_ended_by_us():
    chat = TemplateChat(tokenizer(CHATML, "<|im_end|>"), system_prompt=None)
    assert chat.following("x", ended=False) == [chat.stop_ids[0], *chat.following("x", ended=True)]


def test_decode_hides_the_stop_token_only():
    chat = TemplateChat(tokenizer(CHATML, "<|im_end|>"))
    assert chat.decode([*chat.encode("aws s3 ls <|im_start|>"), *chat.stop_ids]) == "aws s3 ls <|im_start|>"


def test_a_tokenizer_without_template_is_named():
    with pytest.raises(ChatTemplateError, match="no chat template"):
        TemplateChat(tokenizer(None, "<|im_end|>"))


def test_the_system_prompt_reaches_the_first_ids():
    tok = tokenizer(CHATML, "<|im_end|>")
    assert "be brief" in tok.decode(TemplateChat(tok, system_prompt="be brief").first("hello"))


GLM_LIKE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_a_turn_ends_with_every_id_that_the_models_authors_name(tmp_path):
    """The list of generation_config.json used to be read nowhere, so a policy went on after the end of its call."""
    tok = tokenizer(CHATML, "<|im_end|>")
    tok.save_pretrained(tmp_path)
    own = TemplateChat(AutoTokenizer.from_pretrained(tmp_path)).stop_ids
    for named, further in (("5", [5]), ("[7, 5]", [7, 5]), ("null", []), (str(own[0]), []), ("[true, 2.5]", [])):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {named}}}')
        chat = TemplateChat(AutoTokenizer.from_pretrained(tmp_path), stop_ids=[9])
        assert chat.stop_ids == (*own, *further, 9)
        assert chat.decode([*chat.encode("ls"), 9]) == "ls"
    with pytest.raises(ChatTemplateError, match=r"gen\.stop_ids: the tokenizer has no token 123456"):
        TemplateChat(tok, stop_ids=[123456])


def test_a_template_that_ends_a_turn_with_nothing_is_refused():
    """The next message used to follow at once, and nothing ended a turn but the end of the sequence."""
    with pytest.raises(ChatTemplateError, match="writes nothing after a policy turn"):
        TemplateChat(tokenizer(GLM_LIKE, "<|im_end|>"))


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_variables_of_the_template_reach_every_rendering():
    tok = tokenizer(THINKING, "<|im_end|>")
    quiet = TemplateChat(tok, template_kwargs={"enable_thinking": False})
    thinks = TemplateChat(tok)
    said = [{"role": "user", "content": "x"}]
    for rendered, plain in (
        (quiet.first("x"), thinks.first("x")),
        (quiet.following("x", ended=True), thinks.following("x", ended=True)),
        (quiet.following_messages(said, ended=False), thinks.following_messages(said, ended=False)),
        (quiet.opening(said), thinks.opening(said)),
    ):
        assert tok.decode(rendered) == tok.decode(plain) + "<think>\n\n</think>\n\n"
    assert quiet.stop_ids == thinks.stop_ids


@pytest.mark.parametrize("name", ["enable_thinkin", "add_generation_prompt"])
def test_a_variable_that_the_template_does_not_read_is_refused(name):
    with pytest.raises(ChatTemplateError, match=f"does not read {name}"):
        TemplateChat(tokenizer(THINKING, "<|im_end|>"), template_kwargs={name: False})
