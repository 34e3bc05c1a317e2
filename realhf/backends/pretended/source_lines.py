"""Lines of the product that a pretended operation comes from."""

from __future__ import annotations

import sys
from pathlib import Path

_PRODUCT = Path(__file__).resolve().parents[2]
_OWN = str(Path(__file__).resolve().parent)
_MODELS = "/transformers/"
"""Part of the path of a library whose line is named together with the product's."""


def calling_line() -> str:
    """Return ``realhf/FILE.py:LINE`` of the innermost frame of the product outside of this folder,
    and the line of the model's own code if that is further inside; "?" without such a frame."""
    model = ""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(_PRODUCT)) and not name.startswith(_OWN):
            line = f"{Path(name).relative_to(_PRODUCT.parent)}:{frame.f_lineno}"
            return f"{line} (in {model})" if model else line
        if not model and _MODELS in name:
            model = f"transformers/{name.rpartition(_MODELS)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return model or "?"
