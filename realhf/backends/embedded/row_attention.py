"""Computes attention of one new token per row over cached rows, as two batched matrix products.

For a single query the blocked kernel behind ``scaled_dot_product_attention`` spends most of its time on bookkeeping; on
a CPU with small heads the plain products are two to five times faster. Registered with transformers as the attention
implementation ``row_decode``, which passes all other cases on.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from realhf.backends.attention.given import attending_by

_NAME = "row_decode"
_KNOWN = frozenset({"sliding_window", "position_ids", "use_cache", "is_causal", "cache_position", "output_attentions"})
"""Keyword arguments that do not change this computation, because the mask says what a query sees."""


def row_decode_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with ``query`` (n, heads, n_query, dim) over ``key``/``value`` (n, kv heads, width, dim) under the
    additive ``attention_mask`` (n, 1, n_query, width); return ((n, n_query, heads, dim), None)."""
    n, heads, n_query, dim = query.shape
    odd = any(v for k, v in kwargs.items() if k not in _KNOWN)
    if n_query != 1 or attention_mask is None or dropout or odd or query.is_cuda:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    kv_heads, width = key.shape[1], key.shape[2]
    scale = dim**-0.5 if scaling is None else scaling
    # Scores are fp32 whatever the type of the model, as in the kernels of the trainer.
    packed = (query.float() * scale).reshape(n * kv_heads, heads // kv_heads, dim)
    scores = torch.bmm(packed, key.flatten(0, 1).float().transpose(1, 2))
    scores.view(n, heads, width).add_(attention_mask[:, 0])
    weights = torch.softmax(scores, -1).to(value.dtype)
    mixed = torch.bmm(weights, value.flatten(0, 1))
    return mixed.view(n, 1, heads, value.shape[-1]), None


AttentionInterface.register(_NAME, row_decode_attention)


def row_decoding(model: Any) -> contextlib.AbstractContextManager[None]:
    """Let a model on the ``sdpa`` implementation attend by ``row_decode_attention`` within the block."""
    return attending_by(model, _NAME)
