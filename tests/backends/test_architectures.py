"""Small random models of every architecture that is promised: they generate, train, take weights, save and load.

Generation from cached rows and the trainer's packed forward pass must give the same log-probabilities, before and after
an update, and plain transformers the same again.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from realhf.algorithms.sft import SFTInterface
from realhf.api.config import GenConfig, OptimizerConfig
from realhf.api.model import CallContext, GenOutput, GenRequest, Model
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded.continuous_batching import ContinuousGenerator
from realhf.backends.training.torch_backend import load_causal_lm
from realhf.backends.training.torch_engine import TorchEngine

WINDOW, POSITIONS, SAMPLED, DEADLINE_S = 8, 64, 12, 120.0
SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": POSITIONS, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [4.0] * 4}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
TWO_KINDS = ["sliding_attention", "full_attention"]
WIDE = {"head_dim": 16}  # four heads of 16 in a model 32 wide
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, **WIDE, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
    "llama, one key head": LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, rope_parameters=LINEAR),
    "qwen2": Qwen2Config(**SHAPE, rope_parameters=YARN),
    "qwen3": Qwen3Config(**SHAPE, **WIDE),
    "gemma2": Gemma2Config(**SHAPE, **WIDE, query_pre_attn_scalar=16, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(
        **SHAPE, **WIDE, query_pre_attn_scalar=16, sliding_window=WINDOW, layer_types=TWO_KINDS
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=WINDOW),
    "gpt2": GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, bos_token_id=1, eos_token_id=2
    ),
    "phi3": Phi3Config(**SHAPE, sliding_window=WINDOW, original_max_position_embeddings=48, rope_parameters=LONG),
    "olmo2": Olmo2Config(**SHAPE),
    "gpt_oss": GptOssConfig(
        **SHAPE, **WIDE, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1, rope_parameters=PLAIN
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1),
    "apertus, with buffers": ApertusConfig(**SHAPE, rope_parameters=LLAMA3),
}  # fmt: skip
CONTEXT = {"phi3": 48, "llama, one key head": 4 * POSITIONS}
MISMATCH = {torch.float32: 1e-5, torch.bfloat16: 0.05}
"""Largest difference of log-probabilities that is put down to rounding."""
PROMPTS = [[5, 6, 7] * 9, [8, 9, 8], [9, 10, 11, 12]]
Outputs = Sequence[GenOutput]


@pytest.fixture(params=sorted(CONFIGS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[(True, torch.float32), (False, torch.bfloat16)], ids=["tied fp32", "untied bf16"])
def kind(request: pytest.FixtureRequest) -> tuple[bool, torch.dtype]:
    return request.param


@pytest.fixture
def folder(name: str, kind: tuple[bool, torch.dtype], tmp_path: Path) -> Path:
    """The model with weights that are sharp enough to have favourites."""
    config = type(CONFIGS[name]).from_dict({**CONFIGS[name].to_dict(), "tie_word_embeddings": kind[0]})
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    made.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def engine_of(folder: Path, dtype: torch.dtype) -> TorchEngine:
    model = load_causal_lm(str(folder), "actor", dtype)
    return TorchEngine(model, None, optimizer=OptimizerConfig(lr=1e-2), total_train_steps=5)


def requests() -> Iterator[GenRequest]:
    for slot, prompt in enumerate(PROMPTS):
        yield GenRequest(slot, prompt, seed=slot)


def streamed(engine: ContinuousGenerator) -> Outputs:
    """All prompts at once through the engine of asynchronous runs."""
    over: queue.Queue[tuple[int, Any]] = queue.Queue()
    for request in requests():
        engine.submit(
            request, GenConfig(max_new_tokens=SAMPLED), (), lambda result, slot=request.slot: over.put((slot, result))
        )
    told = dict(over.get(timeout=DEADLINE_S) for _ in PROMPTS)
    engine.free(range(len(PROMPTS)))
    outputs = [told[slot] for slot in range(len(PROMPTS))]
    assert all(isinstance(output, GenOutput) for output in outputs), outputs
    return outputs


def batch_of(outputs: Outputs) -> SequenceSample:
    rows = [prompt + output.token_ids for prompt, output in zip(PROMPTS, outputs, strict=True)]
    mask = [at >= len(prompt) for prompt, row in zip(PROMPTS, rows, strict=True) for at in range(len(row))]
    tensors = {
        "packed_input_ids": torch.tensor([token for row in rows for token in row]),
        "loss_mask": torch.tensor(mask),
    }
    lengths = [[len(row)] for row in rows]
    return SequenceSample.from_tensors([str(n) for n in range(len(rows))], tensors, dict.fromkeys(tensors, lengths))


def mismatch(engine: TorchEngine, outputs: Outputs) -> float:
    """Largest difference between the log-probabilities of sampled tokens and those that the trainer computes."""
    batch = batch_of(outputs)
    lengths = [size for sizes in batch.lengths("packed_input_ids").values.reshape(-1, 1).tolist() for size in sizes]
    wanted = torch.cat([part[1:] for part in batch["loss_mask"].split(lengths)])
    scored = engine.logprobs(batch, temperature=1.0, mb_spec=MicroBatchSpec())[wanted]
    sampled = torch.tensor([logprob for output in outputs for logprob in output.logprobs])
    assert len(sampled) == SAMPLED * len(PROMPTS)
    return float((scored - sampled).abs().max())


def in_plain_transformers(folder: Path, dtype: torch.dtype, outputs: Outputs) -> float:
    """The same difference for the first sequence, in a model that ``from_pretrained`` loads without us."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.tensor([PROMPTS[0] + outputs[0].token_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return float((logprobs[len(PROMPTS[0]) - 1 :] - torch.tensor(outputs[0].logprobs)).abs().max())


@pytest.mark.slow
def test_an_architecture_generates_trains_and_moves(
    name: str, kind: tuple[bool, torch.dtype], folder: Path, tmp_path: Path
) -> None:
    tied, dtype = kind
    bound = MISMATCH[dtype]
    engine = engine_of(folder, dtype)
    assert engine.generator().context_limit == CONTEXT.get(name, POSITIONS)
    assert (engine.model.get_output_embeddings().weight is engine.model.get_input_embeddings().weight) == tied
    before = engine.generator().generate(list(requests()), GenConfig(max_new_tokens=SAMPLED), stop_ids=(), seed=0)
    assert mismatch(engine, before) < bound
    with closing(ContinuousGenerator(load_causal_lm(str(folder), "actor", dtype))) as stream:
        assert mismatch(engine, streamed(stream)) < bound
        context = CallContext(step=0, seed=0, mb_spec=MicroBatchSpec(), run_dir=tmp_path)
        stats = SFTInterface().train_step(Model("actor", engine, None), batch_of(before), context)
        assert stats["grad_norm"] > 0 and not stats["skipped"]
        engine.version += 1
        assert mismatch(engine, before) > 2 * MISMATCH[torch.bfloat16], "the step was felt"
        stream.load_weights(1, engine.weights())
        after = streamed(stream)
    assert {version for output in after for version in output.versions} == {1}
    assert mismatch(engine, after) < bound
    engine.export_hf(tmp_path / "policy")
    assert in_plain_transformers(tmp_path / "policy", dtype, after) < bound
    engine.save_checkpoint(tmp_path / "checkpoint")
    resumed = engine_of(folder, dtype)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.version == 1
    held, kept = resumed.weights(), engine.weights()
    assert list(held) == list(kept) and all(torch.equal(held[key], kept[key]) for key in kept)
