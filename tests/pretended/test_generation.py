"""Generation, published weights and checkpoints on a pretended GPU."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from realhf.algorithms.sft import SFTInterface
from realhf.api.config import GenConfig, LoraConfig
from realhf.api.model import CallContext, GenOutput, GenRequest, Model
from realhf.backends.embedded import forward_pass
from realhf.backends.embedded.continuous_batching import ContinuousGenerator
from realhf.backends.embedded.forward_pass import FastDecoder
from realhf.backends.embedded.kv_cache import RowCache
from realhf.backends.pretended.device import PretendedDevice, StepLimits
from realhf.backends.pretended.pretending import pretend_gpu
from realhf.backends.pretended.tensor import CUDA
from tests.gpu.conftest import CONFIGS
from tests.pretended.conftest import Build, rollouts

pytestmark = pytest.mark.slow
PROMPTS = [[5, 6, 7] * 20, [8, 9, 8], [9, 10, 11, 12] * 5]
GEN = GenConfig(max_new_tokens=6, top_p=0.9, top_k=40)
DEADLINE_S = 120.0
ADAPTERS = "realhf/backends/training/lora.py"
WAITS = 2
"""Waits for the GPU per token: the tokens and their log-probabilities are copied to the host."""
WAITS_OF_A_MERGE = (4, 2)
"""Waits when adapters are merged: per layer, whose worst element is looked for and read, and for
the distances of the hidden states. Those of the model's own code are not counted."""


def requests() -> list[GenRequest]:
    return [GenRequest(slot, prompt, seed=slot) for slot, prompt in enumerate(PROMPTS)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_the_embedded_engine_waits_twice_a_token(
    gpu: PretendedDevice, engine_on: Build, architecture: str
) -> None:
    engine = engine_on(architecture, watched=False)
    engine.generator().generate(requests(), GEN, stop_ids=(), seed=0)
    fast = architecture != "gpt2"
    assert isinstance(engine.generator().core._forward(), FastDecoder) == fast
    before = gpu.syncs.total()
    with gpu.limit(StepLimits(fp32_products=False)):
        outputs = engine.generator().generate(requests(), GEN, stop_ids=(), seed=0)
    assert gpu.syncs.total() - before == WAITS * GEN.max_new_tokens, gpu.syncs
    assert [len(output.token_ids) for output in outputs] == [GEN.max_new_tokens] * len(PROMPTS)


def test_the_fast_decoder_takes_tensors_of_a_pretended_gpu_only_where_there_is_one() -> None:
    assert {*forward_pass.PLAIN_TENSORS} == {torch.Tensor}
    with pretend_gpu() as gpu:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"], dtype=torch.bfloat16)
        gpu.place(model)
        with torch.inference_mode():
            assert forward_pass.build_fast_decoder(model, RowCache()) is not None
    assert {*forward_pass.PLAIN_TENSORS} == {torch.Tensor}
    assert forward_pass.build_fast_decoder(model, RowCache()) is None


def test_merged_adapters_generate(gpu: PretendedDevice, engine_on: Build) -> None:
    engine = engine_on(lora=LoraConfig(4, 8.0), watched=False)
    adapters = engine.adapters
    assert adapters is not None
    gpu.syncs.clear()
    engine.weights()
    per_layer, of_states = WAITS_OF_A_MERGE
    own = [n for line, n in gpu.syncs.items() if "transformers/" not in line]
    assert sum(own) == per_layer * len(adapters.names) + of_states, gpu.syncs
    gpu.syncs.clear()
    assert adapters.tensors() and engine.weights()
    assert not gpu.syncs, gpu.syncs
    outputs = engine.generator().generate(requests(), GEN, stop_ids=(), seed=0)
    assert all(output.token_ids for output in outputs)


def streamed(engine: ContinuousGenerator) -> list[GenOutput]:
    over: queue.Queue[Any] = queue.Queue()
    for request in requests():
        engine.submit(request, GEN, (), over.put)
    outputs = [over.get(timeout=DEADLINE_S) for _ in PROMPTS]
    assert all(isinstance(output, GenOutput) for output in outputs), outputs
    return outputs


def test_the_streaming_engine_takes_published_weights(
    gpu: PretendedDevice, model_on: Callable[..., Any], engine_on: Build, context: CallContext
) -> None:
    engine = engine_on()
    with closing(ContinuousGenerator(model_on())) as stream:
        streamed(stream)
        SFTInterface().train_step(Model("actor", engine, None), rollouts(), context)
        engine.version = 1
        published = {name: tensor.cpu() for name, tensor in engine.weights().items()}
        uploads = gpu.uploads.total()
        stream.load_weights(1, published)
        assert gpu.uploads.total() - uploads == len(published)
        assert {version for output in streamed(stream) for version in output.versions} == {1}
        held = stream.weight_digests([*published])
    assert held.keys() == published.keys()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lora", [None, LoraConfig(4, 8.0)], ids=["full", "adapters"])
def test_a_checkpoint_goes_on(
    gpu: PretendedDevice,
    engine_on: Build,
    context: CallContext,
    tmp_path: Path,
    lora: LoraConfig | None,
) -> None:
    engine = engine_on(lora=lora)
    train = SFTInterface()
    train.train_step(Model("actor", engine, None), rollouts(), context)
    engine.version = 1
    engine.save_checkpoint(tmp_path / "state")
    engine.export_hf(tmp_path / "policy")
    other = engine_on(lora=lora)
    mark = gpu.mark()
    other.weights()
    other.load_checkpoint(tmp_path / "state")
    assert other.version == 1
    merged = [line for line in gpu.allocated_since(mark) if line.startswith(ADAPTERS)]
    assert not merged, f"weights merged before other adapters were loaded: {merged}"
    assert all(tensor.device == CUDA for tensor in other.weights().values())
    with gpu.limit(StepLimits(fp32_products=lora is not None)):
        assert train.train_step(Model("actor", other, None), rollouts(), context)["lr"] > 0
