"""Train steps on a pretended GPU: no devices mixed, no slow products, no more waits than written
down here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from realhf.algorithms.critic import CriticInterface
from realhf.algorithms.inference import LogprobInterface
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.preference import DPOInterface
from realhf.algorithms.sft import SFTInterface
from realhf.api.config import LoraConfig
from realhf.api.model import CallContext, Model
from realhf.backends.pretended.device import PretendedDevice, StepLimits
from realhf.backends.training.torch_backend import ValueModel
from realhf.backends.training.torch_engine import TorchEngine
from tests.pretended.conftest import CLIPPED, Build, allocate_moments, rollouts

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
FP32 = torch.float32
LORA = LoraConfig(4, 8.0)
SCORING = StepLimits(fp32_products=False, syncs=1, kept_bytes=0)
"""A scoring pass copies its result to the host."""
OFF_POLICY = {"use_decoupled_loss": True}
OBJECTIVES: Mapping[str, tuple[dict[str, Any], int]] = {
    "grpo": ({}, 15),
    "kl": ({"kl_loss_coef": 0.01}, 16),
    "entropy": ({"entropy_coef": 0.01}, 16),
    "sequence ratio": ({"ratio": "sequence"}, 15),
    "cispo": ({"loss": "cispo"}, 15),
    "reinforce": ({"loss": "reinforce"}, 15),
    "log-linear": ({**OFF_POLICY, "prox_logp_method": "loglinear"}, 28),
    "masked": ({**OFF_POLICY, "behav_imp_weight_mode": "mask"}, 28),
    "truncated": ({**OFF_POLICY, "behav_imp_weight_mode": "truncate"}, 28),
    "sequences": (
        {**OFF_POLICY, "behav_imp_weight_mode": "mask", "behav_imp_weight_level": "sequence"},
        29,
    ),
}
"""Options of the policy gradient, and the waits of a micro-batch, those of the step included."""


def limits(dtype: torch.dtype, syncs: int) -> StepLimits:
    """No fp32 products in a step of bf16 weights, and nothing in use after it that was not
    before."""
    return StepLimits(fp32_products=dtype == FP32, syncs=syncs, kept_bytes=0)


def most_waits(gpu: PretendedDevice) -> int:
    return max(micro_batch.total() for micro_batch in gpu.micro_batches)


def actor(engine: TorchEngine) -> Model:
    return Model("actor", engine, None)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_grpo_with_two_minibatches(
    gpu: PretendedDevice, engine_on: Build, context: CallContext, architecture: str, dtype: Any
) -> None:
    engine = engine_on(architecture, dtype)
    train = PolicyGradientInterface({"ppo_n_minibatches": 2})
    with gpu.limit(limits(dtype, syncs=13)):
        stats = train.train_step(actor(engine), rollouts(), context)
    assert stats["n_updates"] == 2 and stats["lr"] > 0
    assert most_waits(gpu) == 13


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_of_the_policy_gradient(
    gpu: PretendedDevice, engine_on: Build, context: CallContext, objective: str
) -> None:
    options, syncs = OBJECTIVES[objective]
    sample = rollouts(packed_ref_logprobs=-1.0, proximal_logprobs=-1.0)
    engine = engine_on()
    with gpu.limit(limits(BF16, syncs=syncs)):
        stats = PolicyGradientInterface(options).train_step(actor(engine), sample, context)
    assert stats["n_updates"] == 1 and most_waits(gpu) == syncs


def test_scores_of_the_reference(
    gpu: PretendedDevice, engine_on: Build, context: CallContext
) -> None:
    engine = engine_on(optimizer=None)
    with gpu.limit(SCORING):
        scored, _ = LogprobInterface().inference(Model("ref", engine, None), rollouts(), context)
    assert scored["packed_ref_logprobs"].device.type == "cpu"


def test_ppo_with_a_critic(
    gpu: PretendedDevice, model_on: Any, engine_on: Build, context: CallContext
) -> None:
    value_model = ValueModel(model_on())
    critic = TorchEngine(value_model, None, optimizer=CLIPPED, total_train_steps=10, role="critic")
    allocate_moments(critic)
    gpu.watch(value_model)
    interface = CriticInterface({"adv_estimator": "gae"}, {"value_norm": True, "value_clip": 0.2})
    with gpu.limit(SCORING):
        scored, _ = interface.inference(Model("critic", critic, None), rollouts(), context)
    sample = rollouts(values=0.1)
    assert scored["values"].shape == sample["values"].shape
    with gpu.limit(limits(BF16, syncs=4)):
        stats = interface.train_step(Model("critic", critic, None), sample, context)
    assert stats["n_updates"] == 1
    train = PolicyGradientInterface({"adv_estimator": "gae"})
    engine = engine_on()
    with gpu.limit(limits(BF16, syncs=13)):
        assert train.train_step(actor(engine), sample, context)["n_updates"] == 1


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_dpo_and_supervised_steps(
    gpu: PretendedDevice, engine_on: Build, context: CallContext, architecture: str
) -> None:
    engine = engine_on(architecture)
    sample = rollouts(packed_ref_logprobs=-1.0)
    with gpu.limit(limits(BF16, syncs=2)):
        stats = DPOInterface().train_step(actor(engine), sample, context)
    assert stats["n_updates"] == 1
    with gpu.limit(limits(BF16, syncs=4)):
        stats = SFTInterface().train_step(actor(engine), sample, context)
    assert stats["lr"] > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_adapters_train_and_their_base_scores(
    gpu: PretendedDevice, engine_on: Build, context: CallContext, dtype: torch.dtype
) -> None:
    engine = engine_on("qwen3", dtype, lora=LORA)
    with gpu.limit(StepLimits(syncs=13, kept_bytes=0)):
        stats = PolicyGradientInterface().train_step(actor(engine), rollouts(), context)
    assert stats["n_updates"] == 1
    assert all(tensor.is_cuda for tensor in engine.weights().values())
    with gpu.limit(StepLimits(syncs=1, kept_bytes=0)):
        engine.base().logprobs(rollouts(), temperature=1.0, mb_spec=context.mb_spec)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapters"])
def test_checkpointing_needs_less_memory(
    gpu: PretendedDevice, engine_on: Build, context: CallContext, lora: LoraConfig | None
) -> None:
    peaks = []
    for checkpointing in (False, True):
        engine = engine_on("llama", gradient_checkpointing=checkpointing, lora=lora)
        held = gpu.live_bytes
        gpu.peak_bytes = held
        with gpu.limit(StepLimits(fp32_products=lora is not None, syncs=13, kept_bytes=0)):
            PolicyGradientInterface().train_step(actor(engine), rollouts(), context)
        peaks.append(gpu.peak_bytes - held)
    assert peaks[1] < 0.85 * peaks[0], peaks
