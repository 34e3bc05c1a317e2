"""Moves a large answer in pieces: its owner keeps it until the consumer has asked for each of them, over several
connections and as fast as it can take them. The consumer goes on where a connection broke.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from realhf.transport.codec import MAX_FRAME_BYTES, MAX_FRAMES, MAX_MESSAGE_BYTES
from realhf.transport.errors import PeerLost, ProtocolError

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


LANES = 4
"""Connections over which pieces come, each with one piece on its way: what a consumer has asked for is never more."""
RETRIES = 3
"""How often in a row connections may break without one piece arriving between."""
ALIGNMENT = 64


class Piece(NamedTuple):
    """Bytes ``start`` to ``start + length`` of a frame."""

    frame: int
    start: int
    length: int


Ask = Callable[[int, Piece, memoryview], None]
"""(lane, piece, into) fills ``into`` with the piece. Raises PeerLost, which is tried again, and DataError."""
Take = Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]]
"""Bytes -> memory of this size, aligned, of any content."""


def _fresh(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.empty(nbytes, dtype=np.uint8)


def fetch_pieces(sizes: Sequence[Any], ask: Ask, take: Take = _fresh) -> list[memoryview]:
    """Return frames of these sizes, writable and aligned, in memory that ``take`` gives. Raises what ``ask`` raises,
    PeerLost after ``RETRIES`` broken connections in a row, and ProtocolError for sizes that no sample has, before
    memory is allocated."""
    return _Fetch(_checked(sizes), ask, take).run()


def fetch_whole(nbytes: int, ask: Ask) -> memoryview:
    """Return one frame of any size; otherwise as ``fetch_pieces``."""
    return _Fetch([nbytes], ask, _fresh).run()[0]


def _checked(sizes: Sequence[Any]) -> list[int]:
    if not all(type(size) is int and 0 <= size <= MAX_FRAME_BYTES for size in sizes) or len(sizes) > MAX_FRAMES:
        raise ProtocolError("bad frame sizes in an answer")
    if sum(sizes) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"an answer of {sum(sizes)} bytes")
    return list(sizes)


class _Fetch:
    """Is one fetch. Lanes are threads, the calling one among them; they take pieces until none is left or one of them
    fails."""

    def __init__(self, sizes: list[int], ask: Ask, take: Take) -> None:
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        whole = memoryview(take(starts[-1]))  # pyright: ignore[reportArgumentType]
        self._frames = [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self._ask = ask
        self._lock = threading.Lock()
        self._todo = deque(
            Piece(frame, start, min(PIECE_BYTES, size - start))
            for frame, size in enumerate(sizes)
            for start in range(0, size, PIECE_BYTES)
        )
        self._broken = 0
        self._failure: BaseException | None = None

    def run(self) -> list[memoryview]:
        """Fetch everything."""
        count = min(LANES, len(self._todo))
        others = [threading.Thread(target=self._work, args=(lane,), daemon=True) for lane in range(1, count)]
        for thread in others:
            thread.start()
        self._work(0)
        for thread in others:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return self._frames

    def _work(self, lane: int) -> None:
        while (piece := self._next()) is not None:
            try:
                self._ask(lane, piece, self._frames[piece.frame][piece.start : piece.start + piece.length])
                with self._lock:
                    self._broken = 0
            except PeerLost as error:
                self._again(piece, error)
            except BaseException as error:
                self._fail(error)

    def _next(self) -> Piece | None:
        with self._lock:
            return self._todo.popleft() if self._todo and self._failure is None else None

    def _again(self, piece: Piece, error: PeerLost) -> None:
        """Leave a piece to any lane that works; all lanes break at once where the peer does, which counts once."""
        with self._lock:
            self._broken += 1
            if self._broken > RETRIES * LANES:
                self._failure = self._failure or error
            self._todo.appendleft(piece)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
