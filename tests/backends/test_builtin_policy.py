"""The small policy is an ordinary Hugging Face folder whose tokenizer keeps names easy to copy."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from realhf.api.chat_template import TemplateChat
from realhf.api.config import BuiltinModelConfig
from realhf.backends.builtin_policy import build_builtin_policy

NAMES = ["amber-otter-12", "brisk-maple-20", "calm-otter-20", "amber-maple-12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("builtin")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Create an S3 bucket named {name}."},
                {"role": "assistant", "content": f"aws s3api create-bucket --bucket {name}"},
                {"role": "user", "content": json.dumps({"Location": f"/{name}"})},
            ]
        }
        for name in NAMES * 5
    ]
    (root / "demos.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = BuiltinModelConfig(
        vocab_size=420, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48
    )
    build_builtin_policy(root / "demos.jsonl", root / "policy", config, seed=3)
    return root / "policy"


def test_a_name_has_the_same_ids_wherever_it_stands(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    alone = tokenizer.encode("amber-otter-12")
    assert len(alone) == 3
    for text in (
        "named amber-otter-12.",
        "--bucket amber-otter-12",
        '"Location": "/amber-otter-12"',
    ):
        ids = tokenizer.encode(text)
        assert any(ids[i : i + 3] == alone for i in range(len(ids))), text


@pytest.mark.parametrize(
    "text", ["aws s3api create-bucket --bucket a-b-3", "  tabs\t\n", "naïve ☃ {}", "x=-1 --y=2"]
)
def test_any_text_survives_the_tokenizer(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_folder_loads_as_any_causal_model(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = TemplateChat(AutoTokenizer.from_pretrained(folder))
    assert model.config.vocab_size == 420
    assert chat.stop_ids == (model.config.eos_token_id,)


@pytest.mark.slow
def test_the_seed_decides_the_weights(folder: Path, tmp_path: Path) -> None:
    config = BuiltinModelConfig(
        vocab_size=420, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48
    )
    demos = folder.parent / "demos.jsonl"
    first = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for seed, same in ((3, True), (4, False)):
        build_builtin_policy(demos, tmp_path / str(seed), config, seed)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(seed)).state_dict()
        assert all(bool((first[name] == again[name]).all()) for name in first) is same


def test_without_demonstrations_every_byte_is_a_token(tmp_path: Path) -> None:
    config = BuiltinModelConfig(hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16)
    build_builtin_policy(None, tmp_path / "policy", config, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert model.config.vocab_size == len(tokenizer) == 260
    assert all(
        tokenizer.decode(tokenizer.encode(text)) == text for text in ("aws s3 ls", "naïve ☃\n")
    )
    assert len(tokenizer.encode("naïve")) == 6
    chat = TemplateChat(tokenizer)
    assert len(chat.opening([{"role": "user", "content": "abc"}])) == 5
    assert chat.stop_ids == (model.config.eos_token_id,)


def test_the_tokenizer_learns_the_calls_of_demonstrations(tmp_path: Path) -> None:
    function = {"name": "look_around", "arguments": {"where": "kitchen"}}
    row = {
        "messages": [
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": function}],
            },
            {"role": "tool", "content": "a cup"},
        ]
    }
    (tmp_path / "demos.jsonl").write_text("\n".join([json.dumps(row)] * 5), encoding="utf-8")
    config = BuiltinModelConfig(
        vocab_size=400, hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16
    )
    build_builtin_policy(tmp_path / "demos.jsonl", tmp_path / "policy", config, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    chat = TemplateChat(tokenizer)
    ids = chat.encode_turn(row["messages"][1])
    pieces = [chat.decode([token]) for token in ids]
    assert pieces == [
        '<tool_call>{"name": "look_around", "arguments": {"where": "',
        "kitchen",
        '"}}</tool_call>',
    ]
    for text in (
        '<tool_call>{"name": "x", "arguments": {}}</tool_call>',
        '<tool_call>{"n',
        '{"a": {"b": 1}}</tool_call>',
    ):
        assert chat.decode(chat.encode(text)) == text
