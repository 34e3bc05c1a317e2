"""Builds a critic's model: the decoder of a causal language model with one number on top of every hidden state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from realhf.backends.training.tokenizer_loading import ModelLoadError
from realhf.base.text import first_line

HEAD_FILE = "value_head.safetensors"
"""Stands beside the weights of the decoder in a folder that a critic was exported to."""


class ValueHead(nn.Linear):
    """Projects hidden states (..., width) to one number each, f32 (..., 1), computed in fp32. It starts at 0, so that a
    critic that has learned nothing predicts the mean return and disturbs no estimate."""

    def __init__(self, width: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(width, 1, device=device, dtype=dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return one number for each hidden state."""
        return functional.linear(input.float(), self.weight.float(), self.bias.float())


class ValueModel(nn.Module):
    """Holds the decoder of ``language_model`` (transformers) and a ``value_head``; the head of the language model is
    left behind."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.model = language_model.get_decoder()
        self.config = language_model.config
        width = int(self.config.get_text_config().hidden_size)
        # A decoder that gets its weights later has no memory yet; the head has.
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        self.value_head = ValueHead(width, device=device, dtype=self.dtype)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.model.dtype

    def get_decoder(self) -> Any:
        """Return the decoder: tokens to hidden states."""
        return self.model

    def activation_checkpointing_enable(self) -> None:
        """Compute activations again in the backward pass."""
        self.model.activation_checkpointing_enable()

    def save_pretrained(self, folder: Path | str) -> None:
        """Write decoder and value head; ``critic.path`` takes the folder."""
        self.model.save_pretrained(folder)
        save_file({name: t.detach().contiguous() for name, t in self.value_head.state_dict().items()}, _file(folder))


def load_value_model(language_model: Any, path: str, role: str) -> ValueModel:
    """Put a value head on the decoder of a model that was loaded from ``path``: the one beside its weights, or one at
    0. Raises ModelLoadError when the head there does not fit."""
    model = ValueModel(language_model)
    if _file(path).is_file():
        try:
            model.value_head.load_state_dict(load_file(_file(path)))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ModelLoadError(f"{role}.path={path}: its value head does not load ({first_line(error)})") from None
    return model.eval()


def _file(folder: Path | str) -> Path:
    return Path(folder) / HEAD_FILE
