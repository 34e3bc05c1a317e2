"""From one encoding to the other without loss: tensors become lists of numbers, lists of rows become tensors.

Source: trajectory specification 3.11 ("cross-format is lossless").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from realhf.trajectory.records import FIELDS
from realhf.trajectory.wire.msgpack_groups import FLOAT_ROWS, INTEGER_ROWS, Tensor, decoders


def to_json(present: int, data: bytes) -> bytes:
    """JSON object of a group that was pushed as MessagePack pairs; the same keys are present."""
    header = present.bit_count()
    fields = msgspec.msgpack.decode(b"\xde" + header.to_bytes(2, "big") + data, type=dict[str, msgspec.Raw])
    values = {}
    for name in (name for bit, name in enumerate(FIELDS) if present >> bit & 1):
        value = decoders()[name].decode(fields[name])
        values[name] = rows(value) if isinstance(value, Tensor) else value
    return msgspec.json.encode(values)


def to_msgpack(data: bytes) -> bytes:
    """MessagePack pairs of a group that was pushed as JSON: i4 or i8 for integers, f8 for floats. An integer beyond
    64 bits, which MessagePack cannot say, becomes its decimal text."""
    parts = []
    for name, value in json.loads(data).items():
        if value is not None and name in INTEGER_ROWS:
            value = integer_tensor(value)
        elif value is not None and name in FLOAT_ROWS:
            value = _tensor(value, np.dtype("<f8"))
        parts += (msgspec.msgpack.encode(name), _packed(value))
    return b"".join(parts)


def rows(tensor: Tensor) -> list[list[int]] | list[list[float]]:
    """Lists of Python numbers; every dtype is exact in them."""
    flat, ends = tensor.values().tolist(), np.cumsum(tensor.lengths(), dtype=np.int64).tolist()
    return [flat[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


def integer_tensor(values: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Rows of integers as a tensor map of the smallest dtype that holds them."""
    tensor = _tensor(values, np.dtype("<i8"))
    flat = np.frombuffer(tensor["data"], "<i8")
    if not flat.size or (flat.min() >= -(2**31) and flat.max() < 2**31):
        tensor |= {"dtype": "i4", "data": flat.astype("<i4").tobytes()}
    return tensor


def _tensor(values: Sequence[Sequence[float]], dtype: np.dtype[Any]) -> dict[str, Any]:
    flat = [number for row in values for number in row]
    return {"__t__": 1, "dtype": dtype.str[1:], "lens": np.array([len(row) for row in values], "<u4").tobytes(),
            "data": np.array(flat, dtype).tobytes()}  # fmt: skip


def _packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:
        return msgspec.msgpack.encode(_with_texts(value))


def _with_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item) for item in value]
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value
