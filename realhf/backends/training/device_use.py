"""What training uses of its device: tokens per second, model FLOPs utilisation, and memory."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterable
from typing import Any

import torch

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H100 PCIE": 756e12,
    "H100 NVL": 835e12,
    "H800": 989e12,
    "A100": 312e12,
    "A100 PCIE": 312e12,
    "A800": 312e12,
    "A800 PCIE": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "A10G": 70e12,
    "RTX A6000": 155e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Peak rate of dense bf16 matrix products in operations per second, by the name of the device in
capitals, without its vendor, its socket and the size and kind of its memory. From the vendors' data
sheets, without sparsity and, for consumer cards, with fp32 accumulation."""
_DROPPED = re.compile(r"NVIDIA|TESLA|GEFORCE|SXM\d?|\d+GB?|HBM\w+")
"""Words of a device's name that do not tell its rate."""


def peak_of(device_name: str) -> float | None:
    """Return a device's peak bf16 operations per second according to its data sheet; None for one
    that is not known by exactly this name, such as a part of a GPU (MIG) or its mobile version."""
    words = re.split(r"[ -]+", device_name.upper())
    return PEAKS.get(" ".join(word for word in words if not _DROPPED.fullmatch(word)))


class DeviceUse:
    """Use of one worker's device by the train calls of one model."""

    def __init__(self, model: Any, *, peak: float | None = None) -> None:
        """``peak`` is the device's rate in operations per second (None: that of its data sheet, if
        the model computes in bf16 and it is known)."""
        self._device: torch.device = next(model.parameters()).device
        self._peak = _find_peak(model, self._device) if peak is None else peak
        self._per_token, self._per_pair = count_operations(model)
        self._tokens = 0
        self._operations = 0.0

    def begin(self) -> None:
        """Begin to measure a call."""
        self._tokens = 0
        self._operations = 0.0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def count(self, lengths: Iterable[int]) -> None:
        """Count a forward and a backward pass over sequences of these lengths."""
        for length in lengths:
            pairs = length * (length + 1) // 2
            self._tokens += length
            self._operations += self._per_token * length + self._per_pair * pairs

    def stats(self, seconds: float) -> dict[str, float]:
        """Return the statistics of a call that took ``seconds``."""
        if not self._tokens or seconds <= 0:
            return {}
        stats = {"device_rate": self._tokens / seconds}
        if self._peak is not None and self._per_token:
            stats["device_utilisation"] = self._operations / (seconds * self._peak)
        if self._device.type == "cuda":
            stats["device_peak_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
            stats["device_reserved_bytes"] = float(torch.cuda.max_memory_reserved(self._device))
        else:
            stats["device_peak_bytes"] = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return stats


def count_operations(model: Any) -> tuple[float, float]:
    """Return (operations per token, operations per pair of tokens that attend to each other) of a
    forward and a backward pass; (0, 0) for a mixture of experts, of which a token uses a part.

    A product has two operations per weight in the forward pass and twice as many in the backward
    pass, of which frozen weights need one half. Recomputation, norms and positions do not count,
    and neither does the embedding, which is looked up.
    """
    text = model.config.get_text_config()
    if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
        return 0.0, 0.0
    embedding = model.get_decoder().get_input_embeddings().weight
    # A model with a value head has no output embeddings.
    find_output = getattr(model, "get_output_embeddings", lambda: None)
    output = find_output()
    is_looked_up = output is None or output.weight is not embedding
    per_token = sum(
        (6.0 if parameter.requires_grad else 4.0) * parameter.numel()
        for parameter in model.parameters()
        if parameter.ndim >= 2 and not (parameter is embedding and is_looked_up)
    )
    # Layers of some models differ in these (Gemma 4). Transformers then has one for each layer.
    layers = getattr(text, "per_layer_config", None) or [text] * getattr(
        text, "num_hidden_layers", 0
    )
    return per_token, 12.0 * sum(_find_attention_width(layer) for layer in layers)


def _find_attention_width(layer: Any) -> int:
    """Return the sum of the head widths of a layer's queries, 0 for a layer without attention."""
    heads = getattr(layer, "num_attention_heads", 0)
    return heads * (
        getattr(layer, "head_dim", None) or (layer.hidden_size // heads if heads else 0)
    )


def _find_peak(model: Any, device: torch.device) -> float | None:
    """Return the bf16 peak of the device's data sheet; None for an unknown device or another
    dtype."""
    if device.type != "cuda" or next(model.parameters()).dtype != torch.bfloat16:
        return None
    return peak_of(torch.cuda.get_device_name(device))
