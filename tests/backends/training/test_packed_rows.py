"""Rows without padding give what padded rows give, whatever the architecture: scores, gradients,
whole train steps.

The kernel is the plain one, on the CPU; that of CUDA is compared with it in ``tests/gpu``.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2MoeConfig,
)

from realhf.api.config import GenConfig, OptimizerConfig
from realhf.api.model import GenRequest
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training import packed_forward
from realhf.backends.training.micro_batches import Ranks, split_micro_batches
from realhf.backends.training.packed_forward import PackedForward
from realhf.backends.training.sequence_packing import SequenceInputs
from realhf.backends.training.torch_engine import TorchEngine
from realhf.backends.training.varlen_attention import reference_attention

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 192, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TWO_KINDS = ["sliding_attention", "full_attention"]
OTHERS = {
    "mistral": MistralConfig(**SHAPE, sliding_window=8),
    "gemma3": Gemma3TextConfig(
        **SHAPE, head_dim=8, query_pre_attn_scalar=16, sliding_window=8, layer_types=TWO_KINDS
    ),
    "phi3": Phi3Config(**SHAPE),
    "olmo2": Olmo2Config(**SHAPE),
}
SPEC = MicroBatchSpec(1, 128)


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """This device has a kernel, and nothing else that packs."""
    monkeypatch.setattr(PackedForward, "_supports_trees", lambda self: False)
    monkeypatch.setattr(packed_forward, "find_kernel", lambda *_: (reference_attention, ""))


def groups() -> SequenceSample:
    """Sequences that begin alike, one that another begins with, one alone, one of a single
    token."""
    draw = torch.Generator().manual_seed(4)
    stem = torch.randint(3, 97, (23,), generator=draw)
    tails = [torch.randint(3, 97, (n,), generator=draw) for n in (9, 4, 17)]
    rows = [torch.cat([stem, tail]) for tail in tails] + [
        stem[:20],
        torch.randint(3, 97, (31,), generator=draw),
    ]
    rows.append(rows[-1][:1])
    ids = torch.cat(rows)
    tensors = {"packed_input_ids": ids, "loss_mask": torch.rand(len(ids), generator=draw) < 0.6}
    lengths = [[len(row)] for row in rows]
    return SequenceSample.from_tensors(
        [str(n) for n in range(len(rows))], tensors, {key: lengths for key in tensors}
    )


def engine_of(model: Any, **options: Any) -> TorchEngine:
    return TorchEngine(
        model, None, optimizer=OptimizerConfig(lr=1e-2), total_train_steps=5, **options
    )


def other(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(OTHERS[name])).eval()


def loss(outputs: Any, part: SequenceSample) -> Any:
    logprobs, entropy = outputs.logprobs(temperature=0.9, with_entropy=True)
    return (logprobs.exp() - 0.1 * entropy).sum(), {}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("name", ["qwen3", "gpt2", *OTHERS])
def test_scores_and_steps_are_those_of_padded_rows(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, name: str, checkpointing: bool
) -> None:
    def build() -> Any:
        return other(name) if name in OTHERS else tiny_model(name)

    by_trees = engine_of(build(), gradient_checkpointing=checkpointing)
    windowed = name in ("mistral", "gemma3")
    assert by_trees._forward.packs != (checkpointing or windowed)
    monkeypatch.setattr(PackedForward, "_supports_trees", lambda self: False)
    padded = engine_of(build(), gradient_checkpointing=checkpointing)
    monkeypatch.setattr(packed_forward, "find_kernel", lambda *_: (reference_attention, ""))
    by_kernel = engine_of(build(), gradient_checkpointing=checkpointing)
    assert by_kernel._forward.packs and not padded._forward.packs
    sample = groups()
    for _ in range(2):
        wanted = padded.logprobs(sample, temperature=0.7, mb_spec=SPEC)
        expected = padded.train_batch(sample, loss, mb_spec=SPEC)
        for packed in (by_trees, by_kernel):
            scores = packed.logprobs(sample, temperature=0.7, mb_spec=SPEC)
            torch.testing.assert_close(scores, wanted, atol=2e-5, rtol=0)
            found = packed.train_batch(sample, loss, mb_spec=SPEC)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
            assert found.stats["loss"] == pytest.approx(expected.stats["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_pass_has_neither_padding_nor_a_row_of_the_size_of_a_mask(
    packing: None, tiny_model: Any
) -> None:
    sample = groups()
    (part,) = split_micro_batches(sample, SPEC, Ranks(), share=True, packed=True)
    inputs = SequenceInputs.from_sample(sample)
    tokens = [inputs.tokens[i].tolist() for i in inputs.scored]
    assert part.positions == len(
        {tuple(row[:n]) for row in tokens for n in range(1, len(row) + 1)}
    ), "a tree of tokens"
    parts = split_micro_batches(sample, MicroBatchSpec(3, 40), Ranks(), share=True, packed=True)
    assert len(parts) >= 3 and all(part.positions <= 40 for part in parts)
    assert [part.positions for part in parts] == sorted(
        (part.positions for part in parts), reverse=True
    )
    result = engine_of(tiny_model()).train_batch(sample, loss, mb_spec=SPEC)
    assert result.stats["positions"] == part.positions


def test_generation_and_export_are_as_without(
    packing: None, tiny_model: Any, tmp_path: Path
) -> None:
    packed = engine_of(tiny_model("gpt2"))
    requests = [GenRequest(i, [3 + i, 5, 7], seed=i) for i in range(3)]
    made = packed.generator().generate(requests, GenConfig(max_new_tokens=6), stop_ids=(), seed=1)
    plain = AutoModelForCausalLM.from_config(tiny_model("gpt2").config)
    plain.load_state_dict(packed.model.state_dict())
    expected = (
        TorchEngine(plain, None)
        .generator()
        .generate(requests, GenConfig(max_new_tokens=6), stop_ids=(), seed=1)
    )
    assert [output.token_ids for output in made] == [output.token_ids for output in expected]
    packed.export_hf(tmp_path / "policy")
    assert "packed_rows" not in json.dumps(
        json.loads((tmp_path / "policy" / "config.json").read_text())
    )


@pytest.mark.slow
def test_a_window_that_only_masks_know_is_not_lost(
    packing: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers of Qwen2-MoE leave their window to the mask. Sequences of the trial are shorter than
    it, so they agreed, and tokens of longer ones saw beyond it."""
    experts = {
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    config = Qwen2MoeConfig(
        **SHAPE, **experts, use_sliding_window=True, sliding_window=32, layer_types=TWO_KINDS
    )
    assert not PackedForward(AutoModelForCausalLM.from_config(config).eval()).packs
    assert "do not give their attention the sliding window of 32 tokens" in caplog.text


@pytest.mark.slow
def test_a_model_that_does_not_follow_is_padded_and_says_so(
    packing: None,
    tiny_model: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Gemma2Config(
        **SHAPE, head_dim=8, query_pre_attn_scalar=16, attn_implementation="eager"
    )
    engine = engine_of(AutoModelForCausalLM.from_config(config).eval())
    assert not engine._forward.packs and "the model's attention has no fused kernel" in caplog.text
    caplog.clear()

    def blind(*given: Any) -> Any:
        return reference_attention(*given[:-2], 1, given[-1])

    monkeypatch.setattr(packed_forward, "find_kernel", lambda *_: (blind, ""))
    engine = engine_of(tiny_model())
    assert (
        not engine._forward.packs
        and "padded to one length: in shared rows hidden states" in caplog.text
    )
    assert engine.model.config._attn_implementation == "sdpa" and engine._forward.shares
    caplog.clear()
    monkeypatch.setattr(packed_forward, "find_kernel", lambda *_: (None, "the model has float32"))
    assert (
        not engine_of(tiny_model())._forward.packs
        and "padded to one length: the model has float32" in caplog.text
    )
