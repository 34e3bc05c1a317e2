"""Generation and training share the memory of a device, and a shortage says what to lower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.api.config import GenConfig, OptimizerConfig
from realhf.api.model import ForwardOutputs, GenRequest
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.torch_engine import TorchEngine

pytestmark = pytest.mark.cuda_only
LIMIT_BYTES = 1 << 30


def mean_nll(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
    return -outputs.logprobs()[0].mean(), {}


@pytest.fixture
def one_gigabyte() -> Iterator[None]:
    """This process gets no more of the device's memory than that."""
    torch.cuda.set_per_process_memory_fraction(
        LIMIT_BYTES / torch.cuda.get_device_properties(0).total_memory
    )
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_training_gets_the_memory_of_generation(
    device: torch.device, model_on: Callable[..., Any], batch: SequenceSample
) -> None:
    engine = TorchEngine(model_on(device), None, optimizer=OptimizerConfig(), total_train_steps=9)
    seen = []

    def loss(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        seen.append((engine.generator().core.kv_bytes, torch.cuda.memory_allocated()))
        return mean_nll(outputs, part)

    def step() -> None:
        engine.train_batch(batch, loss, mb_spec=MicroBatchSpec(1, 512))
        engine.version += 1

    step()
    alone = seen[-1][1]
    requests = [GenRequest(slot, [5 + slot] * 300) for slot in range(64)]
    engine.generator().generate(requests, GenConfig(max_new_tokens=4), stop_ids=(), seed=1)
    filled = engine.generator().core.kv_bytes
    assert filled > 8 << 20
    step()
    assert seen[-1] == (0, pytest.approx(alone, abs=filled / 4)), (
        "a step needs no more memory after generation"
    )
    engine.generator().generate(requests, GenConfig(max_new_tokens=4), stop_ids=(), seed=1)
    held = torch.cuda.memory_reserved()
    engine.release_generation()
    assert torch.cuda.memory_reserved() < held, "another process on this GPU can have it"


def test_generation_without_memory_names_what_and_which_option(
    device: torch.device, model_on: Callable[..., Any], one_gigabyte: None
) -> None:
    engine = TorchEngine(model_on(device), None, kv_cache_gib=64.0)
    requests = [GenRequest(slot, [5] * 500) for slot in range(4096)]
    with pytest.raises(
        RuntimeError, match=r"keys and values of 4096 rows of \d+ tokens: lower engine.kv_cache_gib"
    ):
        engine.generator().generate(requests, GenConfig(max_new_tokens=4), stop_ids=(), seed=1)
    (output,) = engine.generator().generate(
        requests[:1], GenConfig(max_new_tokens=4), stop_ids=(), seed=1
    )
    assert len(output.token_ids) == 4, "the engine goes on"


def test_a_step_without_memory_names_what_where_and_which_option(
    device: torch.device, model_on: Callable[..., Any], one_gigabyte: None
) -> None:
    engine = TorchEngine(model_on(device), None, optimizer=OptimizerConfig(), total_train_steps=1)
    n = 400 * 500
    ids = torch.randint(3, 500, (n,), generator=torch.Generator().manual_seed(1))
    sample = SequenceSample.from_tensors(
        ["long"], {"packed_input_ids": ids}, {"packed_input_ids": [[500] * 400]}
    )
    with pytest.raises(
        RuntimeError, match=r"micro-batch of \d+ positions in \d+ rows: lower mb_spec"
    ) as caught:
        engine.train_batch(sample, mean_nll, mb_spec=MicroBatchSpec(1, n))
    assert f"it is {n}" in str(caught.value) and "gradient_checkpointing" in str(caught.value)
    caught = None  # It holds the tensors of the failed pass.
    result = engine.train_batch(sample, mean_nll, mb_spec=MicroBatchSpec(1, 2048))
    assert not result.skipped, "with less of it the step is taken"
