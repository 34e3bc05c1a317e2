"""The size of a model, from its configuration or its files, is that of the model that torch makes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from realhf.base.hf_config import activation_bytes, model_size, size_of, trainer_memory, weight_bytes

SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 96, "tie_word_embeddings": False},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "tie_word_embeddings": True},
    "mixtral": {"num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4},
    "gpt2": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_that_of_the_model(kind, tmp_path):
    config = AutoConfig.for_model(kind, **SMALL, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config)
    counted = sum(p.numel() for p in model.parameters())
    written = {**config.to_dict(), "tie_word_embeddings": config.tie_word_embeddings}
    assert size_of(written).parameters == pytest.approx(counted, rel=0.1 if kind == "gpt2" else 0.02)
    model.save_pretrained(tmp_path)
    found = model_size(str(tmp_path))
    assert found is not None and found.parameters == counted
    if kind in ("llama", "qwen3"):
        assert found.adapters(2) == size_of(written).adapters(2)
    (tmp_path / "model.safetensors").write_bytes(b"not a head")
    assert model_size(str(tmp_path)) == size_of(written)
    (tmp_path / "config.json").write_text("{}")
    assert model_size(str(tmp_path)) is None and model_size("owner/never-downloaded") is None


def test_a_trainer_holds_weights_gradients_and_moments():
    """By hand, in bytes for each parameter: fp32 4 + 4 + 8; bf16 2 with an fp32 copy of 4, + 4 + 8."""
    size = size_of({**SMALL, "intermediate_size": 96, "tie_word_embeddings": True})
    n, few = size.parameters, size.adapters(4)
    assert trainer_memory(size, "float32") == (held := type(trainer_memory(size, "float32")))(4 * n, 4 * n, 8 * n)
    assert trainer_memory(size, "bfloat16", offload=True) == held(6 * n, 4 * n, 0)
    assert trainer_memory(size, "bfloat16", parts=2).later == 6 * n
    assert trainer_memory(size, "bfloat16", lora_rank=4) == held(2 * (n + few) + 4 * few, 4 * few, 8 * few)
    assert weight_bytes(size, "bfloat16") == 2 * n
    plain, saved = (activation_bytes(size, "float32", 100, checkpointing=on) for on in (False, True))
    assert plain == 4 * 100 * 3 * (16 * 64 + 4 * 96) and saved < plain / 2
