"""Writes handles of CUDA memory as plain JSON, and reads them again, without pickles.

vLLM's own client pickles them, and a server that takes pickles runs what anybody who reaches its port sends. This
module runs on both sides: in a trainer, and inside the server, whose environment has torch and of ours this package
alone.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch

MOST_PARTS, MOST_BYTES = 32, 4096
"""A handle has about 15 parts, the largest of which is a few dozen bytes."""
_CLASSES: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "Parameter": torch.nn.Parameter,
    "TypedStorage": torch.storage.TypedStorage,
    "UntypedStorage": torch.storage.UntypedStorage,
}


def to_json(handle: Sequence[Any]) -> list[Any]:
    """Return the arguments that ``torch.multiprocessing`` rebuilds a tensor of CUDA from, as JSON has them. Raises
    TypeError on a part of another kind."""
    return [_written(part) for part in handle]


def from_json(parts: Any) -> tuple[Any, ...]:
    """Return the arguments that ``to_json`` wrote. Raises ValueError on anything else: it came over a socket."""
    if not isinstance(parts, list) or len(parts) > MOST_PARTS:
        raise ValueError("a handle of device memory is a list of at most 32 parts")
    return tuple(_read(part) for part in parts)


def _written(part: Any) -> Any:
    if part is None or isinstance(part, (bool, int)):
        return part
    if isinstance(part, bytes):
        return {"bytes": base64.b64encode(part).decode()}
    if isinstance(part, torch.dtype):
        return {"dtype": str(part).removeprefix("torch.")}
    if isinstance(part, torch.device):
        return {"device": part.index or 0}
    if isinstance(part, tuple) and all(isinstance(size, int) for size in part):  # torch.Size is one, too
        return {"sizes": list(part)}
    for name, kind in _CLASSES.items():
        if part is kind:
            return {"class": name}
    raise TypeError(f"a handle of device memory with a {type(part).__name__} is not known")


def _read(part: Any) -> Any:
    if part is None or isinstance(part, (bool, int)):
        return part
    if isinstance(part, dict) and len(part) == 1:
        kind, value = next(iter(part.items()))
        if kind == "class" and isinstance(value, str) and value in _CLASSES:
            return _CLASSES[value]
        if kind == "dtype" and isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype):
            return getattr(torch, value)
        if kind == "device" and isinstance(value, int):
            return value
        if kind == "sizes" and isinstance(value, list) and len(value) <= MOST_PARTS:
            if all(isinstance(size, int) for size in value):
                return tuple(value)
        elif kind == "bytes" and isinstance(value, str) and len(value) <= MOST_BYTES:
            return base64.b64decode(value, validate=True)
    raise ValueError(f"a handle of device memory has no such part: {str(part)[:80]}")
