"""Reader of a run's rollouts, which also works during the run. It reads all index lines, but
records only on request."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from realhf.base.files import LineTail, open_plain
from realhf.monitor.rollouts.format import (
    FAMILIES,
    FORMAT,
    INDEX_SUFFIX,
    NO_SHARD,
    PLAY,
    TRAIN,
    Header,
    IndexNote,
    PlayLine,
    TrainLine,
    decode_record,
    index_name,
    rollouts_folder,
    shard_name,
)

Line = PlayLine | TrainLine
_MAX_LINE_BYTES = 2**20
"""Maximum length of an index line in bytes. Writers do not write longer ones."""


class _Version(msgspec.Struct):
    """Format version in the first line of an index."""

    rollouts: int | None = None


class IndexFile:
    """Incremental reader of the index at ``path``.

    ``problem``: why the file cannot be read (for example because of another format version), or "".
    ``notes``: the writer's notes about the recording. ``bad_lines``: number of malformed lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header | None = None
        self.problem = ""
        self.notes: list[str] = []
        self.bad_lines = 0
        self._tail = LineTail(path)

    @property
    def torn(self) -> bool:
        """Whether the file ends within a line, because it is being written or its writer was
        killed."""
        return bool(self._tail.torn)

    @property
    def replaced(self) -> bool:
        """Whether the file was replaced or truncated since the last read, so that it must be read
        from the start."""
        return self._tail.epoch > 0

    def read_new_lines(self) -> list[Line]:
        """Return the lines that were completed since the last call; [] if the file was
        ``replaced``. Raises OSError."""
        lines: list[Line] = []
        for line in self._tail.lines():
            if self.replaced or self.problem:
                return []
            if self.header is None:
                self._read_header(line)
            else:
                self._parse_line(line, lines)
        if self._tail.torn > _MAX_LINE_BYTES:
            self.problem = self.problem or f"{self.path.name}: a line has no end"
        return lines

    def _read_header(self, line: bytes) -> None:
        try:
            version = msgspec.json.decode(line, type=_Version).rollouts
            if version is None:
                self.problem = f"{self.path.name}: no index of rollouts"
            elif version != FORMAT:
                self.problem = (
                    f"{self.path.name}: format {version}; this version of realhf reads format "
                    f"{FORMAT}"
                )
            else:
                self.header = msgspec.json.decode(line, type=Header)
                if self.header.family not in FAMILIES:
                    self.problem = f"{self.path.name}: unknown family {self.header.family[:40]!r}"
                elif index_name(self.header.family, self.header.writer) != self.path.name:
                    self.problem = (
                        f"{self.path.name}: its header names another writer, "
                        f"{self.header.writer[:80]!r}"
                    )
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.problem = f"{self.path.name}: no index of rollouts"

    def _parse_line(self, line: bytes, lines: list[Line]) -> None:
        assert self.header is not None
        decode = _PLAY if self.header.family == PLAY else _TRAIN
        try:
            lines.append(decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            try:
                self.notes.append(_NOTE(line).note)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.bad_lines += 1


_PLAY = msgspec.json.Decoder(PlayLine).decode
_TRAIN = msgspec.json.Decoder(TrainLine).decode
_NOTE = msgspec.json.Decoder(IndexNote).decode


_MAX_MEMBER_BYTES = 2**30
"""Maximum size of an uncompressed gzip member in bytes."""


class NoRecord(LookupError):
    """Raised if a record cannot be read. The message contains the reason."""


class RolloutRow(NamedTuple):
    """A rollout as it was played and as it was trained on."""

    play: PlayLine
    train: TrainLine | None
    """The trainer's index line; None if the rollout has not been trained on."""

    @property
    def step(self) -> int:
        """Step that trained on the rollout; if none has, the step that played it."""
        return self.train.step if self.train is not None else self.play.step

    @property
    def staleness(self) -> int | None:
        """Number of versions between the weights that sampled the oldest token and the weights that
        were trained on it; None if unknown."""
        return self.train.staleness if self.train is not None else None


class LineTable:
    """Index lines of one family, in the order in which they were read.

    ``lines`` only grows until ``clear`` empties it. ``newest`` contains the position in ``lines``
    of the newest line of each id.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.newest: dict[str, int] = {}
        self._headers: dict[int, Header] = {}
        self._first_steps: dict[int, tuple[Header, int]] = {}

    def clear(self) -> None:
        """Remove all lines."""
        self.__init__()

    def add(self, header: Header, lines: Sequence[Line]) -> None:
        """Add lines from one index, whose first line is ``header``."""
        known = self.lines
        newest = self.newest
        for line in lines[:1]:
            self._headers[line.writer] = header
        for line in lines:
            if header.by_step and not _is_evaluation(line):
                first = self._first_steps.get(line.writer)
                if first is None or line.step < first[1]:
                    self._first_steps[line.writer] = header, line.step
            other = newest.get(line.id)
            if other is None or self._follows(known[other], header, line):
                newest[line.id] = len(known)
            known.append(line)

    def _follows(self, other: Line, header: Header, line: Line) -> bool:
        """Return whether ``line`` was written after ``other``.

        Lines of two incarnations of one worker are ordered by the starts of the incarnations,
        because the clock may have been set back between them. All other lines are ordered by their
        time.
        """
        earlier = self._headers[other.writer]
        if earlier.worker == header.worker and earlier.began != header.began:
            return earlier.began < header.began
        return other.time <= line.time

    def valid_lines(self) -> Iterator[Line]:
        """Yield the valid lines. A line is valid if it is the newest of its id and no resumed run
        has repeated its step.

        The step was repeated if a later incarnation of the worker began at that step or an earlier
        one.
        """
        last: dict[int, int] = {}
        for writer, (own, _) in self._first_steps.items():
            later = [
                first
                for other, first in self._first_steps.values()
                if other.worker == own.worker and other.began > own.began
            ]
            if later:
                last[writer] = min(later)
        for number in self.newest.values():
            line = self.lines[number]
            limit = last.get(line.writer)
            if limit is None or line.step < limit or _is_evaluation(line):
                yield line


class RolloutStore:
    """Rollouts in ``folder``, which is a run folder or its folder ``rollouts``. Nothing is read
    until ``refresh`` is called.

    ``epoch`` counts how often everything was read from the start because files were replaced.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = rollouts_folder(Path(folder))
        self.play = LineTable()
        self.train = LineTable()
        self.epoch = 0
        self._indexes: list[IndexFile] = []
        self._missing = False
        self._cached_member: tuple[tuple[int, int, int, int], list[bytes]] | None = None

    @property
    def problems(self) -> list[str]:
        """Problems of the folder, and the writers' notes about the recording, one sentence each."""
        if self._missing:
            return [
                f"{self.folder}: there are no rollouts (recording is off, has not begun, or the "
                "folder was removed)"
            ]
        problems = [index.problem for index in self._indexes if index.problem]
        problems += [
            f"{index.path.name}: {note}" for index in self._indexes for note in index.notes
        ]
        problems += [
            f"{index.path.name}: {index.bad_lines} lines make no sense and are left out"
            for index in self._indexes
            if index.bad_lines
        ]
        return problems

    @property
    def torn(self) -> list[str]:
        """Names of the index files that end within a line, because the run is in progress or a
        process was killed."""
        return [index.path.name for index in self._indexes if index.torn]

    def refresh(self) -> int:
        """Read the lines that were added since the last call; return their number.

        If a file was replaced, all files are read from the start. Errors are not raised but added
        to ``problems``.
        """
        try:
            candidates = [
                path for path in self.folder.iterdir() if path.name.endswith(INDEX_SUFFIX)
            ]
            names = sorted(path for path in candidates if path.is_file())
        except OSError:
            if not self._missing:
                self._reset()
            self._missing = True
            return 0
        self._missing = False
        missing = {index.path for index in self._indexes} - set(names)
        added = 0 if missing else self._read_indexes(names)
        if missing or any(index.replaced for index in self._indexes):
            self._reset()
            added = self._read_indexes(names)
        return added

    def rows(self) -> Iterator[RolloutRow]:
        """Yield the valid rollouts, each with its training data."""
        trained = {
            line.id: line for line in self.train.valid_lines() if isinstance(line, TrainLine)
        }
        for line in self.play.valid_lines():
            if isinstance(line, PlayLine):
                yield RolloutRow(line, trained.get(line.id) if line.split == TRAIN else None)

    def find(self, id: str) -> RolloutRow | None:
        """Return the rollout with this id; None if there is none."""
        number = self.play.newest.get(id)
        train_number = self.train.newest.get(id)
        if number is None:
            return None
        line = self.play.lines[number]
        trained = None if train_number is None else self.train.lines[train_number]
        assert isinstance(line, PlayLine)
        return RolloutRow(line, trained if isinstance(trained, TrainLine) else None)

    def group(self, sample: str) -> list[RolloutRow]:
        """Return the rollouts of a sample in the order of their rows."""
        rollouts = []
        row = 0
        while (rollout := self.find(f"{sample}/{row}")) is not None:
            rollouts.append(rollout)
            row += 1
        return rollouts

    def record(self, line: Line) -> dict[str, Any]:
        """Return the record to which an index line refers. Raises NoRecord if there is none, or if
        its file is missing or damaged."""
        try:
            return _parse_record(self.member(line), line)
        except (ValueError, RecursionError) as error:
            raise NoRecord(f"{line.id}: its shard is damaged: {error}") from error

    def member(self, line: Line) -> list[bytes]:
        """Return the JSON lines in the gzip member that contains the record of an index line.
        Raises NoRecord."""
        if line.shard == NO_SHARD:
            raise NoRecord(f"{line.id}: no record was kept")
        if not 0 <= line.writer < len(self._indexes):
            raise NoRecord(f"{line.id}: it was read before the folder was replaced")
        header = self._indexes[line.writer].header
        if header is None:
            raise NoRecord(f"{line.id}: it was read before the folder was replaced")
        path = self.folder / shard_name(header.family, header.writer, line.shard)
        try:
            return self._member_lines(path, line)
        except OSError as error:
            raise NoRecord(f"{line.id}: {path.name}: {error.strerror}") from error
        except (zlib.error, ValueError) as error:
            raise NoRecord(
                f"{line.id}: {path.name} is damaged at {line.offset}: {error}"
            ) from error

    def _member_lines(self, path: Path, line: Line) -> list[bytes]:
        """Return the lines of an uncompressed member. The last member is cached, because
        neighbouring records are often read one after the other."""
        key = (line.writer, line.shard, line.offset, line.bytes)
        known = self._cached_member
        if known is None or known[0] != key:
            known = self._cached_member = key, _read_member(path, line).split(b"\n")
        return known[1]

    def _read_indexes(self, paths: Sequence[Path]) -> int:
        known = {index.path for index in self._indexes}
        self._indexes += [IndexFile(path) for path in paths if path not in known]
        return sum(self._read_index(number, index) for number, index in enumerate(self._indexes))

    def _read_index(self, number: int, index: IndexFile) -> int:
        try:
            lines = index.read_new_lines()
        except OSError:
            return 0
        if index.header is None or not lines:
            return 0
        for line in lines:
            line.writer = number
        (self.play if index.header.family == PLAY else self.train).add(index.header, lines)
        return len(lines)

    def _reset(self) -> None:
        self.epoch += 1
        self._indexes = []
        self._cached_member = None
        self.play.clear()
        self.train.clear()


def _is_evaluation(line: Line) -> bool:
    return isinstance(line, PlayLine) and line.split != TRAIN


def _read_member(path: Path, line: Line) -> bytes:
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if line.offset < 0 or line.bytes < 0 or line.offset + line.bytes > size:
            raise ValueError("the file is shorter than its index says")
        file.seek(line.offset)
        member = file.read(line.bytes)
    unpacker = zlib.decompressobj(wbits=31)
    text = unpacker.decompress(member, _MAX_MEMBER_BYTES)
    if not unpacker.eof:
        raise ValueError("the member does not end where its index says")
    return text


def _parse_record(lines: Sequence[bytes], line: Line) -> dict[str, Any]:
    record = decode_record(lines[line.line]) if 0 <= line.line < len(lines) else None
    if not isinstance(record, dict) or record.get("id") != line.id:
        raise ValueError("another record lies there")
    return record
