"""Adapters train on a GPU as on the CPU, and reach what generates; moments rest in the memory of
the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from realhf.api.config import GenConfig, LoraConfig, OptimizerConfig
from realhf.api.model import GenRequest
from realhf.api.sample import SequenceSample
from realhf.backends.training.optimizer import HostMemory, OffloadedMoments
from realhf.backends.training.torch_engine import TorchEngine
from tests.gpu.conftest import SPEC, train


def engine_of(model: Any, rank: int = 0, **options: Any) -> TorchEngine:
    torch.manual_seed(5)
    lora = LoraConfig(rank, 16.0) if rank else None
    return TorchEngine(
        model, None, optimizer=OptimizerConfig(lr=1e-3, **options), total_train_steps=10, lora=lora
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_train_and_what_samples_has_them(
    device: torch.device, model_on: Callable[..., Any], batch: SequenceSample, dtype: torch.dtype
) -> None:
    pytest.importorskip("peft", reason="adapters need the extra lora")
    engine = engine_of(model_on(device, dtype=dtype), rank=8)
    reference = engine.base().logprobs(batch, temperature=1.0, mb_spec=SPEC)
    losses = train(engine, batch, 6)
    assert losses[-1] < losses[0]
    assert torch.equal(engine.base().logprobs(batch, temperature=1.0, mb_spec=SPEC), reference)
    prompt = [5, 6, 7, 8]
    output = engine.generator().generate(
        [GenRequest(0, prompt, seed=1)], GenConfig(max_new_tokens=24), stop_ids=(), seed=1
    )[0]
    ids = torch.tensor([*prompt, *output.token_ids])
    sample = SequenceSample.from_tensors(
        ["s"], {"packed_input_ids": ids}, {"packed_input_ids": [[len(ids)]]}
    )
    scored = engine.logprobs(sample, temperature=1.0, mb_spec=SPEC)[len(prompt) - 1 :]
    off = (scored - torch.tensor(output.logprobs)).abs().mean()
    assert float(off) < (1e-3 if dtype == torch.float32 else 0.05)


@pytest.mark.cuda_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_in_the_memory_of_the_host_change_no_bit_and_free_the_device(
    device: torch.device, model_on: Callable[..., Any], batch: SequenceSample, dtype: torch.dtype
) -> None:
    losses = []
    held = []
    for offload in (False, True):
        before = torch.cuda.memory_allocated()
        engine = engine_of(model_on(device, dtype=dtype), offload=offload)
        losses.append(train(engine, batch, 3))
        held.append(torch.cuda.memory_allocated() - before)
        weights = sum(tensor.numel() for tensor in engine.weights().values())
        if offload:
            _lies_in_one_pinned_slab(engine)
        del engine
        torch.cuda.empty_cache()
    assert losses[0] == losses[1]
    assert held[0] - held[1] > 0.9 * 8 * weights, "two moments of four bytes for each weight"


def _lies_in_one_pinned_slab(engine: TorchEngine) -> None:
    assert engine._optimizer is not None
    names = {parameter: name for name, parameter in engine.model.named_parameters()}
    moments = [
        t for name, t in engine._optimizer.tensors(names).items() if name.startswith("exp_avg")
    ]
    assert moments and all(tensor.is_pinned() for tensor in moments)
    assert len({tensor.untyped_storage().data_ptr() for tensor in moments}) == 1
    slab = moments[0].untyped_storage().nbytes()
    needed = sum(tensor.nbytes for tensor in moments)
    assert needed <= slab <= needed + 256 * len(moments), "not rounded up to a power of two"


@pytest.mark.cuda_only
def test_pieces_of_moments_move_while_others_are_computed(device: torch.device) -> None:
    """Many small pieces, whose copies are begun without waiting for each other, change no bit."""
    found = []
    for memory in (None, HostMemory(device)):
        torch.manual_seed(0)
        weights = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.randn(512, 300 + 7 * n)) for n in range(12)]
        )
        weights = weights.to(device)
        adamw = torch.optim.AdamW(weights.parameters(), lr=1e-2, fused=True)
        stepped = adamw if memory is None else OffloadedMoments(adamw, memory, piece_bytes=3 << 20)
        for _ in range(5):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            stepped.step()
        found.append(torch.cat([weight.detach().reshape(-1) for weight in weights]))
    assert torch.equal(*found)
