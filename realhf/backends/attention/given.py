"""Gives a model of transformers another attention for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def attending_by(model: Any, name: str) -> Iterator[None]:
    """Let a model on the ``sdpa`` implementation attend by the registered implementation ``name`` within the block."""
    config = model.config
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = name
    try:
        yield
    finally:
        if before == "sdpa":
            config._attn_implementation = before
