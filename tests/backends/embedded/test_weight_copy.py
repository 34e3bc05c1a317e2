"""The weights that an engine publishes are those that a copy of its model takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from realhf.api.config import OptimizerConfig
from realhf.backends.embedded.weight_copy import copy_weights
from realhf.backends.training.torch_engine import TorchEngine
from realhf.transport.weights import layout, pack


def test_persistent_buffers_travel_with_the_parameters(tiny_model: Any) -> None:
    def made(fill: int) -> Any:
        model = tiny_model()  # Its head is tied to the embedding.
        model.model.layers[0].mlp.register_buffer("scale", torch.full((3,), float(fill)))
        model.model.register_buffer("counted", torch.tensor([fill, fill]))
        model.model.register_buffer("scratch", torch.full((2,), float(fill)), persistent=False)
        return model

    engine, other = TorchEngine(made(7), None, optimizer=OptimizerConfig(), total_train_steps=1), made(0)
    with torch.no_grad():
        engine.model.model.embed_tokens.weight.add_(1.0)
    weights = engine.weights()
    assert "lm_head.weight" not in weights, "what is tied travels once"
    slots, size = layout(weights)
    pack(weights, slots, np.zeros(size, dtype=np.uint8))
    copy_weights(other, weights)
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other.model.scratch.tolist() == [0.0, 0.0], "what no checkpoint holds stays"
