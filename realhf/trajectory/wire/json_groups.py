"""Fast path for JSON: one typed pass over the bytes of a group. The bytes are then kept unchanged,
except that integers in ``FLOATS`` become floats.

``integer_rows`` and ``float_rows`` take valid JSON (already parsed by msgspec) and return a result
only if it is certain from the bytes; otherwise they return None and the caller decodes the values.

For anything unusual (a value that needs coercion, an unknown or repeated key, an error)
``read_group`` returns None, and the lax path parses the group. Source: docs/reference/trajectory.md
2.6, 3.8, 3.11.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Any

import msgspec
import numpy as np
from isal import isal_zlib
from msgspec import UNSET, UnsetType

from realhf.trajectory.records import (
    FIELDS,
    FLOAT_ROWS,
    FLOATS,
    FREE_FIELDS,
    INTEGER_ROWS,
    REQUIRED,
    SCHEMA,
    Encoding,
    Incoming,
)

_COMMA, _OPEN, _CLOSE, _SPACE, _ZERO = b",[] 0"
_INTEGER_BLOCK = 8
"""Size in bytes of the aligned blocks that are checked for digits in integers. If no block consists
of digits only, no integer has more than 14 digits."""
_FLOAT_BLOCK = 128
"""Size of the blocks for floats. Without a block of digits only, no number has more than 254 digits
in a row, so a number without a positive exponent is finite."""


def integer_rows(raw: bytes) -> int | None:
    """Return the number of rows of a ``[[int]]`` if all integers certainly fit 64 bits; None if
    that is not certain."""
    if raw[-17:-2].isdigit():
        return None  # the last number may lie across the end of the last whole block
    return _count_rows(raw, raw.translate(None, b"0123456789-, "), _INTEGER_BLOCK)


def float_rows(raw: bytes) -> int | None:
    """Return the number of rows of a ``[[float]]`` (integers are allowed) if all numbers are
    certainly finite; None if that is not certain."""
    if b"e" in raw and raw.count(b"e") != raw.count(b"e-"):
        return None
    return _count_rows(raw, raw.translate(None, b"0123456789-., e"), _FLOAT_BLOCK)


def _count_rows(raw: bytes, brackets: bytes, block: int) -> int | None:
    """Return the number of rows, or None if it or the range of the numbers is not certain.
    ``brackets``: ``raw`` without its numbers."""
    rows = len(brackets) // 2 - 1
    if brackets != b"[" + b"[]" * rows + b"]":
        return None
    if rows == 0:
        return 0 if raw == b"[]" else None
    data = np.frombuffer(raw, np.uint8)
    sure = (
        raw.startswith(b"[[")
        and raw.endswith(b"]]")
        and _are_adjacent(data)
        and _no_block_of_digits(data, block)
    )
    return rows if sure else None


def _are_adjacent(data: np.ndarray) -> bool:
    """Return whether every row directly follows the previous one. A number between two rows would
    otherwise go unnoticed, because numbers are removed before the brackets are checked."""
    opens = np.flatnonzero(data == _OPEN)[2:]
    comma = opens - 1 - (data[opens - 1] == _SPACE)
    return bool(np.all((data[comma] == _COMMA) & (data[comma - 1] == _CLOSE)))


def _no_block_of_digits(data: np.ndarray, block: int) -> bool:
    """Return whether no aligned block of ``block`` bytes (a multiple of 8) consists of digits
    only."""
    others = (data[: len(data) // block * block] - np.uint8(_ZERO)) > 9
    words = others.view(np.uint64)
    return bool(words.all() if block == 8 else words.reshape(-1, block // 8).any(axis=1).all())


WHITE_SPACE = b" \t\r\n"
_QUOTE = ord('"')
_ROWS = dict.fromkeys(INTEGER_ROWS, integer_rows) | dict.fromkeys(FLOAT_ROWS, float_rows)
_WHOLE_FIELDS = [name for name in FIELDS if name not in (*_ROWS, *FLOATS, *FREE_FIELDS)]
_INTEGER = re.compile(rb"([\[,\s]-?[0-9]+)(?=[\s,\]])")


def convert_integers(raw: bytes) -> bytes:
    """Convert every integer in nested lists of numbers to a float. Trainers turn the lists into
    tensors, and an integer tensor has no mean."""
    if raw.count(b".") == raw.count(b",") + 1:
        return raw  # as many decimal points as numbers, and each number has at most one
    return _INTEGER.sub(rb"\1.0", raw)


@cache
def _decoders() -> tuple[msgspec.json.Decoder[Any], dict[str, msgspec.json.Decoder[Any]]]:
    """Return (decoder of a group, decoders of those fields that it leaves as bytes)."""
    kinds = {name: SCHEMA[name] if name in _WHOLE_FIELDS else msgspec.Raw for name in FIELDS}
    fields = [
        (name, kind) if name in REQUIRED else (name, kind | UnsetType, UNSET)
        for name, kind in kinds.items()
    ]
    group = msgspec.defstruct("Group", fields, forbid_unknown_fields=True)
    later = {name: msgspec.json.Decoder(SCHEMA[name]) for name in (*_ROWS, *FLOATS, *FREE_FIELDS)}
    return msgspec.json.Decoder(group), later


def read_group(data: bytes, max_nests: int = sys.maxsize) -> Incoming | None:
    """Read a group from ``data``, one JSON object. Returns None if the lax path has to parse it,
    also if the free fields contain more than ``max_nests`` objects and arrays."""
    group_decoder, decoders = _decoders()
    data = data.strip(WHITE_SPACE)
    try:
        group = group_decoder.decode(data)
        quotes = 0
        present = 0
        size = 0
        changed: dict[str, bytes] = {}
        for bit, name in enumerate(FIELDS):
            value = getattr(group, name)
            if value is UNSET:
                continue
            present |= 1 << bit
            quotes += 2
            if name in _ROWS:
                raw = bytes(value)
                rows = _ROWS[name](raw)
                if rows is None:
                    rows = len(decoders[name].decode(raw) or ())
                size = rows if name == "tokens" else size
            elif name in FLOATS:
                raw = bytes(value)
                decoders[name].decode(raw)
            elif name in decoders:
                raw = bytes(value)
                quotes += raw.count(b'"')
                if raw.count(b"{") + raw.count(b"[") > max_nests:
                    return None
                value = decoders[name].decode(raw)
                if name == "messages" and not complete_messages(value):
                    return None
            if name in FLOATS and (floats := convert_integers(bytes(value))) != bytes(value):
                changed[name] = floats
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if np.count_nonzero(np.frombuffer(data, np.uint8) == _QUOTE) != quotes:
        return (
            None  # a repeated key: there are more quotes than those of the keys and the free fields
        )
    if changed:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        data = _join_fields({name: changed.get(name) or bytes(raw) for name, raw in fields.items()})
    version = group.policy_version
    return Incoming(
        data,
        Encoding.JSON,
        present,
        isal_zlib.crc32(data),
        size,
        None if group.env_id is UNSET else group.env_id,
        None if version is UNSET else version,
    )


def read_known(data: bytes, max_nests: int = sys.maxsize) -> Incoming | None:
    """Read a group like ``read_group``, but drop unknown keys and use the last of repeated keys.
    Returns None if the lax path has to parse it."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return read_group(
        _join_fields({name: bytes(raw) for name, raw in fields.items() if name in FIELDS}),
        max_nests,
    )


def _join_fields(fields: dict[str, bytes]) -> bytes:
    return (
        b"{" + b",".join(b'"%s":%s' % (name.encode(), raw) for name, raw in fields.items()) + b"}"
    )


def complete_messages(rows: list[list[dict[str, Any]]] | None) -> bool:
    """Return whether every message has a role and a content of any type."""
    return all("role" in message and "content" in message for row in rows or () for message in row)


def split_list(data: bytes) -> list[bytes] | None:
    """Return the elements of a JSON array as bytes; None if it is not a well-formed array."""
    try:
        return [bytes(item) for item in msgspec.json.decode(data, type=list[msgspec.Raw])]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
