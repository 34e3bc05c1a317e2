"""Follows a file of lines that another process appends to."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 8 * 2**20
"""How much is read at once, and the length of the longest line that is understood."""
_HEAD_BYTES = 512
"""A file that begins otherwise than before is another one, though it got the number of the one that was deleted."""


class LineTail:
    """Reads the whole lines that were added since the last look.

    ``epoch`` counts how often the file was replaced or cut short: lines that were read before then no longer count.
    What was read of a file that vanishes still counts. ``tail_bytes``: begin at most so far before the end of
    the file, but with its first line, which says what file it is.
    """

    def __init__(self, path: Path, *, tail_bytes: int | None = None) -> None:
        self.path = path
        self.epoch = 0
        self._tail_bytes = tail_bytes
        self._file_id: tuple[int, int] | None = None
        self._head = b""
        self._offset = 0

    def lines(self) -> list[bytes]:
        """Return the new whole lines without their ends. A torn last line waits for its rest. An absent file, and one
        that is no plain file, has no lines. Raises OSError when the file cannot be read."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        with os.fdopen(handle, "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                return []
            first: list[bytes] = []
            file_id, head = (about.st_dev, about.st_ino), file.read(_HEAD_BYTES)
            if file_id != self._file_id or about.st_size < self._offset or not head.startswith(self._head):
                self._begin(file_id)
                if self._tail_bytes is not None and about.st_size > self._tail_bytes:
                    file.seek(0)
                    first = [file.readline(CHUNK_BYTES).rstrip(b"\n")]
                    file.seek(max(file.tell(), about.st_size - self._tail_bytes) - 1)
                    file.readline(CHUNK_BYTES)
                    self._offset = file.tell()
            self._head = head[: about.st_size]
            file.seek(self._offset)
            return first + self._read(file, about.st_size)

    def _begin(self, file_id: tuple[int, int]) -> None:
        if self._file_id is not None:
            self.epoch += 1
        self._file_id, self._offset = file_id, 0

    def _read(self, file: BinaryIO, size: int) -> list[bytes]:
        found: list[bytes] = []
        while self._offset < size:
            chunk = file.read(min(CHUNK_BYTES, size - self._offset))
            end = chunk.rfind(b"\n") + 1
            if end == 0:
                if len(chunk) < CHUNK_BYTES:
                    break
                end = len(chunk)  # no line of ours is that long: step over it piece by piece
            else:
                found += chunk[: end - 1].split(b"\n")
            self._offset += end
            file.seek(self._offset)
        return [line for line in found if line]
