"""Twenty steps by the interfaces of ``experiment=sft`` and ``experiment=grpo``, on the engine that
a run has, and the same by a loop over the client: the same losses."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.sft import SFTInterface
from realhf.api.config import LoraConfig, OptimizerConfig
from realhf.api.model import CallContext, Model
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.torch_backend import load_causal_lm
from realhf.backends.training.torch_engine import TorchEngine
from tests.tinker.conftest import KEY

pytestmark = pytest.mark.nightly
STEPS = 20
GROUPS = [[19, 24, 16], [15, 35, 22], [28, 17, 20]]
LENGTHS = [n for group in GROUPS for n in group]
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAM = types.AdamParams(
    learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0
)


def engine_of(policy) -> TorchEngine:
    """An engine as a run has it, with the first values of the adapters that the server draws from
    its seed."""
    options = OptimizerConfig(
        lr=3e-3,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.01,
        gradient_clipping=1.0,
        warmup_steps_proportion=0.0,
    )
    model = load_causal_lm(str(policy), "actor", torch.float32)
    torch.manual_seed(7)
    return TorchEngine(
        model,
        None,
        optimizer=options,
        total_train_steps=STEPS,
        lora=LoraConfig(4, 32.0, LAYERS, 0.0),
    )


def batch(step: int, **more: torch.Tensor) -> SequenceSample:
    """Sequences of a step, of which the last ten tokens train; ``more`` of their positions or of
    the sequences."""
    draw = torch.Generator().manual_seed(step)
    mask = torch.cat([torch.arange(n) >= n - 10 for n in LENGTHS])
    given = {
        "packed_input_ids": torch.randint(0, 250, (sum(LENGTHS),), generator=draw),
        "loss_mask": mask,
        **more,
    }
    widths = {
        sum(LENGTHS): GROUPS,
        sum(LENGTHS) - len(LENGTHS): [[n - 1 for n in group] for group in GROUPS],
        len(LENGTHS): [[1] * len(group) for group in GROUPS],
    }
    names = [f"t{i}" for i in range(len(GROUPS))]
    return SequenceSample.from_tensors(
        names, given, {key: widths[len(value)] for key, value in given.items()}
    )


def train(interface, engine, samples, folder) -> list[float]:
    """What a model worker does of a step; return its losses."""
    losses = []
    for step, sample in enumerate(samples):
        stats = interface.train_step(
            Model("actor", engine, None), sample, CallContext(step, 1, MicroBatchSpec(), folder)
        )
        assert not stats["skipped"]
        engine.version += 1
        losses.append(stats["loss"])
    return losses


def data_of(sample, **inputs: torch.Tensor) -> list[types.Datum]:
    """The sequences as a client sends them; ``inputs`` are packed, one for each predicted token."""
    data = []
    at = 0
    place = 0
    for n in LENGTHS:
        ids = sample["packed_input_ids"][at : at + n].tolist()
        own = {
            name: values[place : place + n - 1].numpy().astype(np.float32)
            for name, values in inputs.items()
        }
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(ids[:-1]),
                loss_fn_inputs={"target_tokens": ids[1:], **own},
            )
        )
        at = at + n
        place = place + n - 1
    return data


def loop(server, policy, loss, batches) -> list[float]:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    create = service.create_lora_training_client
    client = create(str(policy), rank=4, seed=7, train_unembed=False).result()
    sent = [(client.forward_backward(data, loss), client.optim_step(ADAM)) for data in batches]
    losses = [passed.result().metrics["loss:sum"] for passed, _ in sent]
    sent[-1][1].result()
    return losses


def drop_first_tokens(values: torch.Tensor) -> torch.Tensor:
    """Leave out what belongs to the first token of each sequence."""
    return torch.cat([part[1:] for part in values.split(LENGTHS)])


def test_supervised_steps(server, policy, tmp_path):
    samples = [batch(step % 4) for step in range(STEPS)]
    expected = train(SFTInterface(), engine_of(policy), samples, tmp_path)
    weights = drop_first_tokens(samples[0]["loss_mask"]).float()
    weights /= weights.sum()
    found = loop(
        server, policy, "cross_entropy", [data_of(sample, weights=weights) for sample in samples]
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found[-1] < 0.98 * found[3]


def test_policy_gradient_steps(server, policy, tmp_path):
    """GRPO from rollouts of a neighbouring policy, so that ratios are none and clips decide;
    advantages by the plain formula."""
    draw = torch.Generator().manual_seed(0)
    engine = engine_of(policy)
    samples = []
    batches = []
    mask = drop_first_tokens(batch(0)["loss_mask"])
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1)
    for step in range(STEPS):
        plain = batch(step % 4)
        own = engine.logprobs(plain, temperature=1.0, mb_spec=MicroBatchSpec())
        behaviour = torch.where(mask, own + 0.3 * torch.randn(own.shape, generator=draw), 0.0)
        rewards = torch.rand(len(GROUPS), 3, generator=draw)
        more = {
            "packed_logprobs": behaviour,
            "packed_ref_logprobs": own,
            "rewards": rewards.flatten(),
        }
        samples.append(
            batch(step % 4, **more, outcome=torch.zeros(len(LENGTHS), dtype=torch.uint8))
        )
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (
            rewards.std(1, keepdim=True) + 1e-6
        )
        weighed = torch.where(mask, advantages.flatten()[sequence], 0.0) / (10 * len(LENGTHS))
        batches.append(data_of(plain, logprobs=behaviour, advantages=weighed))
    expected = train(PolicyGradientInterface({"algo": "grpo"}), engine, samples, tmp_path)
    found = loop(server, policy, "ppo", batches)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.ptp(expected) > 1e-2
