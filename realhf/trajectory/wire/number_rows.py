"""Checks rows of numbers by their bytes, without making a single number, which is most of the cost of reading a group.

Both functions take valid JSON (msgspec has walked through it) and answer only where the bytes leave no doubt. With None
the caller has to decode it. Source: docs/reference/trajectory.md 2.6, 3.8.
"""

from __future__ import annotations

import numpy as np

_COMMA, _OPEN, _CLOSE, _SPACE, _ZERO = b",[] 0"
_INTEGER_BLOCK = 8
"""Size of aligned blocks. Where no block of that many bytes is all digits, no integer has more than 14 of them."""
_FLOAT_BLOCK = 128
"""The same for floats, with 254 digits: without a positive exponent such a number is finite."""


def integer_rows(raw: bytes) -> int | None:
    """Count the rows of a ``[[int]]`` whose integers surely fit 64 bits; None if that is in doubt."""
    if raw[-17:-2].isdigit():
        return None  # the last number may lie across the end of the last whole block
    return _rows(raw, raw.translate(None, b"0123456789-, "), _INTEGER_BLOCK)


def float_rows(raw: bytes) -> int | None:
    """Count the rows of a ``[[float]]`` whose numbers are surely finite (integers are allowed); None if in doubt."""
    if b"e" in raw and raw.count(b"e") != raw.count(b"e-"):
        return None
    return _rows(raw, raw.translate(None, b"0123456789-., e"), _FLOAT_BLOCK)


def _rows(raw: bytes, brackets: bytes, block: int) -> int | None:
    """Count the rows. ``brackets``: what is left of ``raw`` without its numbers."""
    rows = len(brackets) // 2 - 1
    if brackets != b"[" + b"[]" * rows + b"]":
        return None
    if rows == 0:
        return 0 if raw == b"[]" else None
    data = np.frombuffer(raw, np.uint8)
    sure = raw.startswith(b"[[") and raw.endswith(b"]]") and _adjacent(data) and _no_block_of_digits(data, block)
    return rows if sure else None


def _adjacent(data: np.ndarray) -> bool:
    """Return whether every row but the first follows another one directly; a number between rows would hide there."""
    opens = np.flatnonzero(data == _OPEN)[2:]
    comma = opens - 1 - (data[opens - 1] == _SPACE)
    return bool(np.all((data[comma] == _COMMA) & (data[comma - 1] == _CLOSE)))


def _no_block_of_digits(data: np.ndarray, block: int) -> bool:
    """Return whether no aligned block of ``block`` bytes, a multiple of 8, consists of digits only."""
    others = (data[: len(data) // block * block] - np.uint8(_ZERO)) > 9
    words = others.view(np.uint64)
    return bool(words.all() if block == 8 else words.reshape(-1, block // 8).any(axis=1).all())
