"""Parsing of groups in MessagePack: the same maps as in JSON, except that fields with rows of
numbers may be raw tensors.

A tensor is ``{"__t__": 1, "dtype": "i4|i8|f2|f4|f8", "lens": u32 LE each, "data": LE row-major}``.
Source: docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal

import msgspec
import numpy as np
from isal import isal_zlib

from realhf.trajectory.records import (
    FIELDS,
    FLOAT_ROWS,
    FLOATS,
    INTEGER_ROWS,
    REQUIRED,
    SCHEMA,
    Encoding,
    Incoming,
    invalid,
)
from realhf.trajectory.wire.json_groups import complete_messages
from realhf.web.refusal import Refusal

Loc = list[str | int]
INTEGER_DTYPES = ("i4", "i8")


class Tensor(msgspec.Struct, forbid_unknown_fields=True):
    """Rows of numbers of one dtype, which may differ in length."""

    t: Literal[1] = msgspec.field(name="__t__")
    """Marker of a tensor."""
    dtype: Literal["i4", "i8", "f2", "f4", "f8"]
    """Little-endian element type."""
    lens: memoryview
    """Length of each row, uint32 little-endian."""
    data: memoryview
    """Numbers of all rows, concatenated."""

    def lengths(self) -> np.ndarray:
        """Return the row lengths, uint32 (n,). Raises ValueError if the buffer's size is not a
        multiple of 4 bytes."""
        return np.frombuffer(self.lens, "<u4")

    def values(self) -> np.ndarray:
        """Return the numbers of all rows as one flat array. Raises ValueError if the lengths do not
        add up to the data."""
        flat = np.frombuffer(self.data, f"<{self.dtype}")
        if int(self.lengths().sum(dtype=np.uint64)) != len(flat):
            raise ValueError(
                f"lens say {self.lengths().sum(dtype=np.uint64)} values and data holds {len(flat)}"
            )
        return flat


class RowsDecoder:
    """Decoder of a field with rows: a tensor (a MessagePack map) or plain lists (an array), told
    apart by the first byte."""

    def __init__(self, lists: Any) -> None:
        self._lists = msgspec.msgpack.Decoder(lists)
        self._tensor = msgspec.msgpack.Decoder(Tensor)

    def decode(self, raw: msgspec.Raw) -> Any:
        """Return the value of one field. Raises msgspec's errors for malformed values."""
        first = memoryview(raw)[0]
        is_map = 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)
        return (self._tensor if is_map else self._lists).decode(raw)


@cache
def decoders() -> dict[str, RowsDecoder | msgspec.msgpack.Decoder[Any]]:
    """Return the decoder of each field, by field name."""
    return {
        name: (RowsDecoder if name in (*INTEGER_ROWS, *FLOAT_ROWS) else msgspec.msgpack.Decoder)(
            form
        )
        for name, form in SCHEMA.items()
    }


def read_group(raw: bytes | memoryview, loc: Loc) -> Incoming:
    """Read a group from a MessagePack map. Raises Refusal 422; ``loc`` is the group's location in
    the request, for the error."""
    try:
        fields = msgspec.msgpack.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise invalid(
            loc, f"not a MessagePack map with text keys: {error}", "msgpack_invalid"
        ) from None
    for name in REQUIRED:
        if name not in fields:
            raise invalid([*loc, name], "Field required", "missing")
    parts = []
    present = 0
    values = {}
    for bit, name in enumerate(FIELDS):
        if name in fields:
            values[name] = check_field(name, fields[name], [*loc, name])
            present |= 1 << bit
            # Its integers have been converted to floats by now.
            whole = name in FLOATS and isinstance(values[name], list)
            parts += (
                msgspec.msgpack.encode(name),
                msgspec.msgpack.encode(values[name]) if whole else bytes(fields[name]),
            )
    data = b"".join(parts)
    tokens = values["tokens"]
    size = len(tokens.lens) // 4 if isinstance(tokens, Tensor) else len(tokens)
    return Incoming(
        data,
        Encoding.MSGPACK,
        present,
        isal_zlib.crc32(data),
        size,
        values.get("env_id"),
        values.get("policy_version"),
    )


def check_field(name: str, raw: msgspec.Raw, loc: Loc) -> Any:
    """Return the validated value of one field. Raises Refusal 422."""
    try:
        value = decoders()[name].decode(raw)
        if isinstance(value, Tensor):
            _check_tensor(value, name)
        elif name == "messages" and not complete_messages(value):
            raise ValueError("each message needs 'role' and 'content'")
        if not isinstance(value, Tensor) and name not in (
            "env_id",
            "policy_version",
            *INTEGER_ROWS,
        ):
            _check_plain(value, loc)
    except Refusal:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise invalid(loc, str(error) or "nested too deeply") from None
    return value


def _check_tensor(tensor: Tensor, name: str) -> None:
    if (tensor.dtype in INTEGER_DTYPES) != (name in INTEGER_ROWS):
        raise ValueError(f"dtype {tensor.dtype} does not fit this field")
    flat = tensor.values()
    if tensor.dtype not in INTEGER_DTYPES and not np.isfinite(flat).all():
        raise ValueError("numbers must be finite")


def _check_plain(value: Any, loc: Loc) -> None:
    """Raise Refusal 422 for values that JSON cannot represent: binary, extension types, NaN."""
    if isinstance(value, list):
        if _finite_floats(value):
            return
        for index, item in enumerate(value):
            _check_plain(item, [*loc, index])
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise invalid(loc, "keys must be text")
            _check_plain(item, [*loc, key])
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise invalid(loc, "Input should be a finite number", "finite_number")
    elif value is not None and not isinstance(value, (str, int)):
        raise invalid(loc, f"a value of type {type(value).__name__} has no JSON form")


def _finite_floats(values: list[Any]) -> bool:
    return bool(values) and set(map(type, values)) == {float} and all(map(math.isfinite, values))


def split_list(body: bytes, loc: Loc) -> list[bytes]:
    """Return the elements of a MessagePack array. Raises Refusal 422."""
    try:
        return [bytes(item) for item in msgspec.msgpack.decode(body, type=list[msgspec.Raw])]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise invalid(loc, f"not a MessagePack array: {error}", "msgpack_invalid") from None
