"""Models and batches of the parts: a Qwen3 of 0.6 billion weights, or a tiny one in a rehearsal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.gpu_hour.recording import Setting
from realhf.api.sample import SequenceSample
from realhf.backends.builtin_policy import train_tokenizer

_TOKENIZER_WORDS = 512
_LOGIT_DEVIATION = 3.0
"""Standard deviation of a random model's logits, with which tokens have favourites."""


def choose_device(setting: Setting) -> torch.device:
    """Return where models of this machine compute."""
    return torch.device("cuda:0" if setting.cuda else "cpu")


def make_config(setting: Setting) -> Qwen3Config:
    """Return the shape of the models of this machine."""
    shape: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    }
    if not setting.cuda:
        shape |= {
            "vocab_size": 1024,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "intermediate_size": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            # So that few narrow blocks weigh more in the hidden state than the last token itself.
            "initializer_range": 0.16,
        }
    return Qwen3Config(
        **shape, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )


def describe_shape(setting: Setting) -> str:
    """Return the name of ``make_config``'s model."""
    return "Qwen3 0.6B, random" if setting.cuda else "tiny Qwen3, random"


def build_model(config: Qwen3Config, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a model with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        # It is the head, too; a hidden state has about one per coordinate.
        deviation = config.initializer_range * math.sqrt(config.hidden_size)
        model.get_input_embeddings().weight.mul_(_LOGIT_DEVIATION / deviation)
    return model


def save_for_server(model: Any, folder: Path) -> None:
    """Write a model with a small tokenizer, so that a server can load it."""
    words = [f"{a} {b}" for a in ("move", "use", "reach", "with") for b in range(100)]
    model.save_pretrained(folder)
    tokens = min(_TOKENIZER_WORDS, model.config.vocab_size)
    train_tokenizer(words, tokens, model.config.max_position_embeddings).save_pretrained(folder)


def make_sample(ids: Tensor, prompt: int, group: int, **tensors: Tensor) -> SequenceSample:
    """Return rows of equal length as a sample, of which consecutive ones belong to groups of
    ``group``. Tokens after the first ``prompt`` are trained. ``tensors`` are further keys, with an
    entry for each row, or for each row and predicted token."""
    rows, length = ids.shape
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, prompt:] = True
    values = {"packed_input_ids": ids.flatten(), "loss_mask": mask.flatten()}
    values |= {name: tensor.flatten() for name, tensor in tensors.items()}
    lengths = {
        name: [[len(tensor) // rows] * group] * (rows // group) for name, tensor in values.items()
    }
    names = [str(number) for number in range(rows // group)]
    assert lengths["loss_mask"][0][0] == length
    return SequenceSample.from_tensors(names, values, lengths)
