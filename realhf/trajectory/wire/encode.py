"""Encodes responses that carry groups: converted where the encodings differ, spliced, compressed.

Source: docs/reference/trajectory.md 2.1, 3.11.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from realhf.trajectory.base.records import Encoding, Payload
from realhf.trajectory.wire import convert, deflate, splice

GZIP_FROM_BYTES = 1000
"""Size from which answers are compressed; smaller ones go out plain."""


async def encode_batch(
    payloads: Sequence[Payload], data: Sequence[bytes], *, msgpack: bool, coding: str, level: int
) -> tuple[list[bytes | memoryview], str]:
    """Return the pieces of a batch response and their Content-Encoding. ``coding``: what the client accepts best (gzip,
    zstd or nothing); ``level``: 0 to 3."""
    if all((payload.encoding == Encoding.MSGPACK) == msgpack for payload in payloads):
        parts = [(payload.present, group) for payload, group in zip(payloads, data, strict=True)]
    else:
        parts = await asyncio.to_thread(_converted, payloads, data, msgpack)
    pieces: list[bytes | memoryview] = splice.msgpack_pieces(parts) if msgpack else splice.json_pieces(parts)
    if not coding or sum(map(len, pieces)) < GZIP_FROM_BYTES:
        return pieces, ""
    if coding == "zstd":
        return [*await deflate.zstd_pieces(pieces, level)], coding
    return [*await deflate.gzip_pieces(pieces, level)], coding


async def encode_group(payload: Payload, data: bytes, *, msgpack: bool) -> bytes:
    """Encode one group with all stock keys."""
    if (payload.encoding == Encoding.MSGPACK) == msgpack:
        part = payload.present, data
    else:
        [part] = await asyncio.to_thread(_converted, [payload], [data], msgpack)
    return splice.msgpack_group(part) if msgpack else splice.json_group(part)


def _converted(payloads: Sequence[Payload], data: Sequence[bytes], msgpack: bool) -> list[splice.Part]:
    """Return the canonical bytes of each group in the encoding of the response."""
    parts = []
    for payload, group in zip(payloads, data, strict=True):
        if (payload.encoding == Encoding.MSGPACK) != msgpack:
            group = convert.to_msgpack(group) if msgpack else convert.to_json(payload.present, group)
        parts.append((payload.present, group))
    return parts
