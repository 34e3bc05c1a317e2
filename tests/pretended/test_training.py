"""Train steps on a pretended GPU: no devices mixed, no slow products, no more waits than written
down here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.api.model import CallContext, Model
from realhf.backends.pretended.device import PretendedDevice, StepLimits
from tests.pretended.conftest import Build, rollouts

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
FP32 = torch.float32


def limits(dtype: torch.dtype, syncs: int) -> StepLimits:
    """No fp32 products in a step of bf16 weights."""
    return StepLimits(fp32_products=dtype == FP32, syncs=syncs)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_grpo_with_two_minibatches(
    gpu: PretendedDevice, engine_on: Build, context: CallContext, architecture: str, dtype: Any
) -> None:
    engine = engine_on(architecture, dtype)
    train = PolicyGradientInterface({"ppo_n_minibatches": 2})
    with gpu.limit(limits(dtype, syncs=13)):
        stats = train.train_step(Model("actor", engine, None), rollouts(), context)
    assert stats["n_updates"] == 2 and stats["lr"] > 0
    assert max(each.total() for each in gpu.micro_batches) == 13
