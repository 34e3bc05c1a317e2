"""What the training server does with an engine, on a pretended GPU: gradients added up, steps with
options of their own, digests."""

from __future__ import annotations

import pytest
from torch import Tensor

from realhf.algorithms.train_step import PredictedTokens
from realhf.api.config import LoraConfig, OptimizerConfig
from realhf.api.model import ForwardOutputs
from realhf.api.sample import SequenceSample
from realhf.backends.pretended.device import PretendedDevice, StepLimits
from realhf.base.tensor_digest import digest_tensors
from realhf.tinker.losses import LOSSES, find_loss
from tests.pretended.conftest import SPEC, Build, rollouts

pytestmark = pytest.mark.slow


class ServedLoss:
    """A loss that a client names, on the rollouts of these tests."""

    def __init__(self, name: str) -> None:
        self._loss, self._settings = find_loss(name, {})

    def __call__(
        self, outputs: ForwardOutputs, part: SequenceSample
    ) -> tuple[Tensor, dict[str, float]]:
        tokens = PredictedTokens.from_sample(part)
        logprobs, _ = outputs.logprobs()
        device = logprobs.device
        inputs = {
            "weights": tokens.mask.float().to(device),
            "logprobs": part["packed_logprobs"].to(device),
            "sequence_ratio_mask": tokens.mask.float().to(device),
            "advantages": part["packed_logprobs"].to(device),
        }
        losses = self._loss.compute(logprobs, inputs, tokens.sequence.to(device), self._settings)
        outputs.keep("logprobs", logprobs)
        return losses.sum(), {}


@pytest.mark.parametrize("lora", [None, LoraConfig(4, 8.0)], ids=["full", "adapters"])
def test_gradients_add_up_and_a_step_follows(
    gpu: PretendedDevice, engine_on: Build, lora: LoraConfig | None
) -> None:
    engine = engine_on(lora=lora)
    before = gpu.live_bytes
    for name in LOSSES:
        waits = 4 if name == "gspo" else 3  # it asks how many sequences there are
        with gpu.limit(StepLimits(fp32_products=lora is not None, syncs=waits)):
            result = engine.accumulate(rollouts(), ServedLoss(name), mb_spec=SPEC)
        assert not result.skipped and result.kept["logprobs"].device.type == "cpu"
    assert gpu.live_bytes > before, "the gradient is kept"
    assert engine.step(OptimizerConfig(lr=1e-3, beta1=0.8)).stats["lr"] == 1e-3
    assert engine.version == 1
    assert len(digest_tensors(engine.weights())) == len(engine.weights())
    engine.accumulate(rollouts(), ServedLoss("ppo"), mb_spec=SPEC)
    engine.forget_gradients()
    engine.forget_moments()
    assert gpu.live_bytes <= before
