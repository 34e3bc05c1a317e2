"""Encoding of responses that contain groups. A group's bytes are converted only if it was pushed in
another encoding, then joined and compressed.

Compressed segments are joined under one gzip header with one checksum, because some clients read
only one gzip member. Source: docs/reference/trajectory.md 2.1, 2.6, 3.11.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import zstandard
from isal import isal_zlib

from realhf.trajectory.records import (
    FIELDS,
    FLOAT_ROWS,
    INTEGER_ROWS,
    N_STOCK_FIELDS,
    SCHEMA,
    Encoding,
    Payload,
)
from realhf.trajectory.wire.msgpack_groups import Tensor, decoders

GZIP_FROM_BYTES = 1000
"""Size from which answers are compressed."""


async def encode_batch(
    payloads: Sequence[Payload], data: Sequence[bytes], *, msgpack: bool, coding: str, level: int
) -> tuple[list[bytes | memoryview], str]:
    """Return (pieces of a batch response, its Content-Encoding). ``coding``: the coding that the
    client prefers (gzip, zstd or ""). ``level``: compression level, 0 to 3."""
    if all((payload.encoding == Encoding.MSGPACK) == msgpack for payload in payloads):
        parts = [(payload.present, group) for payload, group in zip(payloads, data, strict=True)]
    else:
        parts = await asyncio.to_thread(_convert, payloads, data, msgpack)
    pieces: list[bytes | memoryview] = msgpack_pieces(parts) if msgpack else json_pieces(parts)
    if not coding or sum(map(len, pieces)) < GZIP_FROM_BYTES:
        return pieces, ""
    if coding == "zstd":
        return [*await zstd_pieces(pieces, level)], coding
    return [*await gzip_pieces(pieces, level)], coding


async def encode_group(payload: Payload, data: bytes, *, msgpack: bool) -> bytes:
    """Return one group with all keys of the original server."""
    if (payload.encoding == Encoding.MSGPACK) == msgpack:
        part = payload.present, data
    else:
        [part] = await asyncio.to_thread(_convert, [payload], [data], msgpack)
    return msgpack_group(part) if msgpack else json_group(part)


def _convert(payloads: Sequence[Payload], data: Sequence[bytes], msgpack: bool) -> list[Part]:
    """Return (present, canonical bytes) of each group in the encoding of the response."""
    parts = []
    for payload, group in zip(payloads, data, strict=True):
        if (payload.encoding == Encoding.MSGPACK) != msgpack:
            group = to_msgpack(group) if msgpack else to_json(payload.present, group)
        parts.append((payload.present, group))
    return parts


Piece = bytes | memoryview
Part = tuple[int, bytes]
"""``present`` (see ``records.Payload``) and canonical bytes of one group, in the encoding of the
response."""


def json_pieces(parts: Sequence[Part]) -> list[Piece]:
    """Return ``{"batch":[...]}`` as pieces, one for each group and one for the end."""
    pieces: list[Piece] = []
    for index, part in enumerate(parts):
        pieces.append((b"," if index else b'{"batch":[') + json_group(part))
    return [*pieces, b"]}" if parts else b'{"batch":[]}']


def json_group(part: Part) -> bytes:
    """Return one group with all keys of the original server, as a JSON object."""
    present, data = part
    return b"".join((memoryview(data)[:-1], _json_nulls(present)))


def msgpack_pieces(parts: Sequence[Part]) -> list[Piece]:
    """Return ``{"batch": [...]}`` in MessagePack, as pieces."""
    head = b"\x81" + msgspec.msgpack.encode("batch") + _array_header(len(parts))
    return [head, *(msgpack_group(part) for part in parts)]


def msgpack_group(part: Part) -> bytes:
    """Return one group with all keys of the original server, as a MessagePack map."""
    present, data = part
    keys = N_STOCK_FIELDS + (present >> N_STOCK_FIELDS & 1)
    header = bytes([0x80 | keys]) if keys < 16 else b"\xde" + keys.to_bytes(2, "big")
    return b"".join((header, data, _msgpack_nulls(present)))


@lru_cache(maxsize=256)
def _json_nulls(present: int) -> bytes:
    return b"".join(b',"%s":null' % name.encode() for name in _missing_fields(present)) + b"}"


@lru_cache(maxsize=256)
def _msgpack_nulls(present: int) -> bytes:
    return b"".join(msgspec.msgpack.encode(name) + b"\xc0" for name in _missing_fields(present))


def _missing_fields(present: int) -> list[str]:
    return [name for bit, name in enumerate(FIELDS[:N_STOCK_FIELDS]) if not present >> bit & 1]


def _array_header(length: int) -> bytes:
    if length < 16:
        return bytes([0x90 | length])
    return (
        b"\xdc" + length.to_bytes(2, "big")
        if length < 1 << 16
        else b"\xdd" + length.to_bytes(4, "big")
    )


def to_json(present: int, data: bytes) -> bytes:
    """Convert a group that was pushed as MessagePack pairs to a JSON object with the same keys."""
    header = present.bit_count()
    fields = msgspec.msgpack.decode(
        b"\xde" + header.to_bytes(2, "big") + data, type=dict[str, msgspec.Raw]
    )
    values = {}
    for name in (name for bit, name in enumerate(FIELDS) if present >> bit & 1):
        value = decoders()[name].decode(fields[name])
        values[name] = rows(value) if isinstance(value, Tensor) else value
    return msgspec.json.encode(values)


def to_msgpack(data: bytes) -> bytes:
    """Convert a group that was pushed as JSON to MessagePack pairs: i4 or i8 for integers, f8 for
    floats. An integer beyond 64 bits, which MessagePack cannot represent, becomes a decimal
    string."""
    parts = []
    for name, raw in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items():
        parts += (msgspec.msgpack.encode(name), _pack_field(name, bytes(raw)))
    return b"".join(parts)


def _pack_field(name: str, raw: bytes) -> bytes:
    value: Any
    try:
        if raw == b"null" or name not in (*INTEGER_ROWS, *FLOAT_ROWS):
            value = json.loads(raw)
        elif name in INTEGER_ROWS:
            value = integer_tensor(msgspec.json.decode(raw, type=SCHEMA[name]))
        else:
            value = _tensor(msgspec.json.decode(raw, type=list[list[float]]), np.dtype("<f8"))
        return msgspec.msgpack.encode(value)
    except (OverflowError, msgspec.ValidationError):
        return msgspec.msgpack.encode(json.loads(raw, parse_int=_integer_or_text))


def _integer_or_text(digits: str) -> int | str:
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else digits


def rows(tensor: Tensor) -> list[list[int]] | list[list[float]]:
    """Return a tensor's rows as lists of Python numbers; the conversion is exact for every
    dtype."""
    flat = tensor.values().tolist()
    ends = np.cumsum(tensor.lengths(), dtype=np.int64).tolist()
    return (
        [flat[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []
    )


def integer_tensor(values: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return rows of integers as a tensor map with the smallest sufficient dtype."""
    tensor = _tensor(values, np.dtype("<i8"))
    flat = np.frombuffer(tensor["data"], "<i8")
    if not flat.size or (flat.min() >= -(2**31) and flat.max() < 2**31):
        tensor |= {"dtype": "i4", "data": flat.astype("<i4").tobytes()}
    return tensor


def _tensor(values: Sequence[Sequence[float]], dtype: np.dtype[Any]) -> dict[str, Any]:
    flat = np.fromiter(chain.from_iterable(values), dtype)
    return {
        "__t__": 1,
        "dtype": dtype.str[1:],
        "lens": np.array([len(row) for row in values], "<u4").tobytes(),
        "data": flat.tobytes(),
    }


_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_LAST_BLOCK = b"\x03\x00"
INLINE_BYTES = 64 << 10
"""Largest batch that is compressed on the event loop; for a small batch a thread would cost
more."""
RUN_BYTES = 128 << 10
"""Adjacent pieces up to this size are compressed together in one thread."""


def segment(pieces: Sequence[Piece], level: int) -> tuple[bytes, int, int]:
    """Compress pieces to raw deflate blocks that end in a full flush, so that they are independent.
    Returns (blocks, CRC-32, plain size)."""
    deflater = isal_zlib.compressobj(level, isal_zlib.DEFLATED, -15)
    checksum = 0
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
        segments = await asyncio.gather(
            *(asyncio.to_thread(segment, run, level) for run in runs(pieces))
        )
    checksum = 0
    size = 0
    for _, part, length in segments:
        checksum = isal_zlib.crc32_combine(checksum, part, length)
        size += length
    tail = struct.pack("<II", checksum, size & 0xFFFFFFFF)
    return [_HEADER, *(packed for packed, _, _ in segments), _LAST_BLOCK, tail]


def runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group adjacent pieces so that each group is large enough to be worth a thread."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if room <= 0:
            groups.append([])
            room = RUN_BYTES
        groups[-1].append(piece)
        room -= len(piece)
    return groups


async def zstd_pieces(pieces: Sequence[Piece], level: int) -> list[bytes]:
    """Compress each run of pieces to one Zstandard frame; decoders read the frames as one
    stream."""
    return list(
        await asyncio.gather(
            *(asyncio.to_thread(_zstd, b"".join(run), level) for run in runs(pieces))
        )
    )


def _zstd(piece: Piece, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=max(1, level)).compress(piece)
