"""Compresses batches: each group by itself, in threads without the GIL.

The gzip segments are joined under one header with one checksum, since some clients do not read several members. Source:
docs/reference/trajectory.md 3.11.
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
"""Size up to which a batch is deflated on the event loop, because a thread costs more."""
RUN_BYTES = 128 << 10
"""Size up to which neighbouring pieces are handed to a thread together."""


def segment(pieces: Sequence[Piece], level: int) -> tuple[bytes, int, int]:
    """Deflate some pieces to raw blocks that end in a full flush, so that they stand alone. Return them with the
    checksum and the number of bytes of the pieces."""
    deflater, checksum = isal_zlib.compressobj(level, isal_zlib.DEFLATED, -15), 0
    packed = []
    for piece in pieces:
        packed.append(deflater.compress(piece))
        checksum = isal_zlib.crc32(piece, checksum)
    packed.append(deflater.flush(isal_zlib.Z_FULL_FLUSH))
    return b"".join(packed), checksum, sum(map(len, pieces))


async def gzip_pieces(pieces: Sequence[Piece], level: int) -> list[bytes]:
    """Compress all pieces to one gzip member. ``level``: 0 to 3."""
    if sum(map(len, pieces)) <= INLINE_BYTES:
        segments = [segment(pieces, level)]
    else:
        segments = await asyncio.gather(*(asyncio.to_thread(segment, run, level) for run in runs(pieces)))
    checksum, size = 0, 0
    for _, part, length in segments:
        checksum = isal_zlib.crc32_combine(checksum, part, length)
        size += length
    tail = struct.pack("<II", checksum, size & 0xFFFFFFFF)
    return [_HEADER, *(packed for packed, _, _ in segments), _LAST_BLOCK, tail]


def runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group neighbours until they are worth a thread."""
    found: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if room <= 0:
            found.append([])
            room = RUN_BYTES
        found[-1].append(piece)
        room -= len(piece)
    return found


async def zstd_pieces(pieces: Sequence[Piece], level: int) -> list[bytes]:
    """Compress each run of pieces to one Zstandard frame; readers take the frames as one stream."""
    return list(await asyncio.gather(*(asyncio.to_thread(_zstd, b"".join(run), level) for run in runs(pieces))))


def _zstd(piece: Piece, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=max(1, level)).compress(piece)
