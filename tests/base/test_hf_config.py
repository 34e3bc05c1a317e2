"""Models whose layers have options of their own: what is read of each layer, and which of them are
refused at once."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig, LlamaConfig, MistralConfig

from realhf.api.config import ModelConfig
from realhf.backends.embedded.attention import count_sliding_layers, layer_configs, sliding_window
from realhf.backends.embedded.forward_pass import build_fast_decoder
from realhf.backends.embedded.kv_cache import RowCache
from realhf.backends.embedded.memory import head_sizes, token_bytes
from realhf.base.hf_config import decoder_problem, estimate_size, layer_options
from realhf.launch import checks

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"] * 2
TWO_WIDTHS = {"head_dim": 16, "global_head_dim": 24, "layer_types": KINDS, "sliding_window": 8}
NUMBERS_OF_A_TOKEN = 2 * 2 * (2 * 16 + 2 * 24)
"""Keys and values of two heads, 16 wide in two layers and 24 in two."""


def llama(**own: Any) -> LlamaConfig:
    return LlamaConfig(**SHAPE, per_layer_config={0: own})


def test_widths_of_heads_are_read_layer_by_layer() -> None:
    """Reading one for all layers raised AmbiguousGlobalPerLayerAttributeError, after mode=check had
    found nothing."""
    config = Gemma4TextConfig(**SHAPE, **TWO_WIDTHS)
    assert head_sizes(config) == [16, 24]
    assert token_bytes(config, torch.bfloat16) == 2 * NUMBERS_OF_A_TOKEN
    assert sliding_window(config) == 8 and count_sliding_layers(config) == 2
    assert [layer.head_dim for layer in layer_configs(config)] == [16, 24, 16, 24]
    narrow = llama(num_key_value_heads=1, intermediate_size=24)
    assert head_sizes(narrow) == [8] and token_bytes(narrow, torch.float32) == 4 * 2 * 8 * (
        1 + 3 * 2
    )
    assert sliding_window(narrow) is None and count_sliding_layers(narrow) == 0


def test_files_of_both_forms_say_what_a_token_takes() -> None:
    """A published Gemma 4 names the width of full layers beside that of others; transformers saves
    it by layers."""
    written = Gemma4TextConfig(**SHAPE, **TWO_WIDTHS).to_dict()
    published = {**SHAPE, **TWO_WIDTHS, "num_global_key_value_heads": 1, "attention_k_eq_v": False}
    for described in (
        written,
        json.loads(json.dumps(written)),
        published,
        {"text_config": published},
    ):
        assert estimate_size(described).key_values == NUMBERS_OF_A_TOKEN
        assert decoder_problem(described) is None
    one_head = estimate_size({**published, "attention_k_eq_v": True})
    assert one_head.key_values == 2 * (2 * 2 * 16 + 2 * 1 * 24)
    assert [layer["head_dim"] for layer in layer_options(written)] == [16, 24, 16, 24]


REFUSED = {
    "windows of two sizes": (
        {"per_layer_config": {"0": {"sliding_window": 16}}},
        "sliding windows of different sizes",
    ),
    "chunks": (
        {"per_layer_config": {"1": {"attention_chunk_size": 16}}},
        "differ in attention_chunk_size",
    ),
    "a part is missing": ({"per_layer_config": {"1": {"skip": ["mlp"]}}}, "differ in skip"),
    "no number of a layer": (
        {"per_layer_config": {"first": {"head_dim": 8}}},
        "does not say for which layers",
    ),
    "another model": (
        {"model_type": "llama", "per_layer_config": {"1": {"head_dim": 8}}},
        "layers of 'llama' with",
    ),
    "an odd width": (
        {"per_layer_config": {"1": {"head_dim": 7}}, "rope_theta": 1e4},
        "heads are 7 wide",
    ),
}


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_followed_is_refused_by_mode_check(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    described = {**SHAPE, "model_type": "gemma4_text", "sliding_window": 8, **options}
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    found = list(checks._weights_problems("actor", ModelConfig(path=str(tmp_path)), tmp_path, 32))
    assert len(found) == 1 and said in found[0] and found[0].startswith(f"actor.path={tmp_path}: ")


def test_windows_that_differ_are_not_taken_for_one() -> None:
    config = MistralConfig(**SHAPE, sliding_window=8, per_layer_config={0: {"sliding_window": 16}})
    with pytest.raises(
        ValueError,
        match=r"MistralConfig: layers have sliding windows of different sizes: \[8, 16\]",
    ):
        sliding_window(config)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_known_architecture_with_layers_of_its_own_generates_through_transformers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The fast decoder reads the number of heads once for all layers."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    assert build_fast_decoder(model, RowCache()) is not None
    model.config.per_layer_config = {0: {"num_key_value_heads": 1}}
    with caplog.at_level(logging.WARNING):
        assert build_fast_decoder(model, RowCache()) is None
    assert "its layers have options of their own" in caplog.text
