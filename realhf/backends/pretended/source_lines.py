"""Lines of the product that a pretended operation comes from."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

_PRODUCT = str(Path(__file__).resolve().parents[2])
_ABOVE = len(str(Path(_PRODUCT).parent)) + 1
_OWN = str(Path(__file__).resolve().parent)
SHARDING = "torch/distributed/fsdp/"
"""How the names of the lines begin that shard a model and gather it."""
_NAMED = ("transformers/", SHARDING)
"""Folders of libraries whose lines are named together with the product's."""


def calling_line() -> str:
    """Return ``realhf/FILE.py:LINE`` of the innermost frame of the product outside of this folder,
    and the line of the model's own code, or of what shards it, if that is further inside; "?"
    without such a frame."""
    model = ""
    frame = sys._getframe(1)
    while frame is not None:
        name, own = _shorten(frame.f_code.co_filename)
        if own:
            line = f"{name}:{frame.f_lineno}"
            return f"{line} (in {model})" if model else line
        if name and not model:
            model = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return model or "?"


@functools.cache
def _shorten(path: str) -> tuple[str, bool]:
    """Return the name by which a file is called and whether it is the product's; "" for a file
    that is not named."""
    if path.startswith(_PRODUCT) and not path.startswith(_OWN):
        return path[_ABOVE:], True
    for folder in _NAMED:
        if f"/{folder}" in path:
            return f"{folder}{path.rpartition(f'/{folder}')[2]}", False
    return "", False
