"""Models with a sliding window: the context is longer than the window, and generator and trainer
see the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
)

from realhf.api.config import GenConfig
from realhf.api.model import GenRequest
from realhf.api.sample import SequenceSample
from realhf.backends.embedded.decode_core import DecodeCore, DecodeTurn
from realhf.backends.embedded.generation import EmbeddedGenerator
from realhf.backends.training.packed_forward import PackedForward
from realhf.backends.training.torch_backend import load_causal_lm
from realhf.base.hf_config import context_limit, context_reason

WINDOW = 8
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.mark.slow
def test_what_was_sampled_beyond_the_window_is_what_the_trainer_scores(tmp_path: Any) -> None:
    """Two layers of eight tokens: what lies further back is out of sight."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(MistralConfig(**SHAPE))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    made.save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), "actor", torch.float32)
    engine = EmbeddedGenerator(model)
    assert engine.context_limit == 256
    prompts = [[5, 6, 7] * 9, [8] * 3]
    out = engine.generate(
        [GenRequest(i, prompt) for i, prompt in enumerate(prompts)],
        GenConfig(max_new_tokens=24),
        stop_ids=(),
        seed=0,
    )
    assert [len(o.token_ids) for o in out] == [24, 24]
    rows = [prompt + o.token_ids for prompt, o in zip(prompts, out, strict=True)]
    tensors = {
        "packed_input_ids": torch.tensor([i for row in rows for i in row]),
        "loss_mask": torch.tensor(
            [at >= len(p) for p, row in zip(prompts, rows, strict=True) for at in range(len(row))]
        ),
    }
    lengths = [[len(row)] for row in rows]
    sample = SequenceSample.from_tensors(["a", "b"], tensors, {key: lengths for key in tensors})
    scored = PackedForward(model)(sample).logprobs()[0].detach()
    sampled = torch.tensor([p for o in out for p in o.logprobs])
    torch.testing.assert_close(scored[scored != 0], sampled, atol=1e-3, rtol=1e-3)
    beyond = model(input_ids=torch.tensor([rows[0]])).logits[0]
    changed = model(input_ids=torch.tensor([[9, *rows[0][1:]]])).logits[0]
    assert torch.equal(beyond[2 * WINDOW :], changed[2 * WINDOW :]) and not torch.equal(
        beyond[0], changed[0]
    )


PHI_LONG = Phi3Config(
    max_position_embeddings=131072,
    original_max_position_embeddings=4096,
    rope_parameters={
        "rope_type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [4.0] * 48,
        "rope_theta": 1e4,
    },
)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (GptOssConfig(), 131072),
        (Gemma2Config(), 8192),
        (Gemma3TextConfig(), 131072),
        (MistralConfig(), 131072),
        (
            LlamaConfig(
                max_position_embeddings=2048, rope_scaling={"type": "linear", "factor": 2.0}
            ),
            4096,
        ),
        (
            Qwen2Config(
                max_position_embeddings=32768,
                rope_parameters={
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                    "rope_theta": 1e6,
                },
            ),
            131072,
        ),
        (
            LlamaConfig(
                max_position_embeddings=131072,
                rope_parameters={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "rope_theta": 5e5,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            ),
            131072,
        ),
        (
            LlamaConfig(
                max_position_embeddings=2048,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0},
            ),
            2048,
        ),
        (PHI_LONG, 4096),
    ],
)
def test_the_context_is_that_of_the_positions_with_their_scaling(config: Any, limit: int) -> None:
    assert context_limit(config.to_dict()) == limit
    assert context_limit({"text_config": config.to_dict()}) == limit


def test_a_rotary_embedding_that_depends_on_the_length_is_named_as_the_reason() -> None:
    reason = context_reason(PHI_LONG.to_dict())
    assert reason == " (its rotary embedding, longrope, changes for longer texts)"
    by_layer = {
        "rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {}}
    }
    assert (
        "dynamic" in context_reason(by_layer)
        and context_limit({**by_layer, "max_position_embeddings": 8}) == 8
    )
    assert context_reason(MistralConfig().to_dict()) == context_reason({"rope_scaling": None}) == ""


def test_a_row_that_idles_does_not_lengthen_the_text_of_others() -> None:
    """A rotary embedding by length took the place where idle rows are fed, at the end of the cache,
    for a position."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    shape = {**SHAPE, "sliding_window": None, "original_max_position_embeddings": 60}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Phi3Config(**shape, rope_parameters=rope)).eval()
    core = DecodeCore(model)
    over = []
    turns = [
        DecodeTurn(
            GenRequest(slot, [5 + slot] * 9),
            GenConfig(max_new_tokens=24),
            frozenset(),
            budget,
            stream=slot,
        )
        for slot, budget in ((0, 2), (1, 24))
    ]
    core.join(turns)
    while core.n_running:
        over += core.step(0)
    ids = torch.tensor([[6] * 9 + turns[1].token_ids])
    assert len(over) == 2 and ids.shape[1] == 33
    plain = model(input_ids=ids).logits[0, 8:-1].log_softmax(-1).gather(1, ids[0, 9:, None])[:, 0]
    torch.testing.assert_close(plain.detach(), torch.tensor(turns[1].logprobs), atol=1e-5, rtol=0)
