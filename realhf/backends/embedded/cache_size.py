"""Says how much memory an engine may keep keys and values in, and how much a token needs."""

from __future__ import annotations

from typing import Any

import torch

SHARED, ALONE = 0.5, 0.8
"""Share of what is free on a GPU: beside a trainer, whose activations need the rest, or only beside what passes of
generation hold."""


def cache_bytes(gib: float | None, device: torch.device, *, shared: bool, taken: int = 0) -> int | None:
    """Return the most bytes of a cache; None: as many as it needs. ``gib`` is what the options say. Without it an
    engine on a GPU gets a share of what is free there now, by whether the GPU is ``shared`` with training: what other
    processes have is not free, and what this process has freed is. ``taken``: bytes that weights, gradients and moments
    come to take there, some of them perhaps later."""
    if gib is not None:
        return int(gib * 2**30)
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(max(0, min(free, total - taken)) * (SHARED if shared else ALONE))


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token, in all layers of a model with this configuration."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return 2 * int(text.num_hidden_layers) * kv_heads * dim * dtype.itemsize
