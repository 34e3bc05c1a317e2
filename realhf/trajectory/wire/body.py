"""Request bodies: read and decompressed under a cap, so that no bomb is ever inflated.

Source: trajectory specification 2.1, 3.8, 3.11.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import zstandard
from isal import isal_zlib

from realhf.trajectory.refusal import Refusal

INLINE_BYTES = 256 << 10
"""Compressed bodies up to here are inflated on the event loop; larger ones in a thread, without the GIL."""
_CHUNK = 1 << 20
_MOST_AT_ONCE = 32 << 20
_ZSTD_SLICE = 256
"""Four bytes of a Zstandard stream may mean 128 KiB, and its reader does not stop in between."""
_BAD_GZIP: tuple[Any, ...] = (isal_zlib.IsalError, EOFError)


async def read_body(
    chunks: AsyncIterator[bytes], *, encoding: str = "", max_bytes: int, allow_zstd: bool = False
) -> bytes:
    """The plain body. ``encoding`` is the Content-Encoding header; gzip counts wherever it is contained. Raises
    Refusal 413 above ``max_bytes``, compressed or not, and 400 for a damaged stream."""
    parts, received = [], 0
    async for chunk in chunks:
        received += len(chunk)
        if received > max_bytes:
            raise _too_large(max_bytes)
        parts.append(chunk)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    encoding = encoding.lower()
    if "gzip" in encoding:
        inflate = gunzip
    elif allow_zstd and "zstd" in encoding:
        inflate = unzstd
    else:
        return body
    if len(body) <= INLINE_BYTES:
        return inflate(body, max_bytes)
    return await asyncio.to_thread(inflate, body, max_bytes)


def gunzip(body: bytes, max_bytes: int) -> bytes:
    """Inflate one or more gzip members. Raises Refusal 400 (not gzip, truncated, corrupt) or 413.

    The last four bytes say how long the plain body is; if that is true, one step does, and if not, several."""
    if not body:
        return b""
    parts, size = [], 0
    step = max(_CHUNK, min(int.from_bytes(body[-4:], "little") + 1, max_bytes, _MOST_AT_ONCE))
    try:
        while body:
            member = isal_zlib.decompressobj(31)
            while not member.eof:
                part = member.decompress(body, step)
                body = member.unconsumed_tail
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
                if not part and not body and not member.eof:
                    raise Refusal(400, "the gzip body is truncated")
            body = member.unused_data
    except _BAD_GZIP as error:
        raise Refusal(400, f"the body is not valid gzip: {error}") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def unzstd(body: bytes, max_bytes: int) -> bytes:
    """Inflate Zstandard frames. Raises Refusal 400 or 413."""
    parts, size = [], 0
    try:
        while body:
            frame = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
            for start in range(0, len(body), _ZSTD_SLICE):
                part = frame.decompress(body[start : start + _ZSTD_SLICE])
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
                if frame.eof:
                    body = frame.unused_data + body[start + _ZSTD_SLICE :]
                    break
            else:
                raise Refusal(400, "the zstd body is truncated")
    except zstandard.ZstdError as error:
        raise Refusal(400, f"the body is not valid zstd: {error}") from error
    return b"".join(parts)


def _too_large(max_bytes: int) -> Refusal:
    return Refusal(413, f"the body is larger than {max_bytes} bytes")
