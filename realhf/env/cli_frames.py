"""Frames between the executor and its worker: a 4-byte big-endian length, then JSON."""

from __future__ import annotations

import json
import struct
from typing import Any

_HEADER = struct.Struct(">I")


def read_frame(stream: Any) -> dict[str, Any] | None:
    """The next frame, or None at the end of the stream."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    body = stream.read(_HEADER.unpack(header)[0])
    return json.loads(body)


def frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode("utf-8")
    return _HEADER.pack(len(body)) + body
