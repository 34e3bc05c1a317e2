"""Says how much memory an engine may keep keys and values in, and how much a token needs."""

from __future__ import annotations

from typing import Any

import torch


def cache_bytes(gib: float | None, shared: torch.device | None) -> int | None:
    """Return the most bytes of a cache; None: as many as it needs. ``gib`` is what the options say. Without it an
    engine on a GPU that it has ``shared`` with training (None: with nobody) gets half of what is free there now: what
    other processes have is not, and what this process has freed is."""
    if gib is not None:
        return int(gib * 2**30)
    if shared is None or shared.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(shared)
    return (free + torch.cuda.memory_reserved(shared) - torch.cuda.memory_allocated(shared)) // 2


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token, in all layers of a model with this configuration."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return 2 * int(text.num_hidden_layers) * kv_heads * dim * dtype.itemsize
