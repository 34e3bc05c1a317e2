"""Rows without padding on CUDA: the kernel of torch, and a whole trainer with it, beside the plain computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from realhf.api.config import OptimizerConfig
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training import packed_forward
from realhf.backends.training.torch_engine import TorchEngine
from realhf.backends.varlen.kernel import kernel_for

pytestmark = pytest.mark.cuda_only
SPEC = MicroBatchSpec(1, 1024)


def engine_of(model: Any, **options: Any) -> TorchEngine:
    return TorchEngine(model, None, optimizer=OptimizerConfig(lr=1e-3), total_train_steps=5, **options)


def loss(outputs: Any, part: SequenceSample) -> Any:
    return -outputs.logprobs()[0].sum() / 100, {}


def test_the_kernel_of_this_torch_is_proven_here(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip(kernel_for(device, torch.bfloat16)[1])
    found, reason = kernel_for(device, torch.bfloat16)
    assert found is not None, reason


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_packed_rows_train_as_padded_ones(
    device: torch.device,
    model_on: Callable[..., Any],
    batch: SequenceSample,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    checkpointing: bool,
) -> None:
    if kernel_for(device, torch.bfloat16)[0] is None:
        pytest.skip(kernel_for(device, torch.bfloat16)[1])
    packed = engine_of(model_on(device, architecture, torch.bfloat16), gradient_checkpointing=checkpointing)
    assert packed._forward.packs
    monkeypatch.setattr(packed_forward, "kernel_for", lambda *_: (None, ""))
    padded = engine_of(model_on(device, architecture, torch.bfloat16), gradient_checkpointing=checkpointing)
    exact = engine_of(model_on(device, architecture, torch.float32))
    scores = [engine.logprobs(batch, temperature=1.0, mb_spec=SPEC) for engine in (packed, padded, exact)]
    ours, theirs = ((one - scores[2]).abs().mean() for one in scores[:2])
    assert float(ours) < 2 * float(theirs) + 1e-3, "as close to fp32 as padded rows are"
    norms = [engine.train_batch(batch, loss, mb_spec=SPEC).grad_norm for engine in (packed, padded, exact)]
    assert norms[0] == pytest.approx(norms[2], rel=max(0.03, 2 * abs(norms[1] / norms[2] - 1)))
