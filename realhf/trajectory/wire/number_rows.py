"""Rows of numbers told from their bytes, without making a single number of them: most of the cost of reading a group.

Both functions take valid JSON (msgspec has walked through it) and answer only where the bytes leave no doubt; None
means: decode it. Source: trajectory specification 2.6, 3.8.
"""

from __future__ import annotations

import numpy as np

LONGEST_INTEGER = 18
"""Of so many characters each number fits 64 bits."""
LONGEST_FLOAT = 300
"""Of so many characters, and without a positive exponent, each number is finite."""
_COMMA, _OPEN, _CLOSE, _SPACE = b",[] "


def integer_rows(raw: bytes) -> int | None:
    """Number of rows of a ``[[int]]`` whose integers surely fit 64 bits."""
    return _rows(raw, raw.translate(None, b"0123456789-, "), LONGEST_INTEGER)


def float_rows(raw: bytes) -> int | None:
    """Number of rows of a ``[[float]]`` whose numbers are surely finite; integers are welcome."""
    if b"e" in raw and raw.count(b"e") != raw.count(b"e-"):
        return None
    return _rows(raw, raw.translate(None, b"0123456789-., e"), LONGEST_FLOAT)


def _rows(raw: bytes, brackets: bytes, longest: int) -> int | None:
    """``brackets``: what is left of ``raw`` without its numbers."""
    rows = len(brackets) // 2 - 1
    if brackets != b"[" + b"[]" * rows + b"]":
        return None
    if rows == 0:
        return 0 if raw == b"[]" else None
    data = np.frombuffer(raw, np.uint8)
    if not raw.startswith(b"[[") or not raw.endswith(b"]]") or not _adjacent(data):
        return None
    commas = np.flatnonzero(data == _COMMA)
    widest = int(np.diff(commas, prepend=-1, append=len(raw)).max()) - 1
    return rows if widest <= longest else None


def _adjacent(data: np.ndarray) -> bool:
    """Every row but the first follows another one directly; a number between rows would hide there."""
    opens = np.flatnonzero(data == _OPEN)[2:]
    comma = opens - 1 - (data[opens - 1] == _SPACE)
    return bool(np.all((data[comma] == _COMMA) & (data[comma - 1] == _CLOSE)))
