"""Appends records of one family of one process to its shards, and a line for each to its index.

A member is written before the lines that point at it, each with one call of the system: a process that is killed
leaves at most the beginning of a member that no line points at, and a line without its end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from isal import igzip

from realhf.monitor.rollouts.format import Header, Note, Place, index_name, shard_name

SHARD_BYTES = 32 * 2**20
"""A member that would make a shard larger begins the next one."""
_LEVEL = 1
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


class Shards:
    """Writes into ``folder``, which it makes in the run folder at the first record. Files of the same writer must not
    exist; every method may raise OSError, after which nothing more should be written."""

    def __init__(self, folder: Path, header: Header) -> None:
        self._folder, self._header = folder, header
        self._index: int | None = None
        self._shard: int | None = None
        self._number, self._offset = 0, 0
        self._encode = msgspec.json.Encoder().encode

    def append(self, records: Sequence[bytes], lines: Sequence[Place], bare: Sequence[Place] = ()) -> None:
        """Write a member of records, then the line of each and the lines ``bare`` that have no record."""
        if records:
            member = igzip.compress(b"\n".join(records) + b"\n", compresslevel=_LEVEL)
            shard = self._shard_for(len(member))
            _write(shard, member)
            for number, line in enumerate(lines):
                line.shard, line.offset, line.bytes, line.line = self._number, self._offset, len(member), number
            self._offset += len(member)
        if lines or bare:
            self._add([*lines, *bare])

    def note(self, text: str) -> None:
        """Say something about the recording, for who reads it."""
        self._add([Note(note=text, time=time.time())])

    def close(self) -> None:
        """Close the files; harmless when repeated."""
        for file in (self._shard, self._index):
            if file is not None:
                os.close(file)
        self._shard = self._index = None

    def _add(self, lines: Sequence[msgspec.Struct]) -> None:
        begin = b""
        if self._index is None:
            self._folder.mkdir(exist_ok=True)
            self._index = os.open(self._folder / index_name(self._header.family, self._header.writer), _FLAGS, 0o644)
            begin = self._encode(self._header) + b"\n"
        _write(self._index, begin + b"".join(self._encode(line) + b"\n" for line in lines))

    def _shard_for(self, size: int) -> int:
        """Return the shard that takes the next member: a new one where it would grow too large."""
        if self._shard is not None and self._offset and self._offset + size > SHARD_BYTES:
            os.close(self._shard)
            self._shard, self._number = None, self._number + 1
        if self._shard is None:
            if self._number == 0:  # later the folder is there, unless somebody took it away
                self._folder.mkdir(exist_ok=True)
            name = shard_name(self._header.family, self._header.writer, self._number)
            self._shard, self._offset = os.open(self._folder / name, _FLAGS, 0o644), 0
        return self._shard


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
