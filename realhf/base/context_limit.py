"""Reads from a model's configuration how many tokens its context holds. Does not need torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNLIMITED = 1 << 30
"""The limit reported for architectures without positions, whose only bound is memory."""

_EXTENDED = frozenset({"linear", "yarn"})
"""Kinds of rotary embedding whose ``factor`` multiplies the length that ``max_position_embeddings`` gives, unless the
configuration also gives the length before scaling. llama3 already includes the extension."""
_BY_LENGTH = frozenset({"dynamic", "longrope", "su"})
"""Kinds of rotary embedding that turn all tokens of a text otherwise once it is longer than before scaling. The keys
that generation has kept are then not those of the trainer, which reads the whole text at once. So the context ends
there."""


def context_limit(config: Mapping[str, Any]) -> int:
    """Return the length of the longest sequence that a model with this ``config.json`` takes. A sliding window does not
    bound it: layers that see only the last tokens still receive what earlier layers made of older ones.

    Source of the rules: vLLM, ``_get_and_verify_max_len``.
    """
    text = _text(config)
    positions = (text.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    limit = next((int(found) for found in positions if isinstance(found, int | float) and found >= 1), UNLIMITED)
    kind, rope = _rope(text)
    before = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    before = before if isinstance(before, int | float) else None
    if kind in _BY_LENGTH:
        return min(limit, int(before)) if before else limit
    factor = rope.get("factor")
    if kind not in _EXTENDED or not isinstance(factor, int | float):
        return limit
    return max(limit, int(factor * before)) if before else int(factor * limit)


def context_reason(config: Mapping[str, Any]) -> str:
    """Return what ends the context before the length that the model's configuration gives, to be put behind the number;
    empty if nothing does."""
    kind, _ = _rope(_text(config))
    return f" (its rotary embedding, {kind}, changes for longer texts)" if kind in _BY_LENGTH else ""


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _rope(text: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return kind and options of the rotary embedding; where layers differ, of the one that depends on the length."""
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    given = given if isinstance(given, Mapping) else {}
    found = [(_kind(rope), rope) for rope in (given, *given.values()) if isinstance(rope, Mapping)]
    return next((rope for rope in found if rope[0] in _BY_LENGTH), found[0])


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")
