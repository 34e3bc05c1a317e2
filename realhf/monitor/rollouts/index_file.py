"""Reads an index as it grows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from realhf.monitor.rollouts.format import FAMILIES, FORMAT, PLAY, Header, Note, PlayLine, TrainLine, index_name
from realhf.monitor.rollouts.plain_file import open_plain

Line = PlayLine | TrainLine
_READ_BYTES = 16 * 2**20
_HEAD_BYTES = 200
"""So much of the header, with the name of its writer, tells a file from one that got the number of a deleted one."""
_LONGEST_LINE = 2**20
"""No writer writes a longer line; what goes on without an end is not gathered."""


class _Mark(msgspec.Struct):
    """Tells the kinds of lines apart that are not about a rollout."""

    rollouts: int | None = None
    note: str | None = None


class IndexFile:
    """Follows the index at ``path``. ``problem`` says why it cannot be read (another version of the format, no index),
    "" if it can; ``notes`` are what its writer said about the recording; ``bad_lines`` counts lines that make no
    sense."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header | None = None
        self.problem = ""
        self.notes: list[str] = []
        self.bad_lines = 0
        self._offset, self._inode = 0, -1
        self._rest = self._head = b""

    @property
    def torn(self) -> bool:
        """Whether the file ends within a line: it is being written, or its writer was killed."""
        return bool(self._rest)

    def replaced(self) -> bool:
        """Return whether the file is another one than was read, or shorter: then all of it is to be read anew. Raises
        OSError."""
        if self._inode < 0:
            return False
        with open_plain(self.path) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                return True
            return not file.read(_HEAD_BYTES).startswith(self._head)

    def more(self) -> list[Line]:
        """Return the lines that were completed since the last call. Raises OSError."""
        found: list[Line] = []
        with open_plain(self.path) as file:
            self._inode = os.fstat(file.fileno()).st_ino
            self._head = file.read(_HEAD_BYTES)
            file.seek(self._offset)
            while not self.problem and (chunk := file.read(_READ_BYTES)):
                self._offset += len(chunk)
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                found += self._parsed(lines)
                if len(self._rest) > _LONGEST_LINE:
                    self.problem = self.problem or f"{self.path.name}: a line has no end"
                    self._rest = b""
        return found

    def _parsed(self, lines: Sequence[bytes]) -> list[Line]:
        found: list[Line] = []
        for line in lines:
            if self.header is None and not self.problem:
                self._begin(line)
            elif not self.problem and line:
                self._one(line, found)
        return found

    def _begin(self, line: bytes) -> None:
        try:
            version = msgspec.json.decode(line, type=_Mark).rollouts
            if version is None:
                self.problem = f"{self.path.name}: no index of rollouts"
            elif version != FORMAT:
                self.problem = f"{self.path.name}: format {version}; this version of realhf reads format {FORMAT}"
            else:
                self.header = msgspec.json.decode(line, type=Header)
                if self.header.family not in FAMILIES:
                    self.problem = f"{self.path.name}: unknown family {self.header.family[:40]!r}"
                elif index_name(self.header.family, self.header.writer) != self.path.name:
                    self.problem = f"{self.path.name}: its header names another writer, {self.header.writer[:80]!r}"
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.problem = f"{self.path.name}: no index of rollouts"

    def _one(self, line: bytes, found: list[Line]) -> None:
        assert self.header is not None
        decode = _PLAY if self.header.family == PLAY else _TRAIN
        try:
            found.append(decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            try:
                self.notes.append(_NOTE(line).note)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.bad_lines += 1


_PLAY = msgspec.json.Decoder(PlayLine).decode
_TRAIN = msgspec.json.Decoder(TrainLine).decode
_NOTE = msgspec.json.Decoder(Note).decode
