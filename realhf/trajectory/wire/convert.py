"""Converts between the encodings without loss: tensors become lists of numbers, lists of rows become tensors.

Source: docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from realhf.trajectory.base.records import FIELDS
from realhf.trajectory.wire.json_groups import Int64
from realhf.trajectory.wire.msgpack_groups import FLOAT_ROWS, INTEGER_ROWS, Tensor, decoders


def to_json(present: int, data: bytes) -> bytes:
    """Return the JSON object of a group that was pushed as MessagePack pairs; the same keys are present."""
    header = present.bit_count()
    fields = msgspec.msgpack.decode(b"\xde" + header.to_bytes(2, "big") + data, type=dict[str, msgspec.Raw])
    values = {}
    for name in (name for bit, name in enumerate(FIELDS) if present >> bit & 1):
        value = decoders()[name].decode(fields[name])
        values[name] = rows(value) if isinstance(value, Tensor) else value
    return msgspec.json.encode(values)


def to_msgpack(data: bytes) -> bytes:
    """Return the MessagePack pairs of a group that was pushed as JSON: i4 or i8 for integers, f8 for floats. An integer
    beyond 64 bits, which MessagePack cannot represent, becomes its decimal text."""
    parts = []
    for name, raw in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items():
        parts += (msgspec.msgpack.encode(name), _packed(name, bytes(raw)))
    return b"".join(parts)


def _packed(name: str, raw: bytes) -> bytes:
    value: Any
    try:
        if raw == b"null" or name not in (*INTEGER_ROWS, *FLOAT_ROWS):
            value = json.loads(raw)
        elif name in INTEGER_ROWS:
            value = integer_tensor(msgspec.json.decode(raw, type=list[list[Int64]]))
        else:
            value = _tensor(msgspec.json.decode(raw, type=list[list[float]]), np.dtype("<f8"))
        return msgspec.msgpack.encode(value)
    except (OverflowError, msgspec.ValidationError):
        return msgspec.msgpack.encode(json.loads(raw, parse_int=_integer_or_text))


def _integer_or_text(digits: str) -> int | str:
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else digits


def rows(tensor: Tensor) -> list[list[int]] | list[list[float]]:
    """Return lists of Python numbers; every dtype is exact in them."""
    flat, ends = tensor.values().tolist(), np.cumsum(tensor.lengths(), dtype=np.int64).tolist()
    return [flat[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


def integer_tensor(values: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Convert rows of integers to a tensor map of the smallest dtype that holds them."""
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
