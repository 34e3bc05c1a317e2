"""Demonstrations become the ids an episode would have had."""

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from realhf.api.chat import TemplateChat
from realhf.api.config import BuiltinModelConfig
from realhf.backends.builtin_policy import build_builtin_policy
from realhf.data.chat_dataset import ChatDataset, ChatDatasetSource

MESSAGES = [
    {"role": "user", "content": "Create a bucket."},
    {"role": "assistant", "content": "aws s3 ls", "train": False},
    {"role": "user", "content": "none"},
    {"role": "assistant", "content": "aws s3 mb s3://amber-otter-1"},
    {"role": "user", "content": "made"},
]


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demos") / "demos.jsonl"
    path.write_text("\n".join(json.dumps({"messages": MESSAGES}) for _ in range(5)), encoding="utf-8")
    config = BuiltinModelConfig(vocab_size=320, hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16)
    build_builtin_policy(path, path.parent / "policy", config, seed=0)
    return path


def test_only_trained_turns_and_their_end_are_in_the_loss(demos: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demos.parent / "policy")
    sample = ChatDataset(str(demos), tokenizer).load(["x"], [0])
    ids, mask = sample["packed_input_ids"], sample["loss_mask"]
    chat = TemplateChat(tokenizer)
    assert tokenizer.decode(ids[mask]) == "aws s3 mb s3://amber-otter-1<|end|>"
    assert "made" not in tokenizer.decode(ids)
    first = chat.first("Create a bucket.")
    assert ids[: len(first)].tolist() == first


def test_every_row_comes_once_an_epoch_in_an_order_of_the_seed(demos: Path) -> None:
    source = ChatDatasetSource(seed=1, path=str(demos))
    epochs = [[item.id for item in source.next_batch(5)] for _ in range(2)]
    assert sorted(epochs[0]) == [f"{row}@0" for row in range(5)]
    assert sorted(epochs[1]) == [f"{row}@1" for row in range(5)]
    again = ChatDatasetSource(seed=1, path=str(demos))
    again.load_state_dict({"cursor": 5})
    assert [item.id for item in again.next_batch(5)] == epochs[1]


def test_the_masters_side_needs_no_torch() -> None:
    import subprocess

    code = "import sys, realhf.data.chat_dataset; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_conversation_that_is_too_long_is_refused_and_not_cut(demos: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demos.parent / "policy")
    length = ChatDataset(str(demos), tokenizer).load(["x"], [0]).n_tokens("packed_input_ids")
    ChatDataset(str(demos), tokenizer, max_tokens=length)
    with pytest.raises(ValueError, match=f"5 of 5 .* rollout.max_total_tokens={length - 1} .*longest has {length} tok"):
        ChatDataset(str(demos), tokenizer, max_tokens=length - 1)
