"""Tiny random models of several architectures, and ragged batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.utils import logging as transformers_logging

from realhf.api.sample import SequenceSample

VOCABULARY = 97
_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()


def tiny_config(architecture: str, positions: int = 192, vocabulary: int = VOCABULARY) -> Any:
    shape = {**_SHAPE, "max_position_embeddings": positions, "vocab_size": vocabulary}
    if architecture == "qwen3":
        return Qwen3Config(**shape, head_dim=8, tie_word_embeddings=True)
    if architecture == "llama":
        return LlamaConfig(**shape)
    if architecture == "qwen2":
        return Qwen2Config(**shape)
    return GPT2Config(
        vocab_size=vocabulary,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=positions,
        bos_token_id=1,
        eos_token_id=2,
    )


@pytest.fixture
def tiny_model() -> Callable[..., Any]:
    """tiny_model(architecture, positions, vocabulary) -> the same random weights every time, sharp
    enough to have favourites."""

    def build(
        architecture: str = "qwen3", positions: int = 192, vocabulary: int = VOCABULARY
    ) -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            tiny_config(architecture, positions, vocabulary)
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4.0)
        return model

    return build


@pytest.fixture
def ragged_sample() -> Callable[..., SequenceSample]:
    """ragged_sample(groups) -> ids and loss_mask with these sequence lengths per sample."""

    def build(groups: list[list[int]], seed: int = 0) -> SequenceSample:
        generator = torch.Generator().manual_seed(seed)
        n = sum(sum(group) for group in groups)
        tensors = {
            "packed_input_ids": torch.randint(0, VOCABULARY, (n,), generator=generator),
            "loss_mask": torch.rand(n, generator=generator) < 0.5,
        }
        return SequenceSample.from_tensors(
            [f"s{i}" for i in range(len(groups))], tensors, dict.fromkeys(tensors, groups)
        )

    return build
