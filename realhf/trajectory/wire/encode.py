"""Responses that carry groups: converted where the encodings differ, spliced, compressed.

Source: trajectory specification 2.1, 3.11.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from realhf.trajectory.records import Encoding, Payload
from realhf.trajectory.wire import convert, deflate, splice

GZIP_FROM_BYTES = 1000
"""Smaller answers go out plain."""


async def encode_batch(
    payloads: Sequence[Payload], data: Sequence[bytes], *, msgpack: bool, coding: str, level: int
) -> tuple[list[bytes | memoryview], str]:
    """Pieces of a batch response and their Content-Encoding. ``coding``: what the client accepts best (gzip, zstd or
    nothing); ``level``: 0 to 3."""
    parts = [(payload.present, await converted(payload, group, msgpack=msgpack))
             for payload, group in zip(payloads, data, strict=True)]  # fmt: skip
    pieces: list[bytes | memoryview] = splice.msgpack_pieces(parts) if msgpack else splice.json_pieces(parts)
    if not coding or sum(map(len, pieces)) < GZIP_FROM_BYTES:
        return pieces, ""
    if coding == "zstd":
        return [*await deflate.zstd_pieces(pieces, level)], coding
    return [*await deflate.gzip_pieces(pieces, level)], coding


async def encode_group(payload: Payload, data: bytes, *, msgpack: bool) -> bytes:
    """One group with all stock keys."""
    part = payload.present, await converted(payload, data, msgpack=msgpack)
    return splice.msgpack_group(part) if msgpack else splice.json_group(part)


async def converted(payload: Payload, data: bytes, *, msgpack: bool) -> bytes:
    """Canonical bytes of a group in the encoding of the response."""
    if (payload.encoding == Encoding.MSGPACK) == msgpack:
        return data
    if msgpack:
        return await asyncio.to_thread(convert.to_msgpack, data)
    return await asyncio.to_thread(convert.to_json, payload.present, data)
