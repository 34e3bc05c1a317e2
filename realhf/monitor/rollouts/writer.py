"""Writes the rollouts of one process, on a thread of its own: whoever plays or trains waits for nothing.

A member is written before the lines that point at it, each with one call of the system: a process that is killed
leaves at most the beginning of a member that no line points at, and a line without its end.

Whatever goes wrong (a full disk, a folder that is gone, a rollout that cannot be described) is said once in the log;
the run goes on.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from isal import igzip

from realhf.api.experiment import ExperimentSpec, RunPlan
from realhf.api.trace import PlayedSample, RolloutRecorder, TrainedRows
from realhf.base import process_clock
from realhf.monitor.rollouts.format import FORMAT as VERSION
from realhf.monitor.rollouts.format import (
    INDEX_SUFFIX,
    PLAY,
    TRAIN,
    Header,
    Note,
    Place,
    index_name,
    rollouts_folder,
    shard_name,
)
from realhf.monitor.rollouts.records import Selection, play_records, selection_of, train_records

MEMBER_BYTES = 256 * 1024
"""JSON of one member; a record that is larger is a member of its own."""
SHARD_BYTES = 32 * 2**20
"""A member that would make a shard larger begins the next one."""
_LEVEL = 1
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


class Shards:
    """Gathers the records of one family until they fill a member, and writes them into ``folder``, which it makes in
    the run folder at the first record. Files of the same writer must not exist; ``flush`` and ``note`` may raise
    OSError, after which nothing more should be written."""

    def __init__(self, folder: Path, header: Header) -> None:
        self._folder, self._header = folder, header
        self._records: list[bytes] = []
        self._lines: list[Place] = []
        self._bare: list[Place] = []
        self._size = 0
        self._index: int | None = None
        self._shard: int | None = None
        self._number, self._offset = 0, 0
        self._encode = msgspec.json.Encoder().encode

    @property
    def waiting(self) -> bool:
        """Whether anything waits for ``flush``."""
        return bool(self._lines or self._bare)

    def add(self, record: bytes | None, line: Place) -> bool:
        """Take a line and its record, None for none; returns whether there is enough for a member."""
        if record is None:
            self._bare.append(line)
            return False
        self._records.append(record)
        self._lines.append(line)
        self._size += len(record) + 1
        return self._size >= MEMBER_BYTES

    def flush(self) -> None:
        """Write a member of the records, then the line of each and the lines that have no record."""
        records, lines, bare = self._records, self._lines, self._bare
        self._records, self._lines, self._bare, self._size = [], [], [], 0
        if records:
            member = igzip.compress(b"\n".join(records) + b"\n", compresslevel=_LEVEL)
            shard = self._shard_for(len(member))
            _write(shard, member)
            for number, line in enumerate(lines):
                line.shard, line.offset, line.bytes, line.line = self._number, self._offset, len(member), number
            self._offset += len(member)
        if lines or bare:
            self._index_lines([*lines, *bare])

    def note(self, text: str) -> None:
        """Say something about the recording, for who reads it."""
        self._index_lines([Note(note=text, time=time.time())])

    def close(self) -> None:
        """Close the files; harmless when repeated."""
        for file in (self._shard, self._index):
            if file is not None:
                os.close(file)
        self._shard = self._index = None

    def _index_lines(self, lines: Sequence[msgspec.Struct]) -> None:
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


FLUSH_S = 2.0
"""What was given to the writer is on the disk after about this long."""
MAX_WAITING_TOKENS = 8_000_000
"""Tokens of the samples and train steps that may wait to be written; what comes then is counted and left out."""
_CLOSE_S = 20.0
_log = logging.getLogger(__name__)


class RolloutWriter(RolloutRecorder):
    """Keeps rollouts in the folder of the run ``run_dir``, for the process ``worker``
    (``kind/index``), until the folder of rollouts, with the files of all processes, holds ``limit_bytes``. Close it at
    the end. ``by_step``: see ``Header``."""

    def __init__(
        self, run_dir: Path, worker: str, selection: Selection, *, limit_bytes: int, by_step: bool = True
    ) -> None:
        super().__init__(selection.share > 0)
        self._folder, self._selection, self._limit = rollouts_folder(run_dir), selection, limit_bytes
        name = worker.replace("/", "-")
        began = max(time.time(), _last_began(self._folder, name) + 0.002)
        writer = f"{name}.{int(began * 1000):011x}-{os.getpid():x}"
        self._families = {
            family: Shards(
                self._folder,
                Header(rollouts=VERSION, family=family, writer=writer, worker=worker, began=began, by_step=by_step),
            )
            for family in (PLAY, TRAIN)
        }
        self._odd: set[type] = set()
        self._waiting: queue.SimpleQueue[PlayedSample | TrainedRows | None] = queue.SimpleQueue()
        self._lock, self._tokens, self._left_out = threading.Lock(), 0, 0
        self._begun = False
        self._thread: threading.Thread | None = None
        if self.keeps:
            self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
            self._thread.start()

    def played(self, sample: PlayedSample) -> None:
        """See ``RolloutRecorder``."""
        if self.keeps and self._selection.chooses(sample.key or sample.id):
            self._give(sample)

    def trained(self, rows: TrainedRows) -> None:
        """See ``RolloutRecorder``."""
        if self.keeps:
            self._give(rows)

    def close(self) -> None:
        """Write what waits, within seconds; harmless when repeated."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self.keeps = False
        self._waiting.put(None)
        thread.join(_CLOSE_S)
        if thread.is_alive():
            _log.warning("the last rollouts were not written within %g s", _CLOSE_S)

    def _give(self, item: PlayedSample | TrainedRows) -> None:
        size = _tokens_of(item)
        with self._lock:
            room = not self._tokens or self._tokens + size <= MAX_WAITING_TOKENS
            self._tokens += size if room else 0
            self._left_out += not room
        if room:
            self._waiting.put(item)
        elif self._left_out == 1:
            _log.warning("the disk does not keep up: some rollouts are not recorded (%s)", self._folder)

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except _Full:
            self._stop(f"the folder of rollouts holds {self._limit} bytes (monitor.rollout_bytes)")
        except Exception as error:
            self._stop(f"{type(error).__name__}: {error}")
        finally:
            for family in self._families.values():
                with suppress(OSError):
                    family.close()

    def _round(self) -> bool:
        """Take what comes within the time of a flush and write it; returns whether there may be more."""
        due, more = process_clock.now() + FLUSH_S, True
        while more and (left := due - process_clock.now()) > 0:
            try:
                item = self._waiting.get(timeout=left)
            except queue.Empty:
                break
            more = item is not None
            if item is not None:
                self._take(item)
                with self._lock:
                    self._tokens -= _tokens_of(item)
        for family in self._families.values():
            self._flush(family)
        if not more and self._left_out:
            self._families[PLAY].note(f"{self._left_out} samples or steps were left out: the disk was too slow")
        return more

    def _take(self, item: PlayedSample | TrainedRows) -> None:
        """Describe an item; one that cannot be described is lost alone."""
        if isinstance(item, PlayedSample):
            with_tokens = self._selection.with_tokens(item.key or item.id)
            family, records = self._families[PLAY], play_records(item, with_tokens=with_tokens)
        else:
            family, records = self._families[TRAIN], train_records(item, self._selection)
        try:
            found: Iterable[tuple[bytes | None, Place]] = list(records)
        except Exception:
            if type(item) not in self._odd:
                _log.warning("rollouts that cannot be described are not recorded", exc_info=True)
            self._odd.add(type(item))
            return
        for record, line in found:
            if family.add(record, line):
                self._flush(family)

    def _flush(self, family: Shards) -> None:
        """Write what has gathered. Raises _Full at the bound of bytes, OSError."""
        if not family.waiting:
            return
        if _bytes_in(self._folder, begun=self._begun) >= self._limit:
            raise _Full
        family.flush()
        self._begun = True

    def _stop(self, reason: str) -> None:
        """Say why nothing more is recorded, in the log and, where that can be written, in the index."""
        self.keeps = False
        _log.warning("rollouts are no longer recorded: %s", reason)
        with suppress(OSError):
            self._families[PLAY].note(f"recording stopped: {reason}")


class _Full(Exception):
    """The folder holds as many bytes as it may."""


def _last_began(folder: Path, worker: str) -> float:
    """Return when the latest incarnation of a worker began, by the names of its files; 0 for the first one. The next
    one counts as later, though the clock was set back in between: readers go by this order."""
    named = re.compile(rf"\w+-{re.escape(worker)}\.([0-9a-f]{{11}})-[0-9a-f]+{re.escape(INDEX_SUFFIX)}")
    try:
        found = [named.fullmatch(name) for name in os.listdir(folder)]
    except OSError:
        return 0.0
    return max((int(match[1], 16) / 1000 for match in found if match), default=0.0)


def _tokens_of(item: PlayedSample | TrainedRows) -> int:
    if isinstance(item, TrainedRows):
        return len(item.mask)
    rows = [row for outcome in item.rollouts for row in (outcome, *outcome.branches)]
    return sum(len(row.prompt_ids) + len(row.completion_ids) for row in rows)


def _bytes_in(folder: Path, *, begun: bool) -> int:
    """Return how many bytes the files of a folder hold, 0 where it has not ``begun``. Raises FileNotFoundError when it
    is gone."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except FileNotFoundError:
        if begun:
            raise
        return 0


def open_rollouts(plan: RunPlan, worker: str, *, by_step: bool = True) -> RolloutWriter:
    """Return the recorder of the process ``kind/index``. ``by_step``: it works step by step, and not as samples
    come."""
    spec = plan.spec
    selection = selection_of(plan.monitor, n_seqs=spec.n_seqs, group_size=_group_size(spec))
    return RolloutWriter(spec.run_dir, worker, selection, limit_bytes=plan.monitor.rollout_bytes, by_step=by_step)


def _group_size(spec: ExperimentSpec) -> int:
    """Return how many rollouts a sample has, 1 where nothing says it."""
    if spec.rollout is not None:
        return spec.rollout.episodes.group_size
    return max((int(mfc.interface_args.get("group_size") or 1) for mfc in spec.mfcs), default=1)
