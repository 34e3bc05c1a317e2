"""Serves large answers of a data plane in pieces: the consumer asks for each of them, as fast as it can take them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from realhf.transport.errors import ProtocolError

PIECE_BYTES = 64 << 20
"""Size of the largest piece."""
NUMBER_BYTES = 16
"""Size of the number of a transfer, which nobody can guess."""
MOST_TRANSFERS = 64
"""Answers that are being fetched at once; the one that was used longest ago makes room for another."""
IDLE_S = 120.0
"""How long a consumer may be silent before its answer is forgotten, in seconds."""


@dataclass
class _Transfer:
    frames: Sequence[memoryview]
    ids: frozenset[str]
    used: float = field(default_factory=time.monotonic)


class Outgoing:
    """Keeps the answers that consumers fetch. They are views of the store's tensors, not copies. Not thread-safe."""

    def __init__(self) -> None:
        self._transfers: dict[bytes, _Transfer] = {}

    def __len__(self) -> int:
        """Count the answers that are being fetched."""
        return len(self._transfers)

    def open(self, frames: Sequence[bytes | memoryview], ids: Sequence[str]) -> bytes:
        """Keep an answer about these samples; return its number."""
        now = time.monotonic()
        for number in [number for number, held in self._transfers.items() if now - held.used > IDLE_S]:
            del self._transfers[number]
        while len(self._transfers) >= MOST_TRANSFERS:
            del self._transfers[min(self._transfers, key=lambda number: self._transfers[number].used)]
        views = [memoryview(frame).cast("B") for frame in frames]
        number = os.urandom(NUMBER_BYTES)
        self._transfers[number] = _Transfer(views, frozenset(ids))
        return number

    def piece(self, number: bytes, frame: int, start: int, length: int) -> memoryview | None:
        """Return a piece of an answer; None when the answer is no longer there. Raises ProtocolError for one that it
        does not have."""
        held = self._transfers.get(number)
        if held is None:
            return None
        held.used = time.monotonic()
        if not 0 <= frame < len(held.frames) or start < 0 or not 0 < length <= PIECE_BYTES:
            raise ProtocolError(f"piece {frame}:{start}:{length} of {len(held.frames)} frames")
        view = held.frames[frame]
        if start + length > view.nbytes:
            raise ProtocolError(f"piece {frame}:{start}:{length} of a frame of {view.nbytes} bytes")
        return view[start : start + length]

    def close(self, number: bytes) -> None:
        """Forget an answer that was fetched."""
        self._transfers.pop(number, None)

    def forget(self, ids: frozenset[str]) -> None:
        """Forget answers about samples that were cleared."""
        for number in [number for number, held in self._transfers.items() if held.ids & ids]:
            del self._transfers[number]
