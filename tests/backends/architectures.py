"""Small random models of every architecture that is promised."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
_TWO_KINDS = ["sliding_attention", "full_attention"]
_WIDE = {"head_dim": 16}  # four heads of 16 in a model 32 wide
KINDS = list(itertools.product((True, False), (torch.float32, torch.bfloat16)))
"""Every model is tied and untied, in each type."""
MISMATCH = {torch.float32: 1e-5, torch.bfloat16: 0.05}
"""Largest difference of log-probabilities that is put down to rounding."""


def kind_name(kind: tuple[bool, torch.dtype]) -> str:
    """Return a kind as the name of a test has it."""
    return f"{'tied' if kind[0] else 'untied'} {'fp32' if kind[1] is torch.float32 else 'bf16'}"


def configs(
    vocabulary: int, positions: int, window: int, end: int = 2
) -> dict[str, PreTrainedConfig]:
    """Return a configuration of each architecture. ``positions`` is a multiple of 16, ``window``
    that of sliding layers, ``end`` the token that ends a sequence."""
    ids = {"bos_token_id": 1, "eos_token_id": end}
    shape: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": positions, **ids,
        "pad_token_id": 0,
    }  # fmt: skip
    before = {"factor": 4.0, "original_max_position_embeddings": positions // 4}
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        **before,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    long = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [4.0] * 4,
    }
    pair = {"num_local_experts": 2, "num_experts_per_tok": 1}
    gemma = {**_WIDE, "query_pre_attn_scalar": 16, "sliding_window": window}
    inputs = {
        "vocab_size_per_layer_input": vocabulary,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
    }
    four = {
        **shape,
        **_WIDE,
        **inputs,
        "num_hidden_layers": 4,
        "layer_types": 2 * _TWO_KINDS,
        "sliding_window": window,
    }
    streams = {
        "altup_num_inputs": 3,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    }
    return {
        "llama": LlamaConfig(**shape, **_WIDE, attention_bias=True, mlp_bias=True, rope_parameters=llama3),
        "llama, one key "
        "head": LlamaConfig(**{**shape, "num_key_value_heads": 1}, rope_parameters=_LINEAR),
        "qwen2": Qwen2Config(**shape, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **before}),
        "qwen3": Qwen3Config(**shape, **_WIDE),
        "gemma2": Gemma2Config(**shape, **gemma),
        "gemma3": Gemma3TextConfig(**shape, **gemma, layer_types=_TWO_KINDS),
        "gemma3n": Gemma3nTextConfig(**four, **streams),
        "gemma4": Gemma4TextConfig(**four, global_head_dim=24),
        "mistral": MistralConfig(**shape, sliding_window=window),
        "gpt2": GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=2, n_head=4, n_positions=positions, **ids),
        "phi3": Phi3Config(
            **shape, sliding_window=window, original_max_position_embeddings=long_context(positions),
            rope_parameters=long,
        ),
        "olmo, clipped": OlmoConfig(**shape, clip_qkv=0.5),
        "olmo2": Olmo2Config(**shape),
        "gpt_oss": GptOssConfig(**shape, **_WIDE, **pair, sliding_window=window, rope_parameters=_PLAIN),
        "mixtral": MixtralConfig(**shape, **pair),
        "apertus, with buffers": ApertusConfig(**shape, rope_parameters=llama3),
    }  # fmt: skip


def long_context(positions: int) -> int:
    """Return the context of the model whose rotary embedding changes for longer texts."""
    return 3 * positions // 4


def save_model(config: PreTrainedConfig, tied: bool, folder: Path) -> None:
    """Write a model of this configuration, with weights that are sharp enough to have
    favourites."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        type(config).from_dict({**config.to_dict(), "tie_word_embeddings": tied}),
        dtype=torch.float32,
    )
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
        embedding = made.get_input_embeddings()
        if getattr(embedding, "padding_idx", None) is not None:
            embedding.weight[embedding.padding_idx] = (
                0.0  # as models have it that were trained with padding
            )
    made.save_pretrained(folder)
