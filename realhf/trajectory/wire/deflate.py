"""Compressed batches: each group is deflated by itself, in threads without the GIL, and the segments are joined
under one gzip header with one checksum, since some clients do not read several members. Source: trajectory
specification 3.11.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

import zstandard
from isal import isal_zlib

from realhf.trajectory.wire.splice import Piece

_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_LAST_BLOCK = b"\x03\x00"
INLINE_BYTES = 64 << 10


def segment(piece: Piece, level: int) -> bytes:
    """Raw deflate of one piece, ending in a full flush: a self-contained run of blocks."""
    deflater = isal_zlib.compressobj(level, isal_zlib.DEFLATED, -15)
    return deflater.compress(piece) + deflater.flush(isal_zlib.Z_FULL_FLUSH)


async def gzip_pieces(pieces: Sequence[Piece], level: int) -> list[bytes]:
    """One gzip member of all pieces together. ``level``: 0 to 3."""
    if sum(map(len, pieces)) <= INLINE_BYTES:
        segments = [segment(piece, level) for piece in pieces]
    else:
        segments = await asyncio.gather(*(asyncio.to_thread(segment, piece, level) for piece in pieces))
    checksum, size = 0, 0
    for piece in pieces:
        checksum = isal_zlib.crc32(piece, checksum)
        size += len(piece)
    return [_HEADER, *segments, _LAST_BLOCK, struct.pack("<II", checksum, size & 0xFFFFFFFF)]


async def zstd_pieces(pieces: Sequence[Piece], level: int) -> list[bytes]:
    """One Zstandard frame for each piece; readers take them as one stream."""
    return list(await asyncio.gather(*(asyncio.to_thread(_zstd, piece, level) for piece in pieces)))


def _zstd(piece: Piece, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=max(1, level)).compress(piece)
