"""Trace of a run: one file per process while it runs, and ``trace.json`` for Perfetto at its end.

Numbers of processes and lines are computed from their names, so that a restarted worker continues
its line, and files can be joined without being parsed. Trace viewers drop spans of one line that
overlap without being nested, as those of concurrent coroutines do; ``Lanes`` moves the later one to
another lane.

python -m realhf.monitor.trace RUN_DIR        # trace.json out of what is there
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

import realhf
from realhf.api.trace import Tracer
from realhf.base.files import atomic_file
from realhf.monitor.run_files import HostLanes

TRACE_FOLDER = "trace"
TRACE_FILE = "trace.json"
COMPLETE = "X"
INSTANT = "i"
COUNTER = "C"
METADATA = "M"
_ORDER = ("launch", "master", "model_worker", "rollout_worker", "generation", "env")


class TraceEvent(msgspec.Struct, omit_defaults=True, gc=False):
    """An event in Chrome's trace format."""

    name: str
    ph: str
    """Phase: COMPLETE, INSTANT, COUNTER or METADATA."""
    ts: int
    """Time in microseconds since the epoch."""
    pid: int
    tid: int
    """Number of the timeline's line."""
    dur: int | None = None
    """Duration of a COMPLETE event in microseconds."""
    s: str | None = None
    """Scope of an INSTANT event."""
    args: dict[str, Any] | None = None


def process_number(process: str) -> int:
    """Return the number of the process ``kind/index``: a multiple of 1000 that depends on the kind,
    plus the index."""
    kind, _, index = process.partition("/")
    if kind in _ORDER and (not index or (index.isdecimal() and int(index) < 1000)):
        return 1000 * (1 + display_rank(process)) + int(index or 0)
    return 1_000_000 + zlib.crc32(process.encode()) % 2**30


def line_number(process: str, line: str) -> int:
    """Return the number of a process's line: a 31-bit hash of both names, so that lines of
    different processes have different numbers."""
    return zlib.crc32(f"{process}\n{line}".encode(errors="replace")) & 0x7FFFFFFF


def trace_path(run_dir: Path, process: str) -> Path:
    """Return the path of the trace file of the process ``kind/index``."""
    return run_dir / TRACE_FOLDER / f"{process.replace('/', '-')}.jsonl"


def display_rank(process: str) -> int:
    """Return the position of a process's kind in the order of display."""
    kind = process.partition("/")[0]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def process_events(process: str) -> list[TraceEvent]:
    """Return the events that set a process's name and its position in the display."""
    pid = process_number(process)
    return [
        TraceEvent("process_name", METADATA, 0, pid, 0, args={"name": process}),
        TraceEvent(
            "process_sort_index", METADATA, 0, pid, 0, args={"sort_index": display_rank(process)}
        ),
    ]


def line_event(process: str, line: str) -> TraceEvent:
    """Return the event that sets the name of a process's line."""
    return TraceEvent(
        "thread_name",
        METADATA,
        0,
        process_number(process),
        line_number(process, line),
        args={"name": line},
    )


MAX_LANES = 64
"""Maximum number of lanes of a line. Further overlapping spans are put into the last lane."""
MAX_REMEMBERED_SPANS = 256
"""Number of a lane's last spans that are remembered, because a longer span may still enclose
them."""


class Lanes:
    """Assigns the spans of each line to lanes, within which spans do not overlap unless nested.
    Spans must arrive approximately in the order of their ends."""

    def __init__(self) -> None:
        self._lanes: dict[str, list[deque[tuple[int, int]]]] = {}

    def assign(self, line: str, began: int, ended: int) -> str:
        """Return the name of the lane for a span: the name of the line for its first lane, or that
        name with a number."""
        lanes = self._lanes.setdefault(line, [])
        number = next(
            (number for number, lane in enumerate(lanes, start=1) if _fits(lane, began, ended)),
            min(len(lanes) + 1, MAX_LANES),
        )
        if number > len(lanes):
            lanes.append(deque(maxlen=MAX_REMEMBERED_SPANS))
        lane = lanes[number - 1]
        while lane and lane[-1][0] >= began and lane[-1][1] <= ended:
            lane.pop()
        lane.append((began, ended))
        return line if number == 1 else f"{line} ({number})"


def _fits(lane: deque[tuple[int, int]], began: int, ended: int) -> bool:
    """Return whether a span fits into a lane, which means that it encloses the last spans or begins
    after them."""
    for first, last in reversed(lane):
        if last <= began:
            return True
        if not (began <= first and last <= ended):
            return False
    return True


TAIL_BYTES = 16 * 2**20
"""Number of bytes at the end of each file that are read for the timeline."""


def merge_traces(run_dir: Path) -> Path | None:
    """Merge the trace files of a run into ``trace.json``, for Perfetto or chrome://tracing. Return
    its path, or None if there are no trace files.

    Lines that were truncated when a process was killed are skipped. Raises OSError.
    """
    files = trace_files(run_dir)
    if not files:
        return None
    path = run_dir / TRACE_FILE
    # Validating a raw value takes a fraction of the time that decoding it would take.
    check = msgspec.json.Decoder(msgspec.Raw).decode
    with atomic_file(path) as partial, partial.open("wb") as target:
        target.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        first = True
        for file in files:
            with file.open("rb") as source:
                for line in source:
                    try:
                        event = bytes(check(line))
                    except msgspec.DecodeError:
                        continue
                    target.write(event if first else b",\n" + event)
                    first = False
        for event in _host_labels(run_dir):
            target.write(event if first else b",\n" + event)
            first = False
        target.write(b"\n]}\n")
    return path


def _host_labels(run_dir: Path) -> Iterator[bytes]:
    """For a run on several hosts, yield an event for each process that labels it with its hosts."""
    lanes = HostLanes(run_dir)
    for process in sorted({process for host in lanes.hosts for process in lanes.processes(host)}):
        hosts = [host for host in lanes.hosts if process in lanes.processes(host)]
        labels = {"labels": "host " + ", ".join(hosts)}
        yield msgspec.json.encode(
            TraceEvent("process_labels", METADATA, 0, process_number(process), 0, args=labels)
        )


def trace_files(run_dir: Path) -> list[Path]:
    """Return the trace files of a run. A process has one or two files, of which the older comes
    first."""
    return sorted(
        (run_dir / TRACE_FOLDER).glob("*.jsonl"),
        key=lambda path: (path.name.partition(".")[0], -len(path.suffixes)),
    )


LIMIT_BYTES = 64 * 2**20
FLUSH_INTERVAL_S = 0.5
MAX_PENDING = 200_000
"""Maximum number of unwritten events. Further ones are dropped and counted."""
_Record = tuple[str, str, int, int, str, dict[str, Any] | None]
"""An unwritten event: (phase, name, begin in ns, end in ns, line, arguments)."""
logger = logging.getLogger(__name__)


class TraceWriter(Tracer):
    """Tracer that appends events to the file ``path``.

    A thread writes the events regularly, so a killed process loses at most the last half second.
    The newest ``limit_bytes`` are kept in two files: ``path`` and, for the older half, ``path``
    with the suffix ``.old.jsonl``. If the file cannot be written, the trace is lost but the run
    continues.
    """

    def __init__(self, path: Path, process: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
        """Open ``path`` and start the thread. Raises OSError if ``path`` cannot be opened."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _TraceFile(path, process, limit_bytes)
        self._pending: deque[_Record] = deque()
        self._dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_writer, name="trace", daemon=True)
        self._thread.start()

    def span(self, name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
        """See ``Tracer``."""
        return _SpanContext(self, name, args or None)

    def record(
        self, name: str, began_ns: int, ended_ns: int, *, line: str = "", **args: Any
    ) -> None:
        """See ``Tracer``."""
        self._add(
            (
                COMPLETE,
                name,
                began_ns,
                ended_ns,
                line or threading.current_thread().name,
                args or None,
            )
        )

    def instant(self, name: str, **args: Any) -> None:
        """See ``Tracer``."""
        now = time.time_ns()
        self._add((INSTANT, name, now, now, threading.current_thread().name, args or None))

    def counter(self, name: str, **values: float) -> None:
        """See ``Tracer``."""
        now = time.time_ns()
        self._add((COUNTER, name, now, now, "counters", values))

    def close(self) -> None:
        """Write the remaining events. Later events are ignored."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(timeout=10.0)
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _add(self, record: _Record) -> None:
        if len(self._pending) < MAX_PENDING:
            self._pending.append(record)
        else:
            self._dropped += 1

    def _run_writer(self) -> None:
        while not self._closing.wait(FLUSH_INTERVAL_S):
            self._write_pending()
        self._write_pending()

    def _write_pending(self) -> None:
        records: list[_Record] = []
        with contextlib.suppress(IndexError):
            while len(records) < MAX_PENDING:
                records.append(self._pending.popleft())
        if self._dropped:
            now = time.time_ns()
            records.append(
                (INSTANT, "events left out", now, now, "trace", {"count": self._dropped})
            )
            self._dropped = 0
        if records:
            # ``Lanes`` needs the spans in the order of their ends. Of two spans with the same end,
            # the inner one must come first.
            records.sort(key=lambda record: (record[3], -record[2]))
            self._file.write(records)


def open_trace(run_dir: Path, process: str) -> TraceWriter:
    """Open the tracer for the process ``kind/index`` of a run."""
    return TraceWriter(trace_path(run_dir, process), process)


class _SpanContext:
    """Context manager that records a span. It is a class because a generator would be slower."""

    __slots__ = ("_args", "_began", "_name", "_writer")

    def __init__(self, writer: TraceWriter, name: str, args: dict[str, Any] | None) -> None:
        self._writer = writer
        self._name = name
        self._args = args
        self._began = 0

    def __enter__(self) -> None:
        self._began = time.time_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        args = self._args if kind is None else {**(self._args or {}), "error": kind.__name__}
        line = threading.current_thread().name
        self._writer._add((COMPLETE, self._name, self._began, time.time_ns(), line, args))


class _TraceFile:
    """Trace file of one process, with rotation. Not thread-safe."""

    def __init__(self, path: Path, process: str, limit_bytes: int) -> None:
        self._path = path
        self._process = process
        self._pid = process_number(process)
        self._max_file_bytes = limit_bytes // 2
        self._encode = msgspec.json.Encoder(enc_hook=str).encode
        self._lines: dict[str, int] = {}
        self._lanes = Lanes()
        self._failed = False
        self._open()

    def write(self, records: list[_Record]) -> None:
        """Append events to the file. Events that cannot be written are lost; a warning is logged
        once."""
        try:
            chunk = self._encode_records(records)
            if self._size and self._size + len(chunk) > self._max_file_bytes:
                self._rotate()
                chunk = self._encode_records(records)
            self._append(chunk)
        except (
            OSError,
            ValueError,
        ) as error:  # ValueError: the file is closed because a rotation failed
            if not self._failed:
                logger.warning("the trace %s cannot be written: %s", self._path, error)
            self._failed = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._size = self._file.tell()
        self._lines.clear()
        # End a line that was truncated when a process was killed. Otherwise it would corrupt the
        # next one.
        start = b"\n" if self._size else b""
        self._append(
            start + b"".join(self._encode(event) + b"\n" for event in process_events(self._process))
        )

    def _rotate(self) -> None:
        self._file.close()
        os.replace(self._path, self._path.with_suffix(".old.jsonl"))
        self._open()

    def _append(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            written = self._file.write(view)
            self._size += written
            view = view[written:]

    def _encode_records(self, records: list[_Record]) -> bytes:
        parts: list[bytes] = []
        for phase, name, began_ns, ended_ns, line, args in records:
            if phase == COMPLETE:
                line = self._lanes.assign(line, began_ns, ended_ns)
            tid = self._lines.get(line)
            if tid is None:
                tid = self._lines[line] = line_number(self._process, line)
                parts.append(self._encode(line_event(self._process, line)))
            if phase == COUNTER and args:
                args = {key: value for key, value in args.items() if math.isfinite(value)}
            began = began_ns // 1000
            event = TraceEvent(name, phase, began, self._pid, tid, args=args)
            if phase == COMPLETE:
                event.dur = max(0, ended_ns // 1000 - began)
            elif phase == INSTANT:
                event.s = "p"
            parts.append(self._encode_event(event))
        parts.append(b"")
        return b"\n".join(parts)

    def _encode_event(self, event: TraceEvent) -> bytes:
        try:
            return self._encode(event)
        except Exception:
            # Arguments may contain anything: keys that are not strings, lone surrogates, infinite
            # numbers.
            event.args = {"unreadable": ascii(event.args)}
            event.name = ascii(event.name)
            return self._encode(event)


def main() -> int:
    """Write ``trace.json`` of the run folder named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("run_dir", type=Path)
    args = parser.parse_args()
    path = merge_traces(args.run_dir)
    if path is None:
        print(f"error: no trace in {args.run_dir}", file=sys.stderr)
        return 1
    print(
        f"{path} ({path.stat().st_size / 2**20:.1f} MiB): open it in https://ui.perfetto.dev or chrome://tracing"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
