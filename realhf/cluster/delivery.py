"""Brings files to a host, a few parts ahead of what it says that it has kept, and then starts the workers that need
them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from realhf.cluster.messages import FilePiece, Kept, Message, StartWorker

AHEAD = 32
"""So many parts may be on the way to a host: they lie in the launcher's memory."""
KEPT_WITHIN_S = 60.0
"""A host that is there keeps a part within this time."""


@dataclass
class _Delivery:
    pieces: Iterator[FilePiece]
    start: StartWorker


class Dock:
    """Is where files for one host wait, and the workers that need them, in order. ``send`` gives a message of a kind to
    the host's agent. Nothing here waits: ``advance`` is called again and again. When the host cannot keep a file, none
    of the workers that wait is started."""

    def __init__(self, send: Callable[[str, Message], object]) -> None:
        self._send = send
        self._queue: deque[_Delivery] = deque()
        self._on_way = 0
        self._problem = ""
        self._moved = 0.0
        self._there: dict[str, int] = {}
        self.brought: set[str] = set()
        """Paths there of what has been brought, or is about to be."""

    def add(self, pieces: Iterator[FilePiece], start: StartWorker) -> None:
        """Bring parts of files, then start a worker."""
        self._queue.append(_Delivery(pieces, start))

    def has_kept(self, said: Kept) -> None:
        """Note what became of a part; the first that could not be kept says why."""
        self._on_way, self._moved = max(0, self._on_way - 1), time.monotonic()
        self._there[said.path] = said.size
        if said.problem and not self._problem:
            self._problem = f"cannot keep {said.path}: {said.problem} (--folder of its agent)"

    def advance(self) -> list[tuple[str, str]]:
        """Send what may be sent now. Returns the workers that cannot be started, each with what its host cannot do."""
        late = self._on_way > 0 and time.monotonic() - self._moved > KEPT_WITHIN_S
        if late:
            self._on_way, self._problem = 0, self._problem or f"has kept no part of a file for {KEPT_WITHIN_S:g} s"
        while self._queue and not self._problem and self._on_way < AHEAD:
            first = self._queue[0]
            try:
                piece = self._missing(first.pieces)
            except OSError as error:
                self._problem = f"cannot be given a file: {error}"
                break
            if piece is not None:
                self._moved = time.monotonic() if not self._on_way else self._moved
                self._on_way += 1
                self.brought.add(piece.path)
                self._send("file", piece)
            elif self._on_way:
                break  # the worker starts when everything before it is there
            else:
                self._queue.popleft()
                self._send("start", first.start)
        if not self._problem or self._on_way:
            return []
        failed, self._problem = [(name, self._problem) for name in self.withdraw()], ""
        self.brought.clear()
        return failed

    def _missing(self, pieces: Iterator[FilePiece]) -> FilePiece | None:
        """Return the next part that the host has not got already; the last of a file in any case."""
        for piece in pieces:
            if piece.last or piece.offset + len(piece.data) > self._there.get(piece.path, 0):
                return piece
        return None

    def withdraw(self) -> list[str]:
        """Start none of the workers that wait; their names."""
        names = [delivery.start.name for delivery in self._queue]
        self._queue.clear()
        return names
