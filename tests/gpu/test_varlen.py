"""Rows without padding on CUDA: the kernel of torch, and a whole trainer with it, beside the plain
computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training import packed_forward
from realhf.backends.training.varlen_attention import (
    build_packed_layout,
    find_kernel,
    reference_attention,
)
from tests.gpu.conftest import engine_of

pytestmark = pytest.mark.cuda_only
SPEC = MicroBatchSpec(1, 1024)


def loss(outputs: Any, part: SequenceSample) -> Any:
    return -outputs.logprobs()[0].sum() / 100, {}


def test_the_kernel_of_this_torch_is_proven_here(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip(find_kernel(device, torch.bfloat16)[1])
    found, reason = find_kernel(device, torch.bfloat16)
    assert found is not None, reason


@pytest.mark.parametrize("window", [None, 16], ids=["", "window"])
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_the_backward_pass_is_right_for_heads_of_every_width(
    device: torch.device, head_size: int, window: int | None
) -> None:
    """The kernel in bf16 beside dense attention in fp32, over sequences that share a prefix:
    outputs and gradients. A width that a device does not have is refused by name, and rows are
    padded there."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip(find_kernel(device, torch.bfloat16)[1])
    kernel, reason = find_kernel(device, torch.bfloat16, (head_size,))
    if kernel is None:
        assert f"for heads of {head_size}, " in reason
        pytest.skip(reason)
    draw = torch.Generator().manual_seed(head_size)
    paths = [
        np.arange(150),
        np.r_[np.arange(90), np.arange(150, 190)],
        np.r_[np.arange(90), np.arange(190, 400)],
    ]
    shapes = [(400, heads, head_size) for heads in (4, 2, 2, 4)]
    *given, weights = (torch.randn(*shape, generator=draw).to(device) for shape in shapes)
    found: list[list[torch.Tensor]] = []
    for each, dtype in ((kernel, torch.bfloat16), (reference_attention, torch.float32)):
        lay = build_packed_layout(paths, [0, 90, 90], each).to(device)
        inputs = [x.to(dtype).detach().requires_grad_() for x in given]
        output = lay.attend(inputs[0], inputs[1], inputs[2], window, head_size**-0.5)
        found.append([output, *torch.autograd.grad((output.float() * weights).sum(), inputs)])
    for what, ours, theirs in zip(("outputs", "queries", "keys", "values"), *found, strict=True):
        assert float((ours.float() - theirs).norm() / theirs.norm()) < 0.02, what


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
    if find_kernel(device, torch.bfloat16)[0] is None:
        pytest.skip(find_kernel(device, torch.bfloat16)[1])
    packed = engine_of(
        model_on(device, architecture, torch.bfloat16), gradient_checkpointing=checkpointing
    )
    assert packed._forward.packs
    monkeypatch.setattr(packed_forward, "find_kernel", lambda *_: (None, ""))
    padded = engine_of(
        model_on(device, architecture, torch.bfloat16), gradient_checkpointing=checkpointing
    )
    exact = engine_of(model_on(device, architecture, torch.float32))
    scores = [
        engine.logprobs(batch, temperature=1.0, mb_spec=SPEC) for engine in (packed, padded, exact)
    ]
    ours, theirs = ((one - scores[2]).abs().mean() for one in scores[:2])
    assert float(ours) < 2 * float(theirs) + 1e-3, "as close to fp32 as padded rows are"
    norms = [
        engine.train_batch(batch, loss, mb_spec=SPEC).grad_norm
        for engine in (packed, padded, exact)
    ]
    assert norms[0] == pytest.approx(norms[2], rel=max(0.03, 2 * abs(norms[1] / norms[2] - 1)))
