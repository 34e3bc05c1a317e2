"""Finds the trace files of all processes of a run and joins them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from realhf.base.files.whole_file import whole_file
from realhf.monitor.host_lanes import HostLanes
from realhf.monitor.trace_format import METADATA, TRACE_FILE, TRACE_FOLDER, TraceEvent, process_number

TAIL_BYTES = 16 * 2**20
"""How much is read at the end of each file for the timeline."""


def merge_traces(run_dir: Path) -> Path | None:
    """Write ``trace.json`` of a run, which Perfetto and chrome://tracing open, and return its path; None when nothing
    was traced. Lines that a kill cut off are left out."""
    files = trace_files(run_dir)
    if not files:
        return None
    path = run_dir / TRACE_FILE
    # Checking a raw value without building it takes a fraction of the time.
    check = msgspec.json.Decoder(msgspec.Raw).decode
    with whole_file(path) as partial, partial.open("wb") as target:
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
    """Yield an event for each process of a run over several hosts that says where it was."""
    lanes = HostLanes(run_dir)
    for process in sorted({process for host in lanes.hosts for process in lanes.processes(host)}):
        there = [host for host in lanes.hosts if process in lanes.processes(host)]
        labels = {"labels": "host " + ", ".join(there)}
        yield msgspec.json.encode(TraceEvent("process_labels", METADATA, 0, process_number(process), 0, args=labels))


def trace_files(run_dir: Path) -> list[Path]:
    """Return the trace files of a run: one or two per process, the older of two first."""
    return sorted(
        (run_dir / TRACE_FOLDER).glob("*.jsonl"), key=lambda path: (path.name.partition(".")[0], -len(path.suffixes))
    )
