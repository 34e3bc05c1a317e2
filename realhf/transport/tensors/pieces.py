"""Fetches a large answer in pieces over several connections, and goes on where a connection broke."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from realhf.transport.codec import MAX_FRAME_BYTES, MAX_FRAMES, MAX_MESSAGE_BYTES
from realhf.transport.errors import PeerLost, ProtocolError
from realhf.transport.tensors.outgoing import PIECE_BYTES

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
