"""Assembles batches from stored bytes: groups are joined as they came, absent keys are added, nothing is encoded again.

Source: docs/reference/trajectory.md 2.6, 3.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from realhf.trajectory.base.records import FIELDS, N_STOCK_FIELDS

Piece = bytes | memoryview
Part = tuple[int, bytes]
"""``present`` (see ``records.Payload``) and canonical bytes of one group, in the encoding of the response."""


def json_pieces(parts: Sequence[Part]) -> list[Piece]:
    """Return ``{"batch":[...]}`` as pieces, one for each group and one for the end."""
    pieces: list[Piece] = []
    for index, part in enumerate(parts):
        pieces.append((b"," if index else b'{"batch":[') + json_group(part))
    return [*pieces, b"]}" if parts else b'{"batch":[]}']


def json_group(part: Part) -> bytes:
    """Return one group with all stock keys."""
    present, data = part
    return b"".join((memoryview(data)[:-1], _json_rest(present)))


def msgpack_pieces(parts: Sequence[Part]) -> list[Piece]:
    """Return ``{"batch": [...]}`` in MessagePack, as pieces."""
    head = b"\x81" + msgspec.msgpack.encode("batch") + _array_header(len(parts))
    return [head, *(msgpack_group(part) for part in parts)]


def msgpack_group(part: Part) -> bytes:
    """Return one group with all stock keys, as a map."""
    present, data = part
    keys = N_STOCK_FIELDS + (present >> N_STOCK_FIELDS & 1)
    header = bytes([0x80 | keys]) if keys < 16 else b"\xde" + keys.to_bytes(2, "big")
    return b"".join((header, data, _msgpack_rest(present)))


@lru_cache(maxsize=256)
def _json_rest(present: int) -> bytes:
    return b"".join(b',"%s":null' % name.encode() for name in _absent(present)) + b"}"


@lru_cache(maxsize=256)
def _msgpack_rest(present: int) -> bytes:
    return b"".join(msgspec.msgpack.encode(name) + b"\xc0" for name in _absent(present))


def _absent(present: int) -> list[str]:
    return [name for bit, name in enumerate(FIELDS[:N_STOCK_FIELDS]) if not present >> bit & 1]


def _array_header(length: int) -> bytes:
    if length < 16:
        return bytes([0x90 | length])
    return b"\xdc" + length.to_bytes(2, "big") if length < 1 << 16 else b"\xdd" + length.to_bytes(4, "big")
