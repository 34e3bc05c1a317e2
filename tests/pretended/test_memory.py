"""Memory and waits of what surrounds a step on a pretended GPU: what a micro-batch leaves, scoring,
generation before training, and the ways that weights take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.algorithms.inference import LogprobInterface
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.api.config import GenConfig, LoraConfig
from realhf.api.model import CallContext, GenRequest, Model
from realhf.api.sample import MicroBatchSpec
from realhf.backends.embedded.weight_copy import collect_weights, copy_weights, digest_weights
from realhf.backends.pretended.device import PretendedDevice, StepLimits
from realhf.backends.pretended.tensor import CUDA
from realhf.backends.vllm.device_transfer import ServerGpu, transfer_calls
from realhf.transport.weights import WeightPublisher, receive
from tests.pretended.conftest import Build, rollouts

pytestmark = pytest.mark.slow
LORA = LoraConfig(4, 8.0)
SCALAR = 512
"""Bytes of a scalar, as torch's allocator rounds them: the loss of a micro-batch is still there
when the next one begins."""
INPUTS = (
    "realhf/backends/training/packed_forward.py",
    "realhf/backends/training/varlen_attention.py",
    "realhf/backends/embedded/attention.py",
)
"""Files that copy the inputs of the next micro-batch to the GPU before it begins."""
ROTATION = "realhf/backends/embedded/forward_pass.py"
"""File whose tables of the rotary embedding stay for the next generation."""
KV_CACHE = "realhf/backends/embedded/kv_cache.py"


def lines_of(held: Counter[str]) -> str:
    """Text about bytes by line, for messages."""
    return ", ".join(f"{size} at {line}" for line, size in held.most_common(8))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapters"])
def test_a_micro_batch_leaves_its_loss_only(
    gpu: PretendedDevice, engine_on: Build, lora: LoraConfig | None
) -> None:
    engine = engine_on(lora=lora)
    context = CallContext(0, 1, MicroBatchSpec(5, 512), Path())
    sample = rollouts(packed_ref_logprobs=-1.0, proximal_logprobs=-1.0)
    options = {"use_decoupled_loss": True, "behav_imp_weight_mode": "mask", "kl_loss_coef": 0.01}
    with gpu.limit(StepLimits(kept_bytes=0)):
        PolicyGradientInterface(options).train_step(Model("actor", engine, None), sample, context)
    optimizer = engine.optimizer
    assert optimizer is not None
    sums = sum(-(-4 * master.numel() // SCALAR) * SCALAR for master in optimizer.masters)
    for left, allowed in zip(gpu.left, [sums, 0, 0, 0], strict=True):
        own = Counter({line: n for line, n in left.items() if not line.startswith(INPUTS)})
        assert own.total() <= allowed + SCALAR, lines_of(own)


def test_scoring_keeps_no_activations(
    gpu: PretendedDevice, engine_on: Build, context: CallContext
) -> None:
    peaks: list[Counter[str]] = []
    for options in ({"optimizer": None}, {}):
        engine = engine_on(**options)
        before = gpu.allocated_since(0)
        gpu.reset_peak()
        with gpu.limit(StepLimits(fp32_products=False, syncs=1, kept_bytes=0)):
            scores = LogprobInterface().inference(Model("ref", engine, None), rollouts(), context)
        assert not scores[0]["packed_ref_logprobs"].requires_grad
        peaks.append(gpu.peak_by_line - before)
        del engine
    frozen, trained = peaks
    assert trained.total() <= frozen.total(), lines_of(trained - frozen)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapters"])
def test_a_step_frees_what_generation_holds(
    gpu: PretendedDevice, engine_on: Build, context: CallContext, lora: LoraConfig | None
) -> None:
    engine = engine_on(lora=lora, watched=False)
    before = gpu.mark()
    request = GenRequest(0, [5, 6, 7] * 20, seed=1)
    engine.generator().generate([request], GenConfig(max_new_tokens=2), stop_ids=(), seed=0)
    held = gpu.allocated_since(before)
    assert any(line.startswith(KV_CACHE) for line in held), lines_of(held)
    seen: list[Counter[str]] = []
    engine.model.get_decoder().register_forward_pre_hook(
        lambda *_: seen.append(gpu.allocated_since(before))
    )
    PolicyGradientInterface().train_step(Model("actor", engine, None), rollouts(), context)
    assert seen[0].total() < held.total() and not any(
        line.startswith((KV_CACHE, "realhf/backends/training/lora.py")) for line in seen[0]
    ), lines_of(seen[0])
    left = gpu.allocated_since(before)
    others = [line for line in left if not line.startswith(ROTATION)]
    assert not others and left.total() <= 16 * SCALAR, lines_of(left)


def test_publishing_waits_twice_a_tensor_and_keeps_nothing(
    gpu: PretendedDevice, model_on: Callable[..., Any], engine_on: Build, tmp_path: Path
) -> None:
    engine = engine_on()
    gpu.syncs.clear()
    weights = engine.weights()
    assert not gpu.syncs, gpu.syncs
    publisher = WeightPublisher("run", "trainer", tmp_path)
    publisher.publish(0, weights)  # which makes the keys of the digests on the device
    gpu.syncs.clear()
    gpu.reset_peak()
    with gpu.limit(StepLimits(kept_bytes=0)):
        manifest = publisher.publish(1, weights)
    assert gpu.syncs.total() == 2 * len(weights), gpu.syncs
    received = receive(manifest, 10.0)
    publisher.close()
    assert {name: t.shape for name, t in received.items()} == {
        name: t.shape for name, t in weights.items()
    }
    other = model_on()
    gpu.syncs.clear()
    with gpu.limit(StepLimits(kept_bytes=0)):
        copy_weights(other, received)
    assert not gpu.syncs, gpu.syncs
    assert collect_weights(other).keys() == weights.keys()
    assert all(parameter.requires_grad for parameter in other.parameters())
    assert {*digest_weights(other, [*weights])} == {*weights}


def test_chunks_for_a_server_on_the_same_gpu_are_there_and_freed(
    gpu: PretendedDevice, engine_on: Build
) -> None:
    weights = engine_on().weights()
    gpu.syncs.clear()
    gpu.uploads.clear()
    buffers: list[torch.device] = []

    def export(buffer: torch.Tensor) -> list[Any]:
        buffers.append(buffer.device)
        return [buffer.dtype, buffer.device]

    largest = max(tensor.nbytes for tensor in weights.values())
    gpus = [ServerGpu(CUDA, "GPU-0")]
    with gpu.limit(StepLimits(kept_bytes=0)):
        mark = gpu.mark()
        with transfer_calls(1, weights, gpus, max_bytes=largest, export=export) as calls:
            names = [
                name for call, chunk in calls if call == "take_chunk" for name in chunk["names"]
            ]
            held = gpu.allocated_since(mark)
            assert not gpu.refused, gpu.refused
            assert not gpu.syncs, gpu.syncs
            assert largest <= held.total() < largest + SCALAR, lines_of(held)
        del calls
    assert sorted(names) == sorted(weights)
    assert buffers == [CUDA]
    assert not gpu.syncs and not gpu.uploads, (gpu.syncs, gpu.uploads)
    with transfer_calls(2, weights, gpus, max_bytes=largest, export=export) as calls:
        assert [next(calls)[0], next(calls)[0]] == ["begin_transfer", "take_chunk"]
    left = gpu.allocated_since(mark)  # while the calls of a server that failed are still there
    assert not left, lines_of(left)
