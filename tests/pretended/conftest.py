"""Tests on a pretended GPU: what a real one refuses or does slowly is refused here, with the line.

They show devices, dtypes, waits and memory; numbers, kernels and NCCL need a GPU (``make
test-gpu``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from realhf.api.config import OptimizerConfig
from realhf.api.model import CallContext
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.pretended.device import PretendedDevice
from realhf.backends.pretended.pretending import pretend_gpu
from realhf.backends.training.selected_logprobs import supports_bf16_products
from realhf.backends.training.torch_engine import TorchEngine
from tests.gpu.conftest import CONFIGS, VOCABULARY

SPEC = MicroBatchSpec(1, 512)
CLIPPED = OptimizerConfig(lr=1e-3, gradient_clipping=1e-7)
"""Clips every gradient: norms read as 1e-6."""
Build = Callable[..., TorchEngine]


@pytest.fixture
def gpu() -> Iterator[PretendedDevice]:
    with pretend_gpu() as device:
        yield device


@pytest.fixture
def model_on(gpu: PretendedDevice) -> Callable[..., Any]:
    """model_on(architecture, dtype): a model of two layers on the pretended device."""

    def build(architecture: str = "qwen3", dtype: torch.dtype = torch.bfloat16) -> Any:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIGS[architecture], dtype=dtype).eval()
        gpu.place(model)
        return model

    return build


@pytest.fixture
def engine_on(
    gpu: PretendedDevice, model_on: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> Build:
    """engine_on(architecture, dtype, **options): its engine, which has its moments, as after a
    step. With ``watched``, its micro-batches are counted, by a hook with which it does not generate
    as fast as it can."""

    def build(
        architecture: str = "qwen3",
        dtype: torch.dtype = torch.bfloat16,
        optimizer: OptimizerConfig | None = CLIPPED,
        watched: bool = True,
        **options: Any,
    ) -> TorchEngine:
        begin = gpu.mark()
        model = model_on(architecture, dtype)
        engine = TorchEngine(model, None, optimizer=optimizer, total_train_steps=10, **options)
        # What goes wrong in a trial is no error: rows are padded, or the head counts as unknown.
        assert not gpu.refused, gpu.refused
        assert engine._forward.heads.language is not None
        assert engine._forward.packs == (dtype == torch.bfloat16), caplog.text
        allocate_moments(engine)
        own = [*model.parameters(), *model.buffers()]
        if (trained := engine.optimizer) is not None:
            names = {parameter: str(i) for i, parameter in enumerate(trained.parameters)}
            own += trained.tensors(names).values()
        kept = gpu.allocated_since(begin, besides=own)
        assert not kept, f"trials of a new engine leave {kept}"
        supports_bf16_products(engine.model.device)  # which the first step of a process finds out
        if watched:
            gpu.watch(model)
        return engine

    return build


def allocate_moments(engine: TorchEngine) -> None:
    """Allocate the moments of the optimizer, as its first step does."""
    if (optimizer := engine.optimizer) is not None:
        optimizer.reset_moments({*optimizer.parameters})


@pytest.fixture
def context() -> CallContext:
    return CallContext(0, 1, SPEC, Path())


def rollouts(**extra: float) -> SequenceSample:
    """Two groups of rollouts that begin alike, half of whose tokens train, with the rewards and
    log-probabilities of a step; ``extra`` are further keys, which have a value at every predicted
    token."""
    g = torch.Generator().manual_seed(5)
    rows: list[torch.Tensor] = []
    for n in (190, 161):
        stem = torch.randint(3, VOCABULARY, (n,), generator=g)
        rows += [
            torch.cat([stem, torch.randint(3, VOCABULARY, (m,), generator=g)]) for m in (37, 12, 55)
        ]
    tokens = [[len(row) for row in rows[:3]], [len(row) for row in rows[3:]]]
    predicted = [[n - 1 for n in group] for group in tokens]
    n_predicted = sum(map(sum, predicted))
    n_tokens = n_predicted + len(rows)
    tensors = {
        "packed_input_ids": torch.cat(rows),
        "loss_mask": torch.rand(n_tokens, generator=g) < 0.5,
        "packed_logprobs": -torch.rand(n_predicted, generator=g),
        "packed_versions": torch.zeros(n_predicted, dtype=torch.int32),
        "rewards": torch.rand(len(rows), generator=g),
        **{name: torch.full((n_predicted,), value) for name, value in extra.items()},
    }
    lengths = {n_tokens: tokens, n_predicted: predicted, len(rows): [[1, 1, 1], [1, 1, 1]]}
    return SequenceSample.from_tensors(
        ["a", "b"], tensors, {name: lengths[len(tensor)] for name, tensor in tensors.items()}
    )
