"""Lines of the product that a pretended operation comes from."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

_PRODUCT = str(Path(__file__).resolve().parents[2])
_ABOVE = len(str(Path(_PRODUCT).parent)) + 1
_OWN = str(Path(__file__).resolve().parent)
_MODELS = "/transformers/"
"""Part of the path of a library whose line is named together with the product's."""


def calling_line() -> str:
    """Return ``realhf/FILE.py:LINE`` of the innermost frame of the product outside of this folder,
    and the line of the model's own code if that is further inside; "?" without such a frame."""
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
    if _MODELS in path:
        return f"transformers/{path.rpartition(_MODELS)[2]}", False
    return "", False
