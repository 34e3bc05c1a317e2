"""A real engine small enough to train in milliseconds, and the groups that tests of the train step
use."""

import math

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from realhf.algorithms.inference import LogprobInterface
from realhf.api.config import OptimizerConfig
from realhf.api.model import CallContext, Model
from realhf.api.sample import MicroBatchSpec
from realhf.backends.training.torch_backend import ValueModel
from realhf.backends.training.torch_engine import TorchEngine

GROUPS = [[9, 14, 6], [5, 5, 12], [8, 7, 10], [6, 11, 4]]
REWARDS = [1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.0, 1.0, math.nan, 0.25, 0.5, 0.75]
OUTCOME = [0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0]
"""The second group has no signal, one row of the third failed, one row of the fourth is at its
mean."""


def tiny_actor(lr=1e-2):
    return Model("actor", _engine(_language_model(), lr), None)


def tiny_critic(lr=1e-2):
    """A critic of the same size, with a value head at 0."""
    return Model("critic", _engine(ValueModel(_language_model()), lr), None)


def _engine(model, lr):
    return TorchEngine(model, None, optimizer=OptimizerConfig(lr=lr), total_train_steps=10)


def _language_model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        bos_token_id=1,
        eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config)


def context(tmp_path, step=0, **spec):
    return CallContext(step, 1, MicroBatchSpec(**spec), tmp_path)


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.engine.model.parameters()])  # type: ignore[attr-defined]


def on_policy(model, sample, tmp_path):
    """The sample with the behaviour log-probabilities of ``model`` itself."""
    own = LogprobInterface("packed_logprobs").inference(model, sample, context(tmp_path))[0]
    return sample.select(sample.keys - {"packed_logprobs"}).update(own)
