"""Request bodies: read and decompressed under a cap, so that no bomb is ever inflated.

Source: trajectory specification 2.1, 3.8, 3.11.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import zstandard
from isal import isal_zlib

from realhf.trajectory.refusal import Refusal

INLINE_BYTES = 256 << 10
"""Compressed bodies up to here are tried on the event loop; larger ones in a thread, without the GIL."""
INLINE_PLAIN_BYTES = 1 << 20
"""What turns out to be larger is begun again in a thread."""
MOST_MEMBERS = 10_000
"""Each member of a stream costs a new decoder and a copy of the slice that it began in."""
_SLICE = 256 << 10
_MOST_AT_ONCE = 32 << 20
_ZSTD_SLICE = 256
"""Four bytes of a Zstandard stream may mean 128 KiB, and its reader does not stop in between."""
_BAD_GZIP: tuple[Any, ...] = (isal_zlib.IsalError, EOFError)


Take = Callable[[int], None]


def _free(nbytes: int) -> None:
    """Bytes that nobody counts."""


async def read_body(
    chunks: AsyncIterator[bytes], *, encoding: str = "", max_bytes: int, allow_zstd: bool = False,
    take: Take = _free,
) -> bytes:
    """The plain body. ``encoding`` is the Content-Encoding header; gzip counts wherever it is contained. Raises
    Refusal 413 above ``max_bytes``, compressed or not, 400 for a damaged stream, and what ``take`` raises, which is
    told of all bytes that are held, from whatever thread."""
    parts, received = [], 0
    async for chunk in chunks:
        received += len(chunk)
        if received > max_bytes:
            raise _too_large(max_bytes)
        take(len(chunk))
        parts.append(chunk)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    encoding = encoding.lower()
    if "gzip" in encoding:
        inflate = gunzip
    elif allow_zstd and "zstd" in encoding:
        inflate = unzstd
    else:
        return body
    plain = None
    if len(body) <= INLINE_BYTES:
        plain = inflate(body, min(INLINE_PLAIN_BYTES, max_bytes), _free)
        take(len(plain or b""))
    if plain is None:
        plain = await asyncio.to_thread(inflate, body, max_bytes, take)
    if plain is None:
        raise _too_large(max_bytes)
    return plain


def gunzip(body: bytes, max_bytes: int, take: Take = _free) -> bytes | None:
    """Inflate one or more gzip members; None where they hold more than ``max_bytes``. Raises Refusal 400 (not gzip,
    truncated, corrupt).

    The last four bytes say how long the plain body is; if that is true, one step does, and if not, several."""
    step = max(1 << 20, min(int.from_bytes(body[-4:], "little") + 1, max_bytes, _MOST_AT_ONCE))
    parts, size, members, position, fed = [], 0, 0, 0, b""
    try:
        while position < len(body) or fed:
            member = isal_zlib.decompressobj(31)
            members += 1
            while not member.eof:
                if not fed:
                    fed = body[position : position + _SLICE]
                    position += len(fed)
                room = min(step, max_bytes - size + 1)
                take(room)
                part = member.decompress(fed, room)
                take(len(part) - room)
                if not part and not fed and not member.eof:
                    raise Refusal(400, "the gzip body is truncated")
                fed = member.unconsumed_tail
                size += len(part)
                if size > max_bytes:
                    return None
                parts.append(part)
            fed = member.unused_data
            _count(members)
    except _BAD_GZIP as error:
        raise Refusal(400, f"the body is not valid gzip: {error}") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def unzstd(body: bytes, max_bytes: int, take: Take = _free) -> bytes | None:
    """Inflate Zstandard frames; None where they hold more than ``max_bytes``. Raises Refusal 400."""
    parts, size, frames, position = [], 0, 0, 0
    try:
        while position < len(body):
            frame = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
            frames += 1
            while not frame.eof:
                if position >= len(body):
                    raise Refusal(400, "the zstd body is truncated")
                part = frame.decompress(body[position : position + _ZSTD_SLICE])
                position += min(_ZSTD_SLICE, len(body) - position)
                size += len(part)
                if size > max_bytes:
                    return None
                take(len(part))
                parts.append(part)
            position -= len(frame.unused_data)
            _count(frames)
    except zstandard.ZstdError as error:
        raise Refusal(400, f"the body is not valid zstd: {error}") from error
    return b"".join(parts)


def _count(members: int) -> None:
    if members > MOST_MEMBERS:
        raise Refusal(400, f"the compressed body has more than {MOST_MEMBERS} members")


def _too_large(max_bytes: int) -> Refusal:
    return Refusal(413, f"the body is larger than {max_bytes} bytes")
