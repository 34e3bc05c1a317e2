"""How many tokens the context of a model holds, from its configuration. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNLIMITED = 1 << 30
"""For architectures without positions, such as those whose only bound is memory."""

_EXTENDED = frozenset({"linear", "dynamic", "yarn"})
"""Kinds of rotary embedding whose ``factor`` multiplies the length that ``max_position_embeddings`` gives, unless the
length before scaling is given beside it. The others (llama3, longrope) count the extension in already."""


def context_limit(config: Mapping[str, Any]) -> int:
    """Longest sequence of a model with this ``config.json``. A sliding window is no bound: layers that see only the
    last tokens hand on what older ones said.

    Source of the rules: vLLM, ``_get_and_verify_max_len``."""
    text = config.get("text_config") or config
    positions = (text.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    limit = next((int(found) for found in positions if found), UNLIMITED)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    factor = rope.get("factor")
    if (rope.get("rope_type") or rope.get("type")) not in _EXTENDED or not isinstance(factor, int | float):
        return limit
    before = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    return max(limit, int(factor * before)) if before else int(factor * limit)
