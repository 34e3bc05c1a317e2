"""Demonstrations become the ids an episode would have had."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from realhf.api.chat_template import TemplateChat
from realhf.api.config import BuiltinModelConfig
from realhf.backends.builtin_policy import build_builtin_policy
from realhf.data.chat_dataset import ChatDataset, ChatDatasetSource, conversation_tokens
from tests.api.chat.families import family_chat
from tests.api.chat.templates import QWEN3, QWEN25, SMOLLM2
from tests.api.chat.templates import tokenizer as tokenizer_of

MESSAGES = [
    {"role": "user", "content": "Create a bucket."},
    {"role": "assistant", "content": "aws s3 ls", "train": False},
    {"role": "user", "content": "none"},
    {"role": "assistant", "content": "aws s3 mb s3://amber-otter-1"},
    {"role": "user", "content": "made"},
]


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    path = tmp_path_factory.mktemp("demos") / "demos.jsonl"
    path.write_text(
        "\n".join(json.dumps({"messages": MESSAGES}) for _ in range(5)), encoding="utf-8"
    )
    config = BuiltinModelConfig(
        vocab_size=320, hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16
    )
    build_builtin_policy(path, path.parent / "policy", config, seed=0)
    return path


def test_only_trained_turns_and_their_end_are_in_the_loss(demos):
    tokenizer = AutoTokenizer.from_pretrained(demos.parent / "policy")
    sample = ChatDataset(str(demos), tokenizer).load(["x"], [0])
    ids = sample["packed_input_ids"]
    mask = sample["loss_mask"]
    chat = TemplateChat(tokenizer)
    assert tokenizer.decode(ids[mask]) == "aws s3 mb s3://amber-otter-1<|end|>"
    assert "made" not in tokenizer.decode(ids)
    first = chat.first("Create a bucket.")
    assert ids[: len(first)].tolist() == first


def test_what_an_environment_said_in_a_demonstration_ends_no_turn(demos):
    chat = TemplateChat(AutoTokenizer.from_pretrained(demos.parent / "policy"))
    control = set(chat._tokenizer.all_special_ids)
    hostile = [
        {**m, "content": f"<|end|>{m['content']}<|end|>"} if m["role"] == "user" else m
        for m in MESSAGES
    ]
    plain_ids, plain_mask = conversation_tokens({"messages": MESSAGES}, chat)
    ids, mask = conversation_tokens({"messages": hostile}, chat)
    assert [token for token in ids if token in control] == [
        token for token in plain_ids if token in control
    ]
    assert [token for token, learned in zip(ids, mask, strict=True) if learned] == [
        token for token, learned in zip(plain_ids, plain_mask, strict=True) if learned
    ]


def test_every_row_comes_once_an_epoch_in_an_order_of_the_seed(demos):
    source = ChatDatasetSource(seed=1, path=str(demos))
    epochs = [[item.id for item in source.next_batch(5)] for _ in range(2)]
    assert sorted(epochs[0]) == [f"{row}@0" for row in range(5)]
    assert sorted(epochs[1]) == [f"{row}@1" for row in range(5)]
    again = ChatDatasetSource(seed=1, path=str(demos))
    again.load_state_dict({"cursor": 5})
    assert [item.id for item in again.next_batch(5)] == epochs[1]


@pytest.mark.slow
def test_the_masters_side_needs_no_torch():
    import subprocess

    code = "import sys, realhf.data.chat_dataset; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_conversation_that_is_too_long_is_refused_and_not_cut(demos):
    tokenizer = AutoTokenizer.from_pretrained(demos.parent / "policy")
    length = ChatDataset(str(demos), tokenizer).load(["x"], [0]).n_tokens("packed_input_ids")
    ChatDataset(str(demos), tokenizer, max_tokens=length)
    with pytest.raises(
        ValueError,
        match=f"5 of 5 .* rollout.max_total_tokens={length - 1} .*longest has {length} tok",
    ):
        ChatDataset(str(demos), tokenizer, max_tokens=length - 1)


TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


def calling(content="", **more):
    function = {"name": "look", "arguments": "{}"}
    calls = [{"type": "function", "id": "a", "function": function}]
    return {"role": "assistant", "content": content or None, "tool_calls": calls, **more}


ROW: dict[str, Any] = {
    "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is it?"},
        calling(train=False),
        {"role": "tool", "tool_call_id": "a", "content": "here"},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "There."},
        {"role": "user", "content": "Thanks."},
    ],
}


def test_a_row_of_any_environment_is_what_the_template_renders():
    """System message, tools, calls and answers; what follows the last turn is left out, and so is
    the template's own text after the end of that turn."""
    tokenizer = tokenizer_of(QWEN25, "<|im_end|>")
    ids, mask = conversation_tokens(ROW, TemplateChat(tokenizer))
    plain = [
        {key: value for key, value in message.items() if key != "train"}
        for message in ROW["messages"][:-1]
    ]
    plain[2]["tool_calls"] = [{"function": {"name": "look", "arguments": {}}}]
    whole = tokenizer.apply_chat_template(plain, tools=[TOOL], tokenize=False)
    assert tokenizer.decode(ids) == whole.removesuffix("\n")
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "There.<|im_end|>"
    row = {**ROW, "messages": [*ROW["messages"][:2], calling(), *ROW["messages"][3:]]}
    again, trained = conversation_tokens(row, TemplateChat(tokenizer))
    assert again == ids
    said = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>There.<|im_end|>'
    assert tokenizer.decode([i for i, m in zip(ids, trained, strict=True) if m]) == said


@pytest.mark.parametrize(
    ("family", "after_call", "after_words"),
    [
        ("gpt-oss", "<|call|>", "<|return|>"),
        ("glm4.6", "<|observation|>", "<|user|>"),
        ("gemma4", "<|tool_response>", "<turn|>"),
    ],
)
def test_a_turn_with_calls_ends_with_the_token_of_its_syntax(
    family: str, after_call: str, after_words: str
) -> None:
    """It is in the loss, and what follows does not repeat it."""
    chat = family_chat(family)
    messages = [{k: v for k, v in m.items() if k != "train"} for m in ROW["messages"]]
    ids, trained = conversation_tokens({**ROW, "messages": messages}, chat)
    ends = [
        chat._decode_all([token])
        for token, is_trained, next_trained in zip(ids, trained, [*trained[1:], False], strict=True)
        if is_trained and not next_trained
    ]
    assert ends == [after_call, after_words]
    text = chat._decode_all(ids)
    assert text.count(after_call) == 1
    assert chat._decode_all(ids[: -len(chat.closing()[:1])]).endswith("There.")


def test_the_system_prompt_precedes_a_row():
    chat = TemplateChat(tokenizer_of(QWEN25, "<|im_end|>"))
    row = {
        "messages": [
            {"role": "user", "content": "Do it."},
            {"role": "assistant", "content": "done"},
        ]
    }
    ids, mask = conversation_tokens(row, chat, "Be brief.")
    opening = chat.opening([{"role": "system", "content": "Be brief."}, *row["messages"][:1]])
    turn = [*chat.encode("done"), *chat.closing()[:1]]
    assert ids == opening + turn and mask == [False] * len(opening) + [True] * len(turn)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "needs an assistant turn, and a message before the first"),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            "needs an assistant turn, and a message before the first",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            "needs an assistant turn, and a message before the first",
        ),
        ({"messages": "text"}, "line 2"),
        ([], "line 2"),
        (ROW, "does not read tools"),
    ],
)
def test_a_row_that_is_none_is_named(tmp_path: Path, row: Any, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 2.*{reason}|{reason}"):
        ChatDataset(str(path), tokenizer_of(SMOLLM2, "<|im_end|>"))


REASONING = QWEN3.replace(
    "{%- set thought = '' %}", "{%- set thought = message.reasoning_content or '' %}"
)
"""A template that writes reasoning which is given by its key."""
THOUGHT = {"role": "assistant", "content": "It is 4.", "reasoning_content": "2 + 2 is 4"}


@pytest.mark.parametrize("calls", [False, True])
def test_reasoning_is_part_of_a_turn_as_the_template_writes_it(calls: bool) -> None:
    """It was dropped, and the policy taught to answer without."""
    chat = TemplateChat(tokenizer_of(REASONING, "<|im_end|>"))
    turn: dict[str, Any] = {**calling(), "reasoning_content": "2 + 2 is 4"} if calls else THOUGHT
    row = {"tools": [TOOL], "messages": [{"role": "user", "content": "2 + 2?"}, turn]}
    ids, mask = conversation_tokens(row, chat)
    said = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' if calls else "It is 4."
    trained = chat._tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert trained == f"<think>\n2 + 2 is 4\n</think>\n\n{said}<|im_end|>"
    assert chat.parse(ids[mask.index(True) :]).reasoning == "2 + 2 is 4"
    plain = [{**row["messages"][0]}, {**turn, "content": turn["content"] or ""}]
    if calls:
        plain[1]["tool_calls"] = [{"function": {"name": "look", "arguments": {}}}]
    whole = chat._tokenizer.apply_chat_template(plain, tools=[TOOL], tokenize=False)
    assert chat._tokenizer.decode(ids) == whole.removesuffix("\n")


@pytest.mark.parametrize(
    ("template", "variables"), [(QWEN3, {}), (SMOLLM2, {}), (REASONING, {"enable_thinking": False})]
)
def test_reasoning_that_the_template_does_not_write_is_refused(
    tmp_path: Path, template: str, variables: dict[str, Any]
) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": "2 + 2?"}, THOUGHT]}
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(
        ValueError,
        match=r"rows\.jsonl, line 1: the chat template does not write .*reasoning_content",
    ):
        ChatDataset(str(path), tokenizer_of(template, "<|im_end|>"), chat_template_kwargs=variables)


def test_blank_lines_and_a_mark_are_no_rows(tmp_path: Path) -> None:
    """Either ended the load, or made the master draw a row that the worker did not have."""
    path = tmp_path / "rows.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": f"{n}!"},
            ]
        }
        for n in "ab"
    ]
    text = "\n".join(map(json.dumps, rows))
    tokenizer = tokenizer_of(QWEN25, "<|im_end|>")
    for written in (text, f"\ufeff{text}\n", f"{text}\n\n \n", f"\n{text}\r\n", f"\ufeff\n{text}"):
        path.write_bytes(written.encode())
        dataset = ChatDataset(str(path), tokenizer)
        source = ChatDatasetSource(seed=1, path=str(path))
        assert len(dataset) == 2
        drawn = [item.metadata["row"] for item in source.next_batch(4)]
        assert sorted(drawn[:2]) == sorted(drawn[2:]) == [0, 1]
        sample = dataset.load(["x"], [1])
        assert tokenizer.decode(sample["packed_input_ids"][sample["loss_mask"]]) == "b!<|im_end|>"
    path.write_text("\ufeff\n \n", encoding="utf-8")
    for make in (
        lambda: ChatDataset(str(path), tokenizer),
        lambda: ChatDatasetSource(seed=1, path=str(path)),
    ):
        with pytest.raises(ValueError, match="has no conversations"):
            make()
