"""Lets models of transformers attend over packed rows: registers the attention implementation ``packed_rows``.

A pass that brings no layout is computed as by ``sdpa``, with the same masks, so that a model can keep the
implementation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from realhf.backends.varlen.layout import PackedLayout

NAME, LAYOUT = "packed_rows", "packed_layout"
"""The implementation's name, and the keyword argument of a forward pass that brings a ``PackedLayout``."""
_KNOWN = frozenset({"position_ids", "use_cache", "is_causal", "cache_position", "output_attentions"})
"""Keyword arguments that change nothing where a layout says what a query sees."""


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attend with ``query`` (1, heads, columns, dim) over ``key``/``value`` (1, kv heads, columns, dim) within each
    sequence of the layout; return ((1, columns, heads, dim), None). The mask is not looked at. Raises ValueError for
    kinds of attention that a layout does not describe."""
    if packed_layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    odd = sorted(
        name for name, given in kwargs.items() if name not in _KNOWN and given is not None and given is not False
    )
    if odd or dropout or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise ValueError(f"attention with {odd[0] if odd else 'dropout or cached keys'} cannot run over packed rows")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = [t[0].transpose(0, 1) for t in (query, key, value)]
    return packed_layout.attend(parts[0], parts[1], parts[2], sliding_window, scale)[None], None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def can_pack(model: Any) -> bool:
    """Return whether the model computes attention by ``sdpa``, whose place ``packed_rows`` can take or has taken:
    models may share their configuration."""
    return getattr(model.get_decoder().config, "_attn_implementation", None) in ("sdpa", NAME)


def pack(model: Any) -> None:
    """Let the model attend by ``packed_rows`` from now on. It stays so: a backward pass that computes activations again
    must find what the forward pass had."""
    model.get_decoder().config._attn_implementation = NAME


@contextlib.contextmanager
def packed_for_trial(model: Any) -> Iterator[None]:
    """Let the model attend by ``packed_rows`` within the block."""
    config = model.get_decoder().config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
