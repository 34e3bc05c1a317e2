"""Writes checkpoints as the master does, by one writer in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from realhf.dataflow.checkpoint import CheckpointStore


def save(
    store: CheckpointStore, step: int, write: Callable[[Path], None], state: Mapping[str, Any]
) -> Path:
    """Write one checkpoint, which ``write`` fills, and return its folder."""
    draft = store.begin(step)
    try:
        write(draft)
    except BaseException as error:
        raise store.abandon(step, draft, error) from error
    return store.commit(step, draft, state)
