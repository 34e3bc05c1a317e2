"""Reads from a model's configuration how many tokens its context holds. Does not need torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNLIMITED = 1 << 30
"""The limit reported for architectures without positions, whose only bound is memory."""

_EXTENDED = frozenset({"linear", "dynamic", "yarn"})
"""Kinds of rotary embedding whose ``factor`` multiplies the length that ``max_position_embeddings`` gives, unless the
configuration also gives the length before scaling. The other kinds (llama3, longrope) already include the extension."""


def context_limit(config: Mapping[str, Any]) -> int:
    """Return the length of the longest sequence that a model with this ``config.json`` takes. A sliding window does not
    bound it: layers that see only the last tokens still receive what earlier layers made of older ones.

    Source of the rules: vLLM, ``_get_and_verify_max_len``.
    """
    text = config.get("text_config") or config
    positions = (text.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    limit = next((int(found) for found in positions if found), UNLIMITED)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    factor = rope.get("factor")
    if (rope.get("rope_type") or rope.get("type")) not in _EXTENDED or not isinstance(factor, int | float):
        return limit
    before = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    return max(limit, int(factor * before)) if before else int(factor * limit)
