"""Packs arrays with a description in front of them, so that the page reads them as typed arrays without parsing."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

_ALIGNED = 8
_KINDS = {"float64": "f64", "float32": "f32", "int32": "i32", "uint32": "u32", "uint16": "u16", "uint8": "u8"}
MEDIA_TYPE = "application/octet-stream"


def pack(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return ``u32 length of the header | header as JSON | arrays``, little-endian; every array begins at a multiple of
    eight bytes. The header is ``about`` with ``arrays``: {name: {kind, length, offset}}, offsets counted from the end
    of the header. Raises KeyError for a type of elements that the page does not know."""
    places: dict[str, dict[str, Any]] = {}
    parts: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        places[name] = {"kind": _KINDS[array.dtype.name], "length": int(array.size), "offset": offset}
        padded = data + bytes(-len(data) % _ALIGNED)
        parts.append(padded)
        offset += len(padded)
    header = json.dumps({**about, "arrays": places}).encode()
    header += b" " * (-(len(header) + 4) % _ALIGNED)
    return struct.pack("<I", len(header)) + header + b"".join(parts)
