"""Variables of the chat template reach the prompts of episodes and the rows of supervised data alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from realhf.api.chat import TemplateChat
from realhf.data.chat_dataset import ChatDataset

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if not enable_thinking %}[quiet]{% endif %}{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", clean_up_tokenization_spaces=False)
    fast.chat_template = TEMPLATE
    return fast


@pytest.mark.parametrize("thinks", [True, False])
def test_prompts_and_rows_are_rendered_alike(tokenizer: Any, tmp_path: Path, thinks: bool) -> None:
    kwargs = {"enable_thinking": thinks}
    system = [{"role": "system", "content": "be brief"}]
    opening = [*system, {"role": "user", "content": "list"}]
    prompt = TemplateChat(tokenizer, system_prompt=None, template_kwargs=kwargs).opening(opening)
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "list"}, {"role": "assistant", "content": "aws"}]
    rows.write_text(json.dumps({"messages": messages}))
    row = (
        ChatDataset(str(rows), tokenizer, chat_template_kwargs=kwargs, system_prompt="be brief")
        .load(["a"], [0])["packed_input_ids"]
        .tolist()
    )
    assert row[: len(prompt)] == prompt
    assert tokenizer.decode(prompt).endswith("assistant:" if thinks else "assistant:[quiet]")
