"""Files in a run folder: evaluations, episodes, the graph, deaths of processes, and the hosts on
which they run.

A resumed run reads its evaluations from ``evaluations.json``. ``deaths.jsonl`` has a line for each
death of a process. ``placements.jsonl`` has a line for each start of a process on a host and for
each lost host; only schedulers for several hosts write it. Times are those of the launcher's clock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from realhf.base.files import dangling_link_error, open_plain, set_aside, write_atomic

if TYPE_CHECKING:
    from realhf.api.graph import DataFlowGraph

EVALUATIONS_FILE = "evaluations.json"
_log = logging.getLogger(__name__)


class Evaluations:
    """Evaluation reports of a run by the number of completed steps, stored in a file."""

    def __init__(self, run_dir: Path, warn: Callable[[str], None] = _log.warning) -> None:
        """Read the reports of a run, if their file exists.

        If the file cannot be parsed, it is renamed and ``warn`` is called with a message. Raises
        OSError.
        """
        self._path = run_dir / EVALUATIONS_FILE
        self._reports: dict[int, dict[str, Any]] = {}
        try:
            self._reports = _read_reports(self._path)
        except ValueError as error:
            new_path = set_aside(self._path)
            fate = f"was renamed to {new_path.name}; " if new_path else ""
            warn(
                f"{self._path} cannot be parsed ({error}) and {fate}the run continues without "
                f"its evaluations"
            )

    def report_at(self, step: int) -> dict[str, Any] | None:
        """Return the report after ``step`` steps (0: before training); None if there is none."""
        return self._reports.get(step)

    def all(self) -> list[tuple[int, dict[str, Any]]]:
        """Return (step, report) for all reports, in order of the steps."""
        return sorted(self._reports.items())

    def add(self, step: int, report: dict[str, Any]) -> None:
        """Add a report and write the file."""
        self._reports[step] = report
        self._write()

    def drop_after(self, step: int) -> None:
        """Delete the reports after ``step``, because the weights that they evaluate were lost when
        the run was killed."""
        self._reports = {known: report for known, report in self._reports.items() if known <= step}
        self._write()

    def _write(self) -> None:
        write_atomic(self._path, json.dumps(self._reports, indent=1))


def _read_reports(path: Path) -> dict[int, dict[str, Any]]:
    """Return the reports in a file by step; {} if the file does not exist.

    Raises ValueError if the file does not contain reports, and OSError.
    """
    try:
        content = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        if path.is_symlink():
            raise dangling_link_error(path) from None
        return {}
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("not a map of evaluations")
    for report in content.values():
        groups = report.values() if isinstance(report, dict) else [None]
        if not all(
            isinstance(group, dict) and all(isinstance(e, dict) for e in group.values())
            for group in groups
        ):
            raise ValueError("an entry is not an evaluation")
    return {int(step): report for step, report in content.items()}


EPISODES_FILE = "episodes.txt"
NONFINITE_FILE = "nonfinite.jsonl"


def append_episodes(run_dir: Path, step: int, episodes: Sequence[str]) -> None:
    """Append the transcripts of a step to ``episodes.txt``."""
    with (run_dir / EPISODES_FILE).open("a", encoding="utf-8") as file:
        for number, text in enumerate(episodes, start=1):
            file.write(f"===== step {step}, episode {number} =====\n{text.rstrip()}\n\n")


def write_graph_files(graph: DataFlowGraph, folder: Path) -> None:
    """Write ``graph.md``, which contains a table and a Mermaid diagram, and ``graph.dot`` into
    ``folder``."""
    text = f"```\n{graph.summary()}\n```\n\n```mermaid\n{graph.to_mermaid()}\n```\n"
    (folder / "graph.md").write_text(text, encoding="utf-8")
    (folder / "graph.dot").write_text(graph.to_dot(), encoding="utf-8")


DEATHS_FILE = "deaths.jsonl"
_MAX_DEATHS_BYTES = 4 << 20


class Death(msgspec.Struct, frozen=True):
    """Record of the death of a process."""

    at: float
    """Time in seconds since the epoch."""
    process: str
    """Name of the process."""
    why: str
    """Cause of the death."""
    then: str
    """Consequence: what happened to the work of the process."""


def record_death(run_dir: Path, process: str, why: str, then: str) -> None:
    """Append the death of a process to ``deaths.jsonl``. Errors are ignored, because a full disk
    must not end the run."""
    texts = (text.encode(errors="replace").decode() for text in (process, why, then))
    with contextlib.suppress(OSError):
        _append_line(run_dir / DEATHS_FILE, Death(time.time(), *texts))


def read_deaths(run_dir: Path) -> list[Death]:
    """Return the recorded deaths of processes, in order."""
    return _read_rows(run_dir / DEATHS_FILE, Death, _MAX_DEATHS_BYTES)


PLACEMENTS_FILE = "placements.jsonl"
LAUNCHER = "launcher"
"""Name of the launcher's own machine. Processes without a recorded placement run on it."""
_MAX_PLACEMENTS_BYTES = 16 << 20


class Placement(msgspec.Struct, omit_defaults=True):
    """Record of an event of a host: the start of a process, the loss of the host, or its
    versions."""

    at: float
    """Time in seconds since the epoch."""
    host: str
    process: str = ""
    """Process that was started; "" for other events."""
    lost: str = ""
    """Why the host was lost; "" for other events."""
    made_of: Mapping[str, str] = {}
    """Digest of the package's files on the host, and versions of Python and packages, by name."""


def record_placement(
    run_dir: Path, host: str, process: str = "", *, lost: str = "", made_of: Mapping[str, str] = {}
) -> None:
    """Append an event of a host to ``placements.jsonl``. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    _append_line(run_dir / PLACEMENTS_FILE, Placement(time.time(), host, process, lost, made_of))


class HostLanes:
    """Hosts on which a run's processes have run over time.

    ``hosts``: names of all hosts on which processes have run, the launcher's machine first.
    ``lost``: (microseconds since the epoch, host, reason) for each lost host. Both are empty for a
    run on one machine.
    """

    def __init__(self, run_dir: Path) -> None:
        self._starts: dict[str, list[tuple[int, str]]] = {}
        self.lost: list[tuple[int, str, str]] = []
        for row in _read_rows(run_dir / PLACEMENTS_FILE, Placement, _MAX_PLACEMENTS_BYTES):
            moment = round(row.at * 1e6)
            if row.process:
                self._starts.setdefault(row.process, []).append((moment, row.host))
            elif not row.made_of:
                self.lost.append((moment, row.host, row.lost))
        for starts in self._starts.values():
            starts.sort()
        names = {host for starts in self._starts.values() for _, host in starts}
        self.hosts = sorted(names, key=lambda name: (name != LAUNCHER, name))

    def host_at(self, process: str, moment: int) -> str:
        """Return the host on which a process ran at a time (``moment``, in microseconds since the
        epoch); "" for a run on one machine.

        It is the host of the last start before that time. If there is none, because clocks differ,
        it is the host of the first start.
        """
        starts = self._starts.get(process)
        if not starts:
            return LAUNCHER if self.hosts else ""
        return starts[max(0, bisect_right(starts, moment, key=lambda start: start[0]) - 1)][1]

    def processes(self, host: str) -> list[str]:
        """Return the names of all processes that have run on a host, sorted."""
        return sorted(
            process
            for process, starts in self._starts.items()
            if any(at == host for _, at in starts)
        )


_Row = TypeVar("_Row", bound=msgspec.Struct)


def _append_line(path: Path, row: msgspec.Struct) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(row) + b"\n")


def _read_rows(path: Path, kind: type[_Row], max_bytes: int) -> list[_Row]:
    """Return the valid rows of a file. The last line may be truncated if a process was killed."""
    try:
        with open_plain(path) as file:
            lines = file.read(max_bytes).splitlines()
    except OSError:
        return []
    decode = msgspec.json.Decoder(kind).decode
    rows = []
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            rows.append(decode(line))
    return rows
