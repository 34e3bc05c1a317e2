"""Small random models of every architecture that is promised: they generate, train, take weights,
save and load.

Generation from cached rows and the trainer's packed forward pass must give the same
log-probabilities, before and after an update, and plain transformers the same again.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from realhf.algorithms.sft import SFTInterface
from realhf.api.config import GenConfig, OptimizerConfig
from realhf.api.model import CallContext, GenOutput, GenRequest, Model
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded.continuous_batching import ContinuousGenerator
from realhf.backends.training.torch_backend import load_causal_lm
from realhf.backends.training.torch_engine import TorchEngine
from tests.backends.architectures import (
    KINDS,
    MISMATCH,
    configs,
    kind_name,
    long_context,
    save_model,
)

POSITIONS = 64
SAMPLED = 12
DEADLINE_S = 120.0
CONFIGS = configs(97, POSITIONS, window=8)
CONTEXT = {"phi3": long_context(POSITIONS), "llama, one key head": 4 * POSITIONS}
PROMPTS = [[5, 6, 7] * 9, [8, 9, 8], [9, 10, 11, 12]]
Outputs = Sequence[GenOutput]


@pytest.fixture(params=sorted(CONFIGS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=KINDS, ids=kind_name)
def kind(request: pytest.FixtureRequest) -> tuple[bool, torch.dtype]:
    return request.param


@pytest.fixture
def folder(name: str, kind: tuple[bool, torch.dtype], tmp_path: Path) -> Path:
    save_model(CONFIGS[name], kind[0], tmp_path / "model")
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
            request,
            GenConfig(max_new_tokens=SAMPLED),
            (),
            lambda result, slot=request.slot: over.put((slot, result)),
        )
    told = dict(over.get(timeout=DEADLINE_S) for _ in PROMPTS)
    engine.free(range(len(PROMPTS)))
    outputs = [told[slot] for slot in range(len(PROMPTS))]
    assert all(isinstance(output, GenOutput) for output in outputs), outputs
    return outputs


def batch_of(outputs: Outputs) -> SequenceSample:
    rows = [prompt + output.token_ids for prompt, output in zip(PROMPTS, outputs, strict=True)]
    mask = [
        at >= len(prompt)
        for prompt, row in zip(PROMPTS, rows, strict=True)
        for at in range(len(row))
    ]
    tensors = {
        "packed_input_ids": torch.tensor([token for row in rows for token in row]),
        "loss_mask": torch.tensor(mask),
    }
    lengths = [[len(row)] for row in rows]
    return SequenceSample.from_tensors(
        [str(n) for n in range(len(rows))], tensors, dict.fromkeys(tensors, lengths)
    )


def mismatch(engine: TorchEngine, outputs: Outputs) -> float:
    """Largest difference between the log-probabilities of sampled tokens and those that the trainer
    computes."""
    batch = batch_of(outputs)
    lengths = [
        size
        for sizes in batch.lengths("packed_input_ids").values.reshape(-1, 1).tolist()
        for size in sizes
    ]
    wanted = torch.cat([part[1:] for part in batch["loss_mask"].split(lengths)])
    scored = engine.logprobs(batch, temperature=1.0, mb_spec=MicroBatchSpec())[wanted]
    sampled = torch.tensor([logprob for output in outputs for logprob in output.logprobs])
    assert len(sampled) == SAMPLED * len(PROMPTS)
    return float((scored - sampled).abs().max())


def in_plain_transformers(folder: Path, dtype: torch.dtype, outputs: Outputs) -> float:
    """The same difference for the first sequence, in a model that ``from_pretrained`` loads without
    us."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.tensor([PROMPTS[0] + outputs[0].token_ids])
    with torch.no_grad():
        logprobs = (
            model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        )
    return float((logprobs[len(PROMPTS[0]) - 1 :] - torch.tensor(outputs[0].logprobs)).abs().max())


@pytest.mark.nightly
@pytest.mark.slow
def test_an_architecture_generates_trains_and_moves(
    name: str, kind: tuple[bool, torch.dtype], folder: Path, tmp_path: Path
) -> None:
    tied, dtype = kind
    bound = MISMATCH[dtype]
    engine = engine_of(folder, dtype)
    assert engine.generator().context_limit == CONTEXT.get(name, POSITIONS)
    assert (
        engine.model.get_output_embeddings().weight is engine.model.get_input_embeddings().weight
    ) == tied
    before = engine.generator().generate(
        list(requests()), GenConfig(max_new_tokens=SAMPLED), stop_ids=(), seed=0
    )
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
    held = resumed.weights()
    kept = engine.weights()
    assert list(held) == list(kept) and all(torch.equal(held[key], kept[key]) for key in kept)
