"""Writer of one process's rollouts. It has its own thread, so that playing and training never wait
for it.

A member is written before the index lines that refer to it, each with one system call. So a killed
process leaves at most a truncated member without index lines, or a truncated index line.

Errors (a full disk, a removed folder, a rollout that cannot be encoded) are logged once, and the
run continues.
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
    IndexLine,
    IndexNote,
    index_name,
    rollouts_folder,
    shard_name,
)
from realhf.monitor.rollouts.records import Selection, build_selection, play_records, train_records

MEMBER_BYTES = 256 * 1024
"""Size of a member in bytes before compression. A larger record forms its own member."""
SHARD_BYTES = 32 * 2**20
"""Maximum size of a shard in bytes."""
_LEVEL = 1
"""Compression level for gzip."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


class ShardWriter:
    """Writer of the shards and the index of one family.

    ``folder`` is created when the first record is written. Files of the same writer must not exist
    yet. ``flush`` and ``note`` may raise OSError; after that, nothing more should be written.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self._folder = folder
        self._header = header
        self._records: list[bytes] = []
        self._lines: list[IndexLine] = []
        self._without_record: list[IndexLine] = []
        self._size = 0
        self._index: int | None = None
        self._shard: int | None = None
        self._number = 0
        self._offset = 0
        self._encode = msgspec.json.Encoder().encode

    @property
    def has_pending(self) -> bool:
        """Whether there are lines that have not been flushed."""
        return bool(self._lines or self._without_record)

    def add(self, record: bytes | None, line: IndexLine) -> bool:
        """Add an index line and its record, or None for no record. Return whether the pending
        records fill a member."""
        if record is None:
            self._without_record.append(line)
            return False
        self._records.append(record)
        self._lines.append(line)
        self._size += len(record) + 1
        return self._size >= MEMBER_BYTES

    def flush(self) -> None:
        """Write a member with the pending records, then the pending index lines, including those
        without a record."""
        records = self._records
        lines = self._lines
        bare = self._without_record
        self._records = []
        self._lines = []
        self._without_record = []
        self._size = 0
        if records:
            member = igzip.compress(b"\n".join(records) + b"\n", compresslevel=_LEVEL)
            shard = self._open_shard(len(member))
            _write(shard, member)
            for number, line in enumerate(lines):
                line.shard = self._number
                line.offset = self._offset
                line.bytes = len(member)
                line.line = number
            self._offset += len(member)
        if lines or bare:
            self._write_index_lines([*lines, *bare])

    def note(self, text: str) -> None:
        """Add a note about the recording to the index."""
        self._write_index_lines([IndexNote(note=text, time=time.time())])

    def close(self) -> None:
        """Close the files. May be called repeatedly."""
        for file in (self._shard, self._index):
            if file is not None:
                os.close(file)
        self._shard = self._index = None

    def _write_index_lines(self, lines: Sequence[msgspec.Struct]) -> None:
        begin = b""
        if self._index is None:
            self._folder.mkdir(exist_ok=True)
            self._index = os.open(
                self._folder / index_name(self._header.family, self._header.writer), _FLAGS, 0o644
            )
            begin = self._encode(self._header) + b"\n"
        _write(self._index, begin + b"".join(self._encode(line) + b"\n" for line in lines))

    def _open_shard(self, size: int) -> int:
        """Return the descriptor of the shard for the next member of ``size`` bytes. A new shard is
        opened if the current one would become too large."""
        if self._shard is not None and self._offset and self._offset + size > SHARD_BYTES:
            os.close(self._shard)
            self._shard = None
            self._number += 1
        if self._shard is None:
            # Create the folder only once: a folder that was removed during the run is not created
            # again.
            if self._number == 0:
                self._folder.mkdir(exist_ok=True)
            name = shard_name(self._header.family, self._header.writer, self._number)
            self._shard = os.open(self._folder / name, _FLAGS, 0o644)
            self._offset = 0
        return self._shard


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


FLUSH_S = 2.0
"""Seconds after which queued rollouts are written to disk."""
MAX_QUEUED_TOKENS = 8_000_000
"""Maximum number of tokens in queued samples and train steps. Further ones are dropped, and their
number is noted."""
_CLOSE_S = 20.0
"""Seconds that ``close`` waits for the thread to write the queue."""
_log = logging.getLogger(__name__)


class RolloutWriter(RolloutRecorder):
    """Recorder that writes the rollouts of the process ``worker`` (``kind/index``) into the run
    folder ``run_dir``.

    limit_bytes: total size of the folder of rollouts, with the files of all processes, at which
    recording stops. by_step: see ``Header``. The recorder must be closed.
    """

    def __init__(
        self,
        run_dir: Path,
        worker: str,
        selection: Selection,
        *,
        limit_bytes: int,
        by_step: bool = True,
    ) -> None:
        super().__init__(selection.share > 0)
        self._folder = rollouts_folder(run_dir)
        self._selection = selection
        self._limit = limit_bytes
        name = worker.replace("/", "-")
        began = max(time.time(), _find_last_start(self._folder, name) + 0.002)
        writer = f"{name}.{int(began * 1000):011x}-{os.getpid():x}"
        self._families = {
            family: ShardWriter(
                self._folder,
                Header(
                    rollouts=VERSION,
                    family=family,
                    writer=writer,
                    worker=worker,
                    began=began,
                    by_step=by_step,
                ),
            )
            for family in (PLAY, TRAIN)
        }
        self._failed_types: set[type] = set()
        self._waiting: queue.SimpleQueue[PlayedSample | TrainedRows | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._tokens = 0
        self._dropped = 0
        self._has_written = False
        self._thread: threading.Thread | None = None
        if self.keeps:
            self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
            self._thread.start()

    def record_played(self, sample: PlayedSample) -> None:
        """See ``RolloutRecorder``."""
        if self.keeps and self._selection.selects(sample.key or sample.id):
            self._enqueue(sample)

    def record_trained(self, rows: TrainedRows) -> None:
        """See ``RolloutRecorder``."""
        if self.keeps:
            self._enqueue(rows)

    def close(self) -> None:
        """Write the remaining queue, for at most ``_CLOSE_S`` seconds. May be called repeatedly."""
        thread = self._thread
        self._thread = None
        if thread is None:
            return
        self.keeps = False
        self._waiting.put(None)
        thread.join(_CLOSE_S)
        if thread.is_alive():
            _log.warning("the last rollouts were not written within %g s", _CLOSE_S)

    def _enqueue(self, item: PlayedSample | TrainedRows) -> None:
        size = _count_tokens(item)
        with self._lock:
            room = not self._tokens or self._tokens + size <= MAX_QUEUED_TOKENS
            self._tokens += size if room else 0
            self._dropped += not room
        if room:
            self._waiting.put(item)
        elif self._dropped == 1:
            _log.warning(
                "the disk does not keep up: some rollouts are not recorded (%s)", self._folder
            )

    def _run(self) -> None:
        try:
            while self._write_batch():
                pass
        except _FolderFull:
            self._stop(f"the folder of rollouts holds {self._limit} bytes (monitor.rollout_bytes)")
        except Exception as error:
            self._stop(f"{type(error).__name__}: {error}")
        finally:
            for family in self._families.values():
                with suppress(OSError):
                    family.close()

    def _write_batch(self) -> bool:
        """Process the items that arrive within ``FLUSH_S`` seconds and write them. Return False
        after the last item."""
        due = process_clock.now() + FLUSH_S
        more = True
        while more and (left := due - process_clock.now()) > 0:
            try:
                item = self._waiting.get(timeout=left)
            except queue.Empty:
                break
            more = item is not None
            if item is not None:
                self._add_records(item)
                with self._lock:
                    self._tokens -= _count_tokens(item)
        for family in self._families.values():
            self._flush(family)
        if not more and self._dropped:
            self._families[PLAY].note(
                f"{self._dropped} samples or steps were left out: the disk was too slow"
            )
        return more

    def _add_records(self, item: PlayedSample | TrainedRows) -> None:
        """Encode an item and add its records. An item that cannot be encoded is dropped with a
        warning."""
        records: Iterable[tuple[bytes | None, IndexLine]]
        if isinstance(item, PlayedSample):
            with_tokens = self._selection.selects_tokens(item.key or item.id)
            family = self._families[PLAY]
            records = play_records(item, with_tokens=with_tokens)
        else:
            family = self._families[TRAIN]
            records = train_records(item, self._selection)
        try:
            encoded = list(records)
        except Exception:
            if type(item) not in self._failed_types:
                _log.warning("rollouts that cannot be described are not recorded", exc_info=True)
            self._failed_types.add(type(item))
            return
        for record, line in encoded:
            if family.add(record, line):
                self._flush(family)

    def _flush(self, family: ShardWriter) -> None:
        """Write the pending records of a family. Raises _FolderFull when the folder's size limit is
        reached, and OSError."""
        if not family.has_pending:
            return
        if _count_bytes(self._folder, has_written=self._has_written) >= self._limit:
            raise _FolderFull
        family.flush()
        self._has_written = True

    def _stop(self, reason: str) -> None:
        """Stop recording, and write the reason to the log and, if possible, to the index."""
        self.keeps = False
        _log.warning("rollouts are no longer recorded: %s", reason)
        with suppress(OSError):
            self._families[PLAY].note(f"recording stopped: {reason}")


class _FolderFull(Exception):
    """Raised when the folder has reached its maximum size."""


def _find_last_start(folder: Path, worker: str) -> float:
    """Return the start time of the last incarnation of a worker, which is taken from its file
    names; 0 if there is none.

    Readers sort incarnations by start time, so the next one must have a later time even if the
    clock was set back.
    """
    pattern = re.compile(
        rf"\w+-{re.escape(worker)}\.([0-9a-f]{{11}})-[0-9a-f]+{re.escape(INDEX_SUFFIX)}"
    )
    try:
        matches = [pattern.fullmatch(name) for name in os.listdir(folder)]
    except OSError:
        return 0.0
    return max((int(match[1], 16) / 1000 for match in matches if match), default=0.0)


def _count_tokens(item: PlayedSample | TrainedRows) -> int:
    if isinstance(item, TrainedRows):
        return len(item.mask)
    rows = [row for outcome in item.rollouts for row in (outcome, *outcome.branches)]
    return sum(len(row.prompt_ids) + len(row.completion_ids) for row in rows)


def _count_bytes(folder: Path, *, has_written: bool) -> int:
    """Return the total size of the files in a folder in bytes; 0 if the folder does not exist
    because nothing was written yet (``has_written``).

    Raises FileNotFoundError if the folder was removed after a write.
    """
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except FileNotFoundError:
        if has_written:
            raise
        return 0


def open_rollouts(plan: RunPlan, worker: str, *, by_step: bool = True) -> RolloutWriter:
    """Return the recorder for the process ``worker`` (``kind/index``) of a run. by_step: see
    ``Header``."""
    spec = plan.spec
    selection = build_selection(plan.monitor, n_seqs=spec.n_seqs, group_size=_group_size(spec))
    return RolloutWriter(
        spec.run_dir, worker, selection, limit_bytes=plan.monitor.rollout_bytes, by_step=by_step
    )


def _group_size(spec: ExperimentSpec) -> int:
    """Return the number of rollouts per sample; 1 if the specification does not give it."""
    if spec.rollout is not None:
        return spec.rollout.episodes.group_size
    return max((int(mfc.interface_args.get("group_size") or 1) for mfc in spec.mfcs), default=1)
