"""What the training server does with an engine, on a pretended GPU: gradients added up, steps with
options of their own, digests."""

from __future__ import annotations

from collections import Counter

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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lora", [None, LoraConfig(4, 8.0)], ids=["full", "adapters"])
def test_gradients_add_up_and_a_step_follows(
    gpu: PretendedDevice, engine_on: Build, lora: LoraConfig | None
) -> None:
    mark = gpu.mark()
    engine = engine_on(lora=lora)
    optimizer = engine.optimizer
    assert optimizer is not None
    others = gpu.allocated_since(mark)
    optimizer.reset_moments(())
    held = others - gpu.allocated_since(mark)  # the moments
    own = [*engine.model.parameters(), *engine.model.buffers(), *optimizer.masters]
    left = gpu.allocated_since(mark, besides=own)
    assert not left, f"moments are left: {left}"
    optimizer.reset_moments({*optimizer.parameters})
    before = gpu.live_bytes
    begin = gpu.mark()
    engine.accumulate(rollouts(), ServedLoss("ppo"), mb_spec=SPEC)  # which keeps the first gradient
    for name in LOSSES:
        waits = 4 if name == "gspo" else 3  # it asks how many sequences there are
        products = lora is not None
        waited = gpu.syncs.copy()
        with gpu.limit(StepLimits(fp32_products=products, syncs=waits, kept_bytes=0)):
            result = engine.accumulate(rollouts(), ServedLoss(name), mb_spec=SPEC)
        outside = gpu.syncs - waited - sum(gpu.micro_batches, Counter())
        assert not outside, f"waits outside of the micro-batches: {outside}"
        assert not result.skipped and result.kept["logprobs"].device.type == "cpu"
    assert gpu.live_bytes > before, "the gradient is kept"
    assert engine.step(OptimizerConfig(lr=1e-3, beta1=0.8)).stats["lr"] == 1e-3
    assert engine.version == 1
    left = gpu.allocated_since(begin)
    assert not left, f"a step leaves {left}"
    assert len(digest_tensors(engine.weights())) == len(engine.weights())
    mark = gpu.mark()
    engine.accumulate(rollouts(), ServedLoss("ppo"), mb_spec=SPEC)
    engine.forget_gradients()
    left = gpu.allocated_since(mark)
    assert not left, f"gradients are left: {left}"
    engine.forget_moments()
    moments = {line: n for line, n in gpu.allocated_since(0).items() if line in held}
    assert not moments, f"moments are left: {moments}"
