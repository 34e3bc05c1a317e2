"""What a checkpoint must be before it trains: whole, dense, and without a look at later tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, BertConfig, BertLMHeadModel, MambaConfig

from realhf.api.config import OptimizerConfig
from realhf.api.experiment import ModelSpec
from realhf.backends.training.torch_backend import ModelLoadError, TorchBackend, load_causal_lm


@pytest.fixture
def folder(tiny_model: Any, tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def test_a_checkpoint_that_lacks_tensors_is_refused(folder: Path) -> None:
    """They were filled with random numbers, and training went on as if they had been learnt."""
    assert load_causal_lm(str(folder), "actor", torch.float32).dtype is torch.float32
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"actor.path=.* lacks model.layers.1.mlp.up_proj.weight, and 0"):
        load_causal_lm(str(folder), "actor", torch.float32)


def test_a_checkpoint_of_another_architecture_or_vocabulary_is_refused(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size += 1
    config.save_pretrained(folder)
    with pytest.raises(
        ModelLoadError, match=r"lm_head.weight of the checkpoint has the shape \(97, 32\), in Llama.* 1 "
    ):
        load_causal_lm(str(folder), "actor", torch.float32)
    text = (folder / "config.json").read_text().replace("LlamaForCausalLM", "GPT2LMHeadModel")
    (folder / "config.json").write_text(text.replace('"model_type": "llama"', '"model_type": "gpt2"'))
    with pytest.raises(ModelLoadError, match=r"the checkpoint of a GPT2LMHeadModel lacks .*, and \d+ others"):
        load_causal_lm(str(folder), "actor", torch.float32)


def test_a_model_that_finds_no_memory_is_named_with_what_to_set(folder: Path) -> None:
    """Its embedding of 32 terabytes is really not there."""
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = 1 << 38
    config.save_pretrained(folder)
    spec = ModelSpec("actor", str(folder), trainable=True, optimizer=OptimizerConfig())
    with pytest.raises(RuntimeError, match=rf"^out of memory for actor.path={folder} on the device cpu: ") as said:
        TorchBackend("cpu").build(spec, seed=1, total_train_steps=1)
    assert "actor.dtype=bfloat16 (it is float32), or actor.backend=fsdp2" in str(said.value)


def test_a_checkpoint_whose_logits_are_no_numbers_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"actor.path=.*: its logits are not finite; the checkpoint is damaged"):
        load_causal_lm(str(folder), "actor", torch.float32)


def test_what_is_no_dense_decoder_is_refused(tmp_path: Path) -> None:
    MambaConfig(vocab_size=97, hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path / "mamba")
    with pytest.raises(ModelLoadError, match="state-space or linear layers"):
        load_causal_lm(str(tmp_path / "mamba"), "actor", torch.float32)
    shape = {"vocab_size": 97, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    BertLMHeadModel(BertConfig(**shape, intermediate_size=8)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelLoadError, match="BertLMHeadModel looks at later tokens, so it cannot generate"):
        load_causal_lm(str(tmp_path / "bert"), "actor", torch.float32)


def test_only_a_critic_may_lack_the_projection_to_the_vocabulary(tiny_model: Any, tmp_path: Path) -> None:
    tiny_model("llama").get_decoder().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"lacks lm_head.weight, and 0 others"):
        load_causal_lm(str(tmp_path), "actor", torch.float32)
    model = load_causal_lm(str(tmp_path), "critic", torch.float32, with_head=False)
    assert torch.equal(model.model.norm.weight, tiny_model("llama").model.norm.weight)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks model.norm.weight, and 0 others"):
        load_causal_lm(str(tmp_path), "critic", torch.float32, with_head=False)
